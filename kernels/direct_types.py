"""What the ops of one NVLink domain share: structs of the C interface, sizes, and what a micro-batch carries along."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

from torch import Tensor

from .build import KernelError
from .library import library

MAX_RANKS = 72  # kMaxRanks of direct.cuh
MAX_CHUNK_ROWS = 32
NUM_WORDS = 4
PLACE_TOKENS = 32  # kPlaceTokens
MAX_TOKEN_BLOCKS = 128  # blocks of tokens whose counts are added up
_CHUNK_BYTES = 1 << 14  # short, so that many warps have one to move
_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


class PeerLayout(ctypes.Structure):
    """PeerLayout of direct.cuh."""

    _fields_ = [
        (name, _L)
        for name in (
            *("ready", "arrived", "counts", "push_flags", "place_flags", "back_flags"),
            *("push_places", "push_routes", "back_weights", "push_rows", "back_rows", "stop"),
        )
    ]


class Domain(ctypes.Structure):
    """Domain of direct.cuh."""

    _fields_ = [
        ("memory", _P * MAX_RANKS),
        ("at", PeerLayout),
        *((name, _I) for name in ("rank", "num_ranks", "num_experts", "num_local")),
        *((name, _I) for name in ("top_k", "max_tokens", "chunk_rows", "chunks")),
        *((name, _L) for name in ("row_bytes", "timeout_ns")),
        *((name, _P) for name in ("epoch", "fault")),
        ("where", _L),
        ("code_lost", _I),
    ]


class Exchange(ctypes.Structure):
    """Exchange of direct.cuh."""

    _fields_ = [
        *((name, _P) for name in ("ids", "route_rank", "unique", "block_counts", "bad_tokens", "plan")),
        *((name, _I) for name in ("num_tokens", "tokens_per_block", "num_blocks")),
        *((name, _I) for name in ("host_code", "host_value", "no_grad", "place")),
        ("row_capacity", _L),
        *((f"code_{name}", _I) for name in ("bad_ids", "non_finite", "overflow", "place", "no_grad")),
    ]


class Push(ctypes.Structure):
    """Push of direct.cuh."""

    _fields_ = [
        *((name, _P) for name in ("x", "ids", "weights", "route_rank", "block_counts", "unique", "plan")),
        *((name, _P) for name in ("places", "out", "row_index", "positions", "row_weights")),
        *((name, _L) for name in ("row_capacity", "unique_capacity", "row_bound")),
        *((name, _I) for name in ("num_tokens", "tokens_per_block", "send_blocks", "settle", "first", "expand")),
    ]


class Return(ctypes.Structure):
    """Return of direct.cuh."""

    _fields_ = [
        *((name, _P) for name in ("rows", "positions", "places", "unique", "ids", "row_weights", "weights", "out")),
        ("unique_capacity", _L),
        *((name, _I) for name in ("num_tokens", "send_blocks", "sum", "with_weights")),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes that all ranks share.

    Attributes:
        num_ranks, num_experts, top_k: R, E, K; R divides E.
        max_tokens: most tokens of one rank's micro-batch, below 2^24.
        row_bytes: of one row of H elements, a multiple of 16.
    """

    num_ranks: int
    num_experts: int
    top_k: int
    max_tokens: int
    row_bytes: int

    @property
    def num_local(self) -> int:
        """L."""
        return self.num_experts // self.num_ranks

    @property
    def chunk_rows(self) -> int:
        """Tokens whose rows share a flag; a power of two, so that their places share one, too."""
        return 1 << (max(1, min(MAX_CHUNK_ROWS, _CHUNK_BYTES // self.row_bytes)).bit_length() - 1)

    @property
    def chunks(self) -> int:
        """Flags of one (source, destination)."""
        return -(-self.max_tokens // self.chunk_rows)

    @property
    def plan_ints(self) -> int:
        """Length of a plan."""
        return self.num_experts + (3 + NUM_WORDS) * self.num_ranks + 2 * self.num_local + 3

    def layout(self) -> tuple[PeerLayout, int]:
        """Byte offsets in peer memory, and its size in bytes."""
        ranks, tokens = self.num_ranks, self.num_ranks * self.max_tokens
        columns = self.num_experts + ranks + NUM_WORDS
        sizes = {
            "ready": 4 * ranks,
            "arrived": 4 * ranks,
            "counts": 2 * 4 * ranks * columns,
            "push_flags": 4 * ranks * self.chunks,
            "place_flags": 4 * ranks * -(-self.max_tokens // PLACE_TOKENS),
            "back_flags": 4 * ranks * self.chunks,
            "push_places": 4 * tokens,
            "push_routes": 8 * tokens * self.top_k,
            "back_weights": 4 * tokens * self.top_k,
            "push_rows": tokens * self.row_bytes,
            "back_rows": tokens * self.row_bytes,
            "stop": 4,
        }
        at, offsets = 0, {}
        for name, size in sizes.items():
            offsets[name] = at
            at += -(-size // 256) * 256  # parts that different ranks write share no line
        return PeerLayout(**offsets), at


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """Fault codes as the sticky record and the words carry them; the caller's numbers."""

    bad_ids: int
    non_finite: int
    overflow: int
    place: int
    no_grad: int
    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """What the exchange of counts leaves for the first push.

    Attributes:
        route_rank: int32 [T, K], rank of each route among its block's routes to its expert, -1 where none.
        block_counts: int32 [blocks, E + R + 1], counts of earlier blocks.
        tokens_per_block: how many tokens were ranked together.
    """

    route_rank: Tensor
    block_counts: Tensor
    tokens_per_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What `Peers.push` leaves of a micro-batch's first push, for its experts and for later passes.

    Attributes:
        rows: [unique_capacity, H], or [row_capacity, H] where expanded; behind the last row nothing is written.
        row_index: int32 [row_capacity], unique row of each expert row, -1 behind the last, and where an overflow (a
            fault) left its token without one.
        positions: int32 [unique_capacity, K], expert rows of each unique row, -1 where none.
        row_weights: float32 [row_capacity], not written behind the last row; 0 where a row's token has no unique row.
    """

    rows: Tensor
    row_index: Tensor
    positions: Tensor
    row_weights: Tensor


@dataclass(slots=True, kw_only=True)
class Trip:
    """One micro-batch on its way: what every launch for it needs, in backward too.

    Attributes:
        layer, micro_batch: for the fault record.
        place: compared between ranks, any int of at most 31 bits that says where each one is.
        ids: int64 [T, K], contiguous.
        bad_tokens: int64 [], tokens whose logits were not finite; None: not known to be any.
        plan: int32 [plan_ints], of the exchange of counts.
        row_bound: rows beyond it have no place, at any rank.
        unique: int32 [T, R], not negative where the token goes to the rank; of the exchange of counts.
        ranked: of the exchange, until the first push.
        unsettled: the exchange that the first push is to carry out, None where there was one.
        row_capacity, unique_capacity: N and U as allocated on this rank.
        places: int32 [R, max_tokens], unique row here of each rank's tokens, -1 where none; of `Peers.push_first`.
        positions: int32 [U, K], of `Peers.push_first`.
        host_counts: rows of each local expert, where the caller has read them.
    """

    layer: int
    micro_batch: int
    ids: Tensor
    place: int = 0
    bad_tokens: Tensor | None = None
    plan: Tensor | None = None
    row_bound: int = 0
    unique: Tensor | None = None
    ranked: Ranked | None = None
    unsettled: Exchange | None = None
    row_capacity: int = 0
    unique_capacity: int = 0
    places: Tensor | None = None
    positions: Tensor | None = None
    host_counts: tuple[int, ...] | None = None


@functools.cache
def check_structs(index: int) -> None:
    """Refuse a library whose structs differ from the ones here."""
    sizes = (_I * 4)()
    library(index).plain("moe_ep_direct_sizes")(sizes)
    ours = [ctypes.sizeof(struct) for struct in (Domain, Exchange, Push, Return)]
    if list(sizes) != ours:
        raise KernelError(f"the kernel library's structs have {list(sizes)} bytes, this file's {ours}; rebuild it")

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
_CHUNK_BYTES = 1 << 13  # short, so that many warps have one; a warp's fence behind each costs about a microsecond
_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


class PeerLayout(ctypes.Structure):
    """PeerLayout of direct.cuh."""

    _fields_ = [
        (name, _L)
        for name in (
            *("ready", "arrived", "counts", "push_flags", "back_flags"),
            *("push_routes", "back_weights", "push_rows", "back_rows", "stop"),
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
        *((name, _P) for name in ("block_counts", "bad_tokens", "plan")),
        *((name, _I) for name in ("num_blocks", "host_code", "host_value", "no_grad", "place")),
        ("row_capacity", _L),
        *((f"code_{name}", _I) for name in ("bad_ids", "non_finite", "overflow", "place", "no_grad")),
    ]


class Push(ctypes.Structure):
    """Push of direct.cuh."""

    _fields_ = [
        *((name, _P) for name in ("x", "ids", "weights", "route_rank", "block_counts", "unique", "plan", "out")),
        *((name, _P) for name in ("row_index", "positions", "row_weights")),
        *((name, _L) for name in ("row_capacity", "unique_capacity", "row_bound")),
        *((name, _I) for name in ("num_tokens", "tokens_per_block", "send_blocks", "first", "expand")),
    ]


class Return(ctypes.Structure):
    """Return of direct.cuh."""

    _fields_ = [
        *((name, _P) for name in ("rows", "positions", "unique", "plan", "ids", "row_weights", "weights", "out")),
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
        """Rows that one warp sends before it sets a flag."""
        return max(1, min(MAX_CHUNK_ROWS, _CHUNK_BYTES // self.row_bytes))

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
            "push_flags": 8 * ranks * self.chunks,
            "back_flags": 8 * ranks * self.chunks,
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
    """What `rank_routes` leaves.

    Attributes:
        route_rank: int32 [T, K], rank of each route among its block's routes to its expert, -1 where none.
        unique: int32 [T, R], rank of each token among its block's tokens for a rank, -1 where it does not go there;
            `Peers.push` turns it into the rank among all T.
        block_counts: int32 [blocks, E + R + 1]; `Peers.exchange` turns it into the counts of earlier blocks.
    """

    route_rank: Tensor
    unique: Tensor
    block_counts: Tensor


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
        ranked: of `rank_routes`.
        bad_tokens: int64 [], tokens whose logits were not finite; None: not known to be any.
        plan: int32 [plan_ints], of `Peers.exchange`.
        row_bound: rows beyond it have no place, at any rank; of `Peers.exchange`.
        row_capacity, unique_capacity: N and U as allocated on this rank.
        positions: int32 [U, K], of `Peers.push_first`.
        host_counts: rows of each local expert, where the caller has read them.
    """

    layer: int
    micro_batch: int
    ids: Tensor
    ranked: Ranked
    place: int = 0
    bad_tokens: Tensor | None = None
    plan: Tensor | None = None
    row_bound: int = 0
    row_capacity: int = 0
    unique_capacity: int = 0
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

"""Ops of one NVLink domain: rows pushed into peer memory, results returned and added up. CUDA only.

All of them run on one stream a rank, in one order on all ranks:

    exchange      ids [T, K] of every rank -> plan: where everything lies; for a host that must read the counts
    push_first    x [T, H] -> unique rows [U, H] or expert rows [N, H] of the ranks that have experts for it; exchanges
                  counts as well, in the same launch, where that was only prepared
    push_again    other rows along the same routes
    give_back     expert rows [N, H] or unique rows [U, H] -> y [T, H], and the gradients of the row weights

Peer memory is one allocation a rank, laid out alike on all of them (`Shape.layout`), zeroed before its first use.

Worked example. R = 2, E = 4 (experts 0 and 1 on rank 0), K = 2. Rank 0 has tokens a: experts 0, 1 and b: 1, 2; rank 1
has c: 1, 3. Rank 0 receives a and b from itself and c from rank 1: unique rows [a, b, c]; its expert rows are
[a | a, b, c] (expert 0 | expert 1), so row_index = [0, 0, 1, 2] and positions = [[0, 1], [2, -1], [3, -1]].
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .direct_types import (
    MAX_RANKS,
    MAX_TOKEN_BLOCKS,
    NUM_WORDS,
    Codes,
    Domain,
    Exchange,
    Push,
    Ranked,
    Received,
    Return,
    Shape,
    Trip,
    check_structs,
)
from .library import DTYPES, launch

WARP = 32


def tokens_per_block(num_tokens: int, blocks: int) -> int:
    """Tokens that are ranked together, whole warps of them, where `blocks` thread blocks share the work."""
    return max(1, -(-num_tokens // (WARP * min(max(blocks, 1), MAX_TOKEN_BLOCKS)))) * WARP


class Peers:
    """One rank's end of the domain: peer memory as mapped here, its epoch, its launches.

    Args:
        shape: the same on all ranks.
        rank: of this end.
        memory: address of every rank's peer memory in this process, in rank order, each `shape.layout()[1]` bytes.
        device: this rank's GPU.
        codes: fault codes.
        fault: int64 [] on the device, the sticky record: code << 56 | layer << 40 | micro-batch << 32 | value.
        timeout_s: after which a rank that does not come is a fault; nothing waits longer.

    Raises:
        KernelError: the library does not fit this file, or no kernels can be had.
    """

    def __init__(
        self,
        shape: Shape,
        rank: int,
        memory: Sequence[int],
        device: torch.device,
        *,
        codes: Codes,
        fault: Tensor,
        timeout_s: float,
    ) -> None:
        check_structs(device.index)
        self.shape, self.rank, self.device, self.codes = shape, rank, device, codes
        self._epoch = torch.zeros(7, dtype=torch.int32, device=device)
        self._fault = fault
        self._domain = Domain(
            memory=(ctypes.c_void_p * MAX_RANKS)(*memory),
            at=shape.layout()[0],
            rank=rank,
            num_ranks=shape.num_ranks,
            num_experts=shape.num_experts,
            num_local=shape.num_local,
            top_k=shape.top_k,
            max_tokens=shape.max_tokens,
            chunk_rows=shape.chunk_rows,
            chunks=shape.chunks,
            row_bytes=shape.row_bytes,
            timeout_ns=int(timeout_s * 1e9),
            epoch=self._epoch.data_ptr(),
            fault=fault.data_ptr(),
            code_lost=codes.lost,
        )

    def prepare(
        self,
        trip: Trip,
        *,
        row_bound: int,
        no_grad: bool = False,
        host_fault: tuple[int, int] = (0, 0),
        blocks: int = MAX_TOKEN_BLOCKS,
    ) -> None:
        """Make room for an exchange of counts, which `push_first` carries out. Sets trip.plan; see `plan_parts`.

        Args:
            trip: of a micro-batch.
            row_bound: rows beyond it have no place, and are a fault.
            no_grad: whether this rank records no gradients; all ranks must agree.
            host_fault: code and value of a fault that only the host knows.
            blocks: thread blocks that rank tokens.
        """
        codes, shape, trip.row_bound = self.codes, self.shape, row_bound
        num_tokens, new = trip.ids.shape[0], functools.partial(torch.empty, dtype=torch.int32, device=self.device)
        each = tokens_per_block(num_tokens, blocks)
        num_blocks = max(1, -(-num_tokens // each))
        trip.plan, trip.unique = new(shape.plan_ints), new((num_tokens, shape.num_ranks))
        trip.ranked = Ranked(
            route_rank=new((num_tokens, shape.top_k)),
            block_counts=new((num_blocks, shape.num_experts + shape.num_ranks + 1)),
            tokens_per_block=each,
        )
        trip.unsettled = Exchange(
            ids=trip.ids.data_ptr(),
            route_rank=trip.ranked.route_rank.data_ptr(),
            unique=trip.unique.data_ptr(),
            block_counts=trip.ranked.block_counts.data_ptr(),
            bad_tokens=None if trip.bad_tokens is None else trip.bad_tokens.data_ptr(),
            plan=trip.plan.data_ptr(),
            num_tokens=num_tokens,
            tokens_per_block=each,
            num_blocks=num_blocks,
            host_code=host_fault[0],
            host_value=host_fault[1],
            no_grad=no_grad,
            place=trip.place & 0x7FFFFFFF,
            row_capacity=row_bound,
            code_bad_ids=codes.bad_ids,
            code_non_finite=codes.non_finite,
            code_overflow=codes.overflow,
            code_place=codes.place,
            code_no_grad=codes.no_grad,
        )

    def exchange(
        self,
        trip: Trip,
        *,
        row_bound: int,
        no_grad: bool = False,
        host_fault: tuple[int, int] = (0, 0),
        blocks: int = MAX_TOKEN_BLOCKS,
    ) -> Tensor:
        """`prepare`, and tell every rank the counts and this rank's word at once; returns trip.plan."""
        self.prepare(trip, row_bound=row_bound, no_grad=no_grad, host_fault=host_fault, blocks=blocks)
        assert trip.unsettled is not None and trip.ranked is not None and trip.plan is not None, "prepared"
        used = min(blocks, trip.ranked.block_counts.shape[0])
        self._launch("moe_ep_direct_exchange", trip, ctypes.byref(trip.unsettled), used)
        trip.unsettled = None
        return trip.plan

    def plan_parts(self, plan: Tensor) -> dict[str, Tensor]:
        """Views of what a plan says to others: offsets [L + 1], tokens [L], totals [rows, unique], words [R, 4]."""
        local, ranks = self.shape.num_local, self.shape.num_ranks
        names = ("offsets", "tokens", "totals", "words")
        sizes = (local + 1, local, 2, NUM_WORDS * ranks)
        parts = dict(zip(names, plan[-sum(sizes) :].split(sizes), strict=True))
        parts["words"] = parts["words"].view(ranks, NUM_WORDS)
        return parts

    def push_first(
        self, x_TH: Tensor, weights_TK: Tensor, trip: Trip, *, expand: bool, blocks: tuple[int, int]
    ) -> Received:
        """Send x, the places of its routes and their weights; sets trip.places and trip.positions.

        Args:
            x_TH: [T, H], contiguous.
            weights_TK: float32 [T, K], contiguous.
            trip: with its capacities; exchanged, or prepared, then counts are exchanged by the same launch.
            expand: receive expert rows instead of unique rows.
            blocks: thread blocks (that send, in all); see direct_push.cu.
        """
        assert trip.plan is not None and trip.ranked is not None, "push_first before exchange or prepare, or twice"
        new = functools.partial(torch.empty, device=self.device)
        received = Received(
            rows=new((trip.row_capacity if expand else trip.unique_capacity, x_TH.shape[1]), dtype=x_TH.dtype),
            row_index=new(trip.row_capacity, dtype=torch.int32),
            positions=new((trip.unique_capacity, self.shape.top_k), dtype=torch.int32),
            row_weights=new(trip.row_capacity, dtype=torch.float32),
        )
        trip.positions = received.positions
        trip.places = new((self.shape.num_ranks, self.shape.max_tokens), dtype=torch.int32)
        push = self._push(x_TH, trip, received.rows, expand, blocks)
        push.weights = weights_TK.data_ptr()
        push.route_rank = trip.ranked.route_rank.data_ptr()
        push.block_counts = trip.ranked.block_counts.data_ptr()
        push.row_index = received.row_index.data_ptr()
        push.row_weights = received.row_weights.data_ptr()
        push.tokens_per_block = trip.ranked.tokens_per_block
        push.row_bound = trip.row_bound
        push.first, push.settle = 1, trip.unsettled is not None
        exchange = Exchange() if trip.unsettled is None else trip.unsettled
        self._launch("moe_ep_direct_push", trip, ctypes.byref(exchange), ctypes.byref(push), blocks[1])
        trip.unsettled = trip.ranked = None
        return received

    def push_again(self, x_TH: Tensor, trip: Trip, *, expand: bool, blocks: tuple[int, int]) -> Tensor:
        """Send other rows along the same routes: [N, H] expert rows where `expand`, else unique rows [U, H]."""
        rows = trip.row_capacity if expand else trip.unique_capacity
        out = torch.empty((rows, x_TH.shape[1]), dtype=x_TH.dtype, device=self.device)
        push = self._push(x_TH, trip, out, expand, blocks)
        self._launch("moe_ep_direct_push", trip, ctypes.byref(Exchange()), ctypes.byref(push), blocks[1])
        return out

    def _push(self, x_TH: Tensor, trip: Trip, out: Tensor, expand: bool, blocks: tuple[int, int]) -> Push:
        assert trip.plan is not None and trip.positions is not None, "a push before the exchange of counts"
        assert trip.unique is not None and trip.places is not None, "exchanged and pushed"
        return Push(
            x=x_TH.data_ptr(),
            ids=trip.ids.data_ptr(),
            unique=trip.unique.data_ptr(),
            plan=trip.plan.data_ptr(),
            places=trip.places.data_ptr(),
            out=out.data_ptr(),
            positions=trip.positions.data_ptr(),
            row_capacity=trip.row_capacity,
            unique_capacity=trip.unique_capacity,
            num_tokens=x_TH.shape[0],
            send_blocks=blocks[0],
            expand=expand,
        )

    def give_back(
        self,
        rows: Tensor,
        trip: Trip,
        *,
        add_routes: bool,
        row_weights: Tensor | None = None,
        blocks: tuple[int, int],
    ) -> tuple[Tensor, Tensor | None]:
        """Send results home and add them up there.

        Args:
            rows: contiguous; expert rows [N, H] or unique rows [U, H].
            trip: of a push.
            add_routes: whether rows are expert rows, to be added up by route.
            row_weights: float32 [N], gradients of the row weights; None: none travel.
            blocks: thread blocks (that send, in all); see direct_return.cu.

        Returns:
            y [T, H], and float32 [T, K] of `row_weights`, 0 where a token has no route.
        """
        assert trip.unique is not None and trip.places is not None, "give_back before push_first"
        assert trip.positions is not None, "pushed"
        num_tokens = trip.ids.shape[0]
        out = torch.empty((num_tokens, rows.shape[1]), dtype=rows.dtype, device=self.device)
        weights = None if row_weights is None else torch.empty_like(trip.ids, dtype=torch.float32)
        back = Return(
            rows=rows.data_ptr(),
            positions=trip.positions.data_ptr(),
            places=trip.places.data_ptr(),
            unique=trip.unique.data_ptr(),
            ids=trip.ids.data_ptr(),
            row_weights=None if row_weights is None else row_weights.data_ptr(),
            weights=None if weights is None else weights.data_ptr(),
            out=out.data_ptr(),
            unique_capacity=trip.unique_capacity,
            num_tokens=num_tokens,
            send_blocks=blocks[0],
            sum=add_routes,
            with_weights=row_weights is not None,  # an empty tensor has no address
        )
        self._launch("moe_ep_direct_return", trip, ctypes.byref(back), DTYPES[rows.dtype], blocks[1])
        return out, weights

    def _launch(self, name: str, trip: Trip, *arguments: object) -> None:
        self._domain.where = (trip.layer & 0xFFFF) << 40 | (trip.micro_batch & 0xFF) << 32
        launch(name, self._epoch, ctypes.byref(self._domain), *arguments)

"""Ops of one NVLink domain: rows pushed into peer memory, results returned and added up. CUDA only.

Four kernels, one function each. All but the first run on one stream a rank, in one order on all ranks:

    rank_routes   ids [T, K] -> ranks inside blocks of tokens, counts of each block
    exchange      counts to every rank -> plan: where everything lies
    push          x [T, H] -> unique rows [U, H] or expert rows [N, H] of the ranks that have experts for it
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
from .library import DTYPES, launch, library


def rank_routes(ids_TK: Tensor, shape: Shape) -> Ranked:
    """Ranks of routes and tokens inside blocks of tokens; int64 [T, K] on a GPU."""
    num_tokens, device = ids_TK.shape[0], ids_TK.device
    ids_TK = ids_TK.contiguous()
    blocks = max(1, -(-num_tokens // tokens_per_block(num_tokens, device.index)))
    width = shape.num_experts + shape.num_ranks + 1
    route_rank, unique, counts = (
        torch.empty(size, dtype=torch.int32, device=device)
        for size in ((num_tokens, shape.top_k), (num_tokens, shape.num_ranks), (blocks, width))
    )
    sizes = (num_tokens, shape.top_k, shape.num_experts, shape.num_ranks)
    launch("moe_ep_direct_rank", ids_TK, ids_TK, *sizes, route_rank, unique, counts)
    return Ranked(route_rank=route_rank, unique=unique, block_counts=counts)


def tokens_per_block(num_tokens: int, index: int) -> int:
    """Tokens that one block of `rank_routes` takes."""
    return int(library(index).plain("moe_ep_direct_tokens_per_block")(num_tokens))


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
        self._epoch = torch.zeros(3, dtype=torch.int32, device=device)
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

    def exchange(
        self, trip: Trip, *, row_bound: int, no_grad: bool = False, host_fault: tuple[int, int] = (0, 0)
    ) -> Tensor:
        """Tell every rank the counts and this rank's word; sets and returns trip.plan. See `plan_parts`.

        Args:
            trip: ranked.
            row_bound: rows beyond it have no place, and are a fault.
            no_grad: whether this rank records no gradients; all ranks must agree.
            host_fault: code and value of a fault that only the host knows.
        """
        codes, trip.row_bound = self.codes, row_bound
        trip.plan = torch.empty(self.shape.plan_ints, dtype=torch.int32, device=self.device)
        exchange = Exchange(
            block_counts=trip.ranked.block_counts.data_ptr(),
            bad_tokens=None if trip.bad_tokens is None else trip.bad_tokens.data_ptr(),
            plan=trip.plan.data_ptr(),
            num_blocks=trip.ranked.block_counts.shape[0],
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
        self._launch("moe_ep_direct_exchange", trip, ctypes.byref(exchange))
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
        """Send x, the places of its routes and their weights; sets trip.positions.

        Args:
            x_TH: [T, H], contiguous.
            weights_TK: float32 [T, K], contiguous.
            trip: with its plan and capacities.
            expand: receive expert rows instead of unique rows.
            blocks: thread blocks (that send, in all); see direct_push.cu.
        """
        assert trip.plan is not None, "push_first before exchange"
        new = functools.partial(torch.empty, device=self.device)
        received = Received(
            rows=new((trip.row_capacity if expand else trip.unique_capacity, x_TH.shape[1]), dtype=x_TH.dtype),
            row_index=new(trip.row_capacity, dtype=torch.int32),
            positions=new((trip.unique_capacity, self.shape.top_k), dtype=torch.int32),
            row_weights=new(trip.row_capacity, dtype=torch.float32),
        )
        trip.positions = received.positions
        push = self._push(x_TH, trip, received.rows, expand, blocks)
        push.ids = trip.ids.data_ptr()
        push.weights = weights_TK.data_ptr()
        push.route_rank = trip.ranked.route_rank.data_ptr()
        push.block_counts = trip.ranked.block_counts.data_ptr()
        push.row_index = received.row_index.data_ptr()
        push.row_weights = received.row_weights.data_ptr()
        push.tokens_per_block = tokens_per_block(x_TH.shape[0], self.device.index)
        push.row_bound = trip.row_bound
        push.first = 1
        self._launch("moe_ep_direct_push", trip, ctypes.byref(push), blocks[1])
        return received

    def push_again(self, x_TH: Tensor, trip: Trip, *, expand: bool, blocks: tuple[int, int]) -> Tensor:
        """Send other rows along the same routes: [N, H] expert rows where `expand`, else unique rows [U, H]."""
        rows = trip.row_capacity if expand else trip.unique_capacity
        out = torch.empty((rows, x_TH.shape[1]), dtype=x_TH.dtype, device=self.device)
        push = self._push(x_TH, trip, out, expand, blocks)
        self._launch("moe_ep_direct_push", trip, ctypes.byref(push), blocks[1])
        return out

    def _push(self, x_TH: Tensor, trip: Trip, out: Tensor, expand: bool, blocks: tuple[int, int]) -> Push:
        assert trip.plan is not None and trip.positions is not None, "a push before the exchange of counts"
        return Push(
            x=x_TH.data_ptr(),
            unique=trip.ranked.unique.data_ptr(),
            plan=trip.plan.data_ptr(),
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
        assert trip.plan is not None and trip.positions is not None, "give_back before push_first"
        num_tokens = trip.ids.shape[0]
        out = torch.empty((num_tokens, rows.shape[1]), dtype=rows.dtype, device=self.device)
        weights = None if row_weights is None else torch.empty_like(trip.ids, dtype=torch.float32)
        back = Return(
            rows=rows.data_ptr(),
            positions=trip.positions.data_ptr(),
            unique=trip.ranked.unique.data_ptr(),
            plan=trip.plan.data_ptr(),
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

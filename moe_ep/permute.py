"""Row movement inside one rank: gather rows, sum rows back, and the value that experts compute on.

The two ops are each other's transpose, so one backward is the other's forward, and only integers are saved:

    gather_rows:  rows[n] = x[row_index[n]]                      (a row may be gathered several times)
    sum_rows:     y[t]    = sum over j of rows[positions[t, j]]  (float32, j ascending, rounded once)

Worked example. Two tokens, K = 2, routes (t, k) -> expert: (0,0)->1, (0,1)->0, (1,0)->1, (1,1)->none.
Sorted by expert the rows are [(0,1), (0,0), (1,0)], so row_index = [0, 0, 1] and
positions = [[1, 0], [2, -1]]: token 0's routes are rows 1 and 0, token 1's only route is row 2.

Each function does its work in plain torch or, where the caller allows it and the tensors are on a GPU, in one kernel of
`moe_ep.kernels`. Both give the same bits. With a `bound`, an int32 [1] on the device, rows from there on are the tail:
nobody reads them; the kernels do not write them either, torch fills them with zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .eager import eager
from .ops import routes_module, rows_module


def _gather(x_UH: Tensor, row_index_N: Tensor) -> Tensor:
    """rows [N, ...]; a row whose index is -1 is zero."""
    if x_UH.shape[0] == 0:
        return x_UH.new_zeros((row_index_N.shape[0], *x_UH.shape[1:]))
    rows = x_UH.index_select(0, row_index_N.clamp_min(0))
    return _zero_where(rows, row_index_N < 0)


def _zero_where(rows: Tensor, mask_N: Tensor) -> Tensor:
    # masked_fill_ and not a product: the rows that are cut may hold NaN, and 0 * NaN is NaN
    return rows.masked_fill_(mask_N.view(-1, *([1] * (rows.dim() - 1))), 0)


def _sum(rows_NH: Tensor, positions_TJ: Tensor) -> Tensor:
    """y [T, ...]: float32 sum over j ascending of the rows at positions (-1: none), rounded once."""
    num_tokens, width = positions_TJ.shape
    wide = torch.float64 if rows_NH.dtype == torch.float64 else torch.float32
    total = torch.zeros((num_tokens, *rows_NH.shape[1:]), dtype=wide, device=rows_NH.device)
    for j in range(width):
        total += _gather(rows_NH, positions_TJ[:, j])
    return total.to(rows_NH.dtype)


Movement = tuple[Tensor, Tensor, Tensor | None]  # where rows come from, where they go, how many there are


def _move_out(x_UH: Tensor, movement: Movement, kernels: bool) -> Tensor:
    row_index, positions, bound = movement
    if not kernels:
        return _gather(x_UH, row_index)
    gathered: Tensor = rows_module().gather_rows(x_UH, row_index, positions, bound)
    return gathered


def _move_back(rows_NH: Tensor, movement: Movement, kernels: bool) -> Tensor:
    _, positions, bound = movement
    if not kernels:
        return _sum(rows_NH, positions)
    summed: Tensor = rows_module().sum_rows(rows_NH, positions, bound)
    return summed


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_UH: Tensor, movement: Movement, kernels: bool) -> Tensor:
        ctx.save_for_backward(*movement)
        ctx.kernels = kernels
        return _move_out(x_UH, movement, kernels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _move_back(grads[0], ctx.saved_tensors, ctx.kernels), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NH: Tensor, movement: Movement, kernels: bool) -> Tensor:
        ctx.save_for_backward(*movement)
        ctx.kernels = kernels
        return _move_back(rows_NH, movement, kernels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _move_out(grads[0], ctx.saved_tensors, ctx.kernels), None, None


class _GatherRoutes(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weights_TK: Tensor, routes: SortedRoutes, kernels: bool
    ) -> tuple[Tensor, Tensor]:
        by_token, by_slot = routes.by_token, routes.by_slot
        ctx.save_for_backward(*by_token, by_slot[0])
        ctx.kernels = kernels
        return _move_out(x_TH, by_token, kernels), _move_out(weights_TK.reshape(-1), by_slot, kernels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        row_token, positions, bound, row_slot = ctx.saved_tensors
        dx_TH = dweights_TK = None
        if ctx.needs_input_grad[0]:
            dx_TH = _move_back(grads[0], (row_token, positions, bound), ctx.kernels)
        if ctx.needs_input_grad[1]:
            dweights = _move_back(grads[1], (row_slot, positions.view(-1, 1), bound), ctx.kernels)
            dweights_TK = dweights.view(positions.shape)
        return dx_TH, dweights_TK, None, None


@eager
def gather_routes(
    x_TH: Tensor, weights_TK: Tensor, routes: SortedRoutes, *, kernels: bool = False
) -> tuple[Tensor, Tensor]:
    """The row of x and the weight of every sorted route, [T*K, H] and [T*K]: `gather_rows` of both, as one node.

    Args:
        x_TH: [T, H], any float dtype.
        weights_TK: float32 [T, K].
        routes: of T tokens; behind their bound the results hold anything.
        kernels: let the CUDA kernels do it where x is on a GPU.
    """
    kernels = kernels and x_TH.is_cuda
    if _records(x_TH) or _records(weights_TK):
        return _GatherRoutes.apply(x_TH, weights_TK, routes, kernels)
    rows_SH = _move_out(x_TH, routes.by_token, kernels)
    return rows_SH, _move_out(weights_TK.reshape(-1), routes.by_slot, kernels)


def _records(tensor: Tensor) -> bool:
    # a node costs as much as several launches, so that there is none where nothing would come back through it
    return tensor.requires_grad and torch.is_grad_enabled()


@eager
def gather_rows(
    x_UH: Tensor, row_index_N: Tensor, positions_UJ: Tensor, *, bound: Tensor | None = None, kernels: bool = False
) -> Tensor:
    """rows[n] = x[row_index[n]], zero where the index is -1; differentiable in x.

    Args:
        x_UH: [U, ...], any float dtype.
        row_index_N: int [N], -1 or a row of x.
        positions_UJ: int [U, J], for each row of x the places it went to, -1 where none (any order).
        bound: int32 [1], rows from there on may hold anything; None: all N rows count.
        kernels: let the CUDA kernels do it where x is on a GPU.

    Returns:
        [N, ...] in x's dtype. The gradient of x is a float32 sum over J ascending, rounded once; gradient rows
        whose index is -1 are never read.
    """
    movement, kernels = (row_index_N, positions_UJ, bound), kernels and x_UH.is_cuda
    return _GatherRows.apply(x_UH, movement, kernels) if _records(x_UH) else _move_out(x_UH, movement, kernels)


@eager
def sum_rows(
    rows_NH: Tensor, row_index_N: Tensor, positions_TJ: Tensor, *, bound: Tensor | None = None, kernels: bool = False
) -> Tensor:
    """y[t] = sum_j rows[positions[t, j]] in float32 with j ascending, rounded once; the transpose of `gather_rows`.

    Args:
        rows_NH: [N, ...], any float dtype. Rows that no position names are never read.
        row_index_N: int [N], the token each row belongs to, -1 where none (its gradient is zero).
        positions_TJ: int [T, J], rows of each token, -1 where none.
        bound: int32 [1], gradient rows from there on may hold anything; None: all N rows count.
        kernels: let the CUDA kernels do it where the rows are on a GPU.

    Returns:
        [T, ...] in the rows' dtype.
    """
    movement, kernels = (row_index_N, positions_TJ, bound), kernels and rows_NH.is_cuda
    return _SumRows.apply(rows_NH, movement, kernels) if _records(rows_NH) else _move_back(rows_NH, movement, kernels)


@dataclass(slots=True, kw_only=True)  # not frozen: that costs as much as an op of torch, in every dispatch
class SortedRoutes:
    """Routes in the order of their experts, inside an expert by (token, k): the result of `sort_routes`.

    Attributes:
        row_token: int32 [T*K], token of each sorted route; -1 in the tail that holds the routes with id -1.
        row_slot: int32 [T*K], flat slot t*K + k of each sorted route; -1 in the tail.
        positions: int32 [T, K], sorted place of each route, -1 where there is no route.
        counts: int64 [E], routes of each expert.
        offsets: int32 [E+1], first sorted place of each expert, and the number of routes behind.
        bound: int32 [1], where the tail begins: the last of the offsets.
        num_bad: int64 [], ids outside [-1, E), where the kernels counted them on the way; else None.
    """

    row_token: Tensor
    row_slot: Tensor
    positions: Tensor
    counts: Tensor
    offsets: Tensor
    bound: Tensor
    num_bad: Tensor | None = None

    @property
    def by_token(self) -> Movement:
        """From tokens to sorted routes."""
        return self.row_token, self.positions, self.bound

    @property
    def by_slot(self) -> Movement:
        """From flat slots to sorted routes."""
        return self.row_slot, self.positions.view(-1, 1), self.bound


def sort_routes(expert_ids_TK: Tensor, num_experts: int, *, kernels: bool = False) -> SortedRoutes:
    """Sort the routes of a micro-batch by expert, stably, without a host sync. Ids outside [0, E) have no route."""
    if kernels and expert_ids_TK.is_cuda:
        row_token, row_slot, positions, counts, offsets, num_bad = routes_module().sort_routes(
            expert_ids_TK, num_experts, 1
        )
        return SortedRoutes(
            row_token=row_token,
            row_slot=row_slot,
            positions=positions,
            counts=counts,
            offsets=offsets,
            bound=offsets[num_experts:],
            num_bad=num_bad,
        )
    num_tokens, top_k = expert_ids_TK.shape
    flat = expert_ids_TK.reshape(-1)
    valid = (flat >= 0) & (flat < num_experts)
    key = torch.where(valid, flat, num_experts)
    order = key.argsort(stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, key, torch.ones_like(key))
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=flat.device)
    in_order = valid[order]
    offsets = make_offsets(counts[:num_experts])
    return SortedRoutes(
        row_token=torch.where(in_order, order // max(top_k, 1), -1).int(),
        row_slot=torch.where(in_order, order, -1).int(),
        positions=torch.where(valid, place, -1).int().view(num_tokens, top_k),
        counts=counts[:num_experts],
        offsets=offsets,
        bound=offsets[num_experts:],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertInput:
    """What a dispatcher hands to the experts of one rank.

    Rows are grouped by local expert ascending, inside an expert by (source rank, source token, k), so that
    results repeat bit for bit.

    Attributes:
        source: [U, H], the received rows, in memory of its own (not a buffer that another micro-batch reuses).
        row_index: int32 [N], expert row n is source[row_index[n]], -1 beyond offsets[L]; None: `source` is already
            grouped and N = U.
        positions: int32 [U, J], the expert rows of each source row, -1 where none; None exactly when row_index is.
        row_weights: float32 [N], differentiable; garbage beyond offsets[L].
        offsets: int32 [L+1] on the device, offsets[0] = 0; expert l owns rows offsets[l] to offsets[l+1].
        tokens_per_expert: int32 [L] on the device.
        capacity: N, at least offsets[L]. Rows beyond offsets[L] are the *tail*: they hold anything, NaN too, and
            nobody may let them reach a sum.
        host_counts: the counts as a tuple of L ints where the dispatcher knows them on the host anyway, else None.
        kernels: whether the package's CUDA kernels may move and compute these rows.
    """

    source: Tensor
    row_weights: Tensor
    offsets: Tensor
    tokens_per_expert: Tensor
    capacity: int
    row_index: Tensor | None = None
    positions: Tensor | None = None
    host_counts: tuple[int, ...] | None = None
    kernels: bool = False

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.tokens_per_expert.shape[0]

    def rows(self) -> Tensor:
        """Expert rows [N, H], expanded once from the unique rows; differentiable in `source`. The tail: anything."""
        if self.row_index is None or self.positions is None:
            return self.source
        bound = self.offsets[-1:]
        return gather_rows(self.source, self.row_index, self.positions, bound=bound, kernels=self.kernels)


pytree.register_dataclass(ExpertInput)  # for FSDP2, see Routing


def split_input(inp: ExpertInput, sizes: Sequence[int]) -> list[ExpertInput]:
    """The input of several sets of experts, `sizes` of them, as one input for each set; rows are expanded once.

    Where the dispatcher has no counts on the host, this reads them. The tail goes to the last set.
    """
    counts = inp.host_counts if inp.host_counts is not None else tuple(inp.tokens_per_expert.tolist())
    ends = list(itertools.accumulate(sizes, initial=0))
    lengths = [sum(counts[first:last]) for first, last in itertools.pairwise(ends)]
    lengths[-1] += inp.capacity - sum(counts)
    rows, weights = inp.rows().split(lengths), inp.row_weights.split(lengths)
    return [
        ExpertInput(
            source=rows[n],
            row_weights=weights[n],
            offsets=inp.offsets[first : last + 1] - inp.offsets[first],
            tokens_per_expert=inp.tokens_per_expert[first:last],
            capacity=lengths[n],
            host_counts=counts[first:last],
            kernels=inp.kernels,
        )
        for n, (first, last) in enumerate(itertools.pairwise(ends))
    ]


def regroup(
    counts_RL: Tensor, num_rows: int, *, kernels: bool = False
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """How received rows (source, local expert) become expert rows (local expert, source).

    Args:
        counts_RL: int64 [R, L], rows from each source for each local expert.
        num_rows: their sum, known on the host, so that no sync is needed.
        kernels: let the CUDA kernels do it where the counts are on a GPU.

    Returns:
        order int32 [N]: expert row n is received row order[n]; places int32 [N]: its inverse; both None where L = 1,
        since the received order is the expert order then. offsets int32 [L+1] and tokens_per_expert int32 [L].

    Example: two sources, two experts, counts [[1, 2], [1, 0]]: received rows are experts 0, 1, 1 | 0,
    so order = [0, 3, 1, 2], places = [0, 2, 3, 1], offsets = [0, 2, 4].
    """
    num_ranks, num_local = counts_RL.shape
    if kernels and counts_RL.is_cuda and num_local > 1:
        order, places, offsets, tokens = routes_module().regroup_rows(counts_RL, num_rows, 1)
        return order, places, offsets, tokens
    counts_L = counts_RL.sum(0)
    offsets, tokens = make_offsets(counts_L), counts_L.to(torch.int32)
    if num_local == 1:
        return None, None, offsets, tokens
    experts = torch.arange(num_local, device=counts_RL.device).repeat(num_ranks)
    expert = experts.repeat_interleave(counts_RL.reshape(-1), output_size=num_rows)
    order = expert.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(num_rows, device=order.device)
    return order.int(), places.int(), offsets, tokens


def make_offsets(counts_L: Tensor) -> Tensor:
    """Exclusive prefix sums with the total behind: int32 [L+1] of int [L]."""
    zero = torch.zeros(1, dtype=torch.int64, device=counts_L.device)
    return torch.cat([zero, counts_L.long().cumsum(0)]).to(torch.int32)

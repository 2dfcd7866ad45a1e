"""Row movement inside one rank: gather rows, and sum rows back.

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

from typing import Any

import torch
from torch import Tensor

from .eager import eager
from .ops import rows_module
from .sorted_routes import Movement, SortedRoutes, regroup, sort_routes

__all__ = ["SortedRoutes", "gather_routes", "gather_rows", "regroup", "sort_routes", "sum_rows"]


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

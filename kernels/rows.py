"""Moving rows: gather them to where they are wanted, sum them back. Each is the other's transpose.

Worked example. x has rows a, b. row_index = [1, 0, -1, 1] asks for [b, a, 0, b]; seen from x, row a goes to place 1 and
row b to places 0 and 3, so positions = [[1, -1], [0, 3]]. Summing rows [p, q, r, s] back with these positions gives
[q, p + s].

Positions say where a row goes, the index says where it comes from: both describe one movement, and callers hand over
both, because the kernels read whichever is the cheaper. With `bound` (int32 on the device) rows from bound[0] on are
neither read nor written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .library import DTYPES, launch
from .registry import register


def gather_rows_reference(x: Tensor, row_index: Tensor, positions: Tensor, bound: Tensor | None) -> Tensor:
    """rows[n] = x[row_index[n]], zero where the index is -1. Behind the bound it writes zeros, the kernel nothing."""
    rows = x.new_zeros((row_index.shape[0], *x.shape[1:]))
    wanted = row_index >= 0
    if bound is not None:
        wanted &= torch.arange(row_index.shape[0], device=x.device) < bound[0]
    rows[wanted] = x[row_index[wanted].long()]
    return rows


def sum_rows_reference(rows: Tensor, positions: Tensor, bound: Tensor | None) -> Tensor:
    """y[t] = sum over j ascending of rows[positions[t, j]], in float32 (float64 for float64), rounded once."""
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    total = torch.zeros((positions.shape[0], *rows.shape[1:]), dtype=wide, device=rows.device)
    limit = rows.shape[0] if bound is None else min(int(bound[0]), rows.shape[0])
    for place in positions.long().unbind(1):
        wanted = (place >= 0) & (place < limit)
        total[wanted] += rows[place[wanted]]
    return total.to(rows.dtype)


def _gather_rows(x: Tensor, row_index: Tensor, positions: Tensor, bound: Tensor | None) -> Tensor:
    x, row_index, positions = x.contiguous(), row_index.int().contiguous(), positions.int().contiguous()
    rows = x.new_empty((row_index.shape[0], *x.shape[1:]))
    row_bytes = x.shape[1:].numel() * x.element_size()
    sizes = (x.shape[0], positions.shape[1], row_index.shape[0], row_bytes)
    launch("moe_ep_gather_rows", x, x, rows, row_index, positions, bound, *sizes)
    return rows


def _sum_rows(rows: Tensor, positions: Tensor, bound: Tensor | None) -> Tensor:
    rows, positions = rows.contiguous(), positions.int().contiguous()
    y = rows.new_empty((positions.shape[0], *rows.shape[1:]))
    sizes = (*positions.shape, rows.shape[0], rows.shape[1:].numel())
    launch("moe_ep_sum_rows", rows, DTYPES[rows.dtype], rows, y, positions, bound, *sizes)
    return y


def _fake_gather_rows(x: Tensor, row_index: Tensor, positions: Tensor, bound: Tensor | None) -> Tensor:
    return x.new_empty((row_index.shape[0], *x.shape[1:]))


def _fake_sum_rows(rows: Tensor, positions: Tensor, bound: Tensor | None) -> Tensor:
    return rows.new_empty((positions.shape[0], *rows.shape[1:]))


gather_rows = register(
    "gather_rows(Tensor x, Tensor row_index, Tensor positions, Tensor? bound) -> Tensor",
    reference=gather_rows_reference,
    kernel=_gather_rows,
    fake=_fake_gather_rows,
)
sum_rows = register(
    "sum_rows(Tensor rows, Tensor positions, Tensor? bound) -> Tensor",
    reference=sum_rows_reference,
    kernel=_sum_rows,
    fake=_fake_sum_rows,
)

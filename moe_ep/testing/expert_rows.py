"""Experts for tests, computed from an `ExpertInput` in float64, and the two poisons.

They round each output row once to x's dtype, so that what a result may differ from the oracle by is a few roundings
of the dispatcher and nothing else. What lies beyond the counts is NaN in the output and in both gradients: a
dispatcher that reads the tail shows it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import silu

from ..expert_input import ExpertInput

NAN = float("nan")


class _Head(torch.autograd.Function):
    """The first n rows; the gradient of the others is NaN."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_valid: int) -> Tensor:
        ctx.num_rows = rows.shape[0]
        return rows[:num_valid].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        full = torch.full((ctx.num_rows, *grad.shape[1:]), NAN, dtype=grad.dtype, device=grad.device)
        full[: grad.shape[0]] = grad
        return full, None


class _WithTail(torch.autograd.Function):
    """Rows of NaN behind, up to `capacity`; what their gradient is does not matter."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, capacity: int) -> Tensor:
        ctx.num_valid = rows.shape[0]
        return torch.cat([rows, torch.full((capacity - rows.shape[0], *rows.shape[1:]), NAN).to(rows)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][: ctx.num_valid], None


def expert_rows(inp: ExpertInput, params: tuple[Tensor, ...], first_expert: int) -> Tensor:
    """Weighted expert outputs [capacity, H] in the source's dtype.

    Args:
        inp: what a dispatcher handed over.
        params: () for constant experts, else this rank's (w_gate_up, w_down), float64.
        first_expert: global id of local expert 0.
    """
    offsets = inp.offsets.tolist()
    rows = _Head.apply(inp.rows(), offsets[-1])
    weights = _Head.apply(inp.row_weights, offsets[-1]).double()
    parts = []
    for local, (low, high) in enumerate(itertools.pairwise(offsets)):
        x = rows[low:high].double()
        if params:
            gate, up = (x @ params[0][local].T).chunk(2, dim=1)
            x = (silu(gate) * up) @ params[1][local].T
        else:
            x = (first_expert + local + 1) * x
        parts.append(weights[low:high, None] * x)
    return _WithTail.apply(torch.cat(parts).to(inp.source.dtype), inp.capacity)


def leave_nan_behind(device: torch.device) -> None:
    """Fill and free blocks of many sizes, so that memory that is handed out next holds NaN."""
    blocks = [torch.full((2**size,), NAN, device=device) for size in range(6, 16) for _ in range(4)]
    del blocks


def _poison(tensor: Tensor) -> Tensor:
    # whole numbers get a value that is no count and no index
    garbage = NAN if tensor.is_floating_point() else -(2**30) if tensor.element_size() > 2 else 85
    tensor.detach().fill_(garbage)
    return tensor


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """While open, memory from torch.empty, empty_like and new_empty holds garbage instead of by luck zeros."""
    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty
    with (
        mock.patch.object(torch, "empty", lambda *a, **k: _poison(empty(*a, **k))),
        mock.patch.object(torch, "empty_like", lambda *a, **k: _poison(empty_like(*a, **k))),
        mock.patch.object(torch.Tensor, "new_empty", lambda *a, **k: _poison(new_empty(*a, **k))),
    ):
        yield

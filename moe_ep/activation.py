"""SwiGLU of expert rows, weighted by row: what stands between the experts' matrix products, forward and backward.

    a = silu(h_gate) * h_up        with the row's weight w, backward from q = gradient of (w a):
    d_w = <q, a>                   d_a = w q                   d_h from d_a

Each function does it in plain torch, which rounds after every step, or with `kernels` in one kernel of
`moe_ep.kernels`, which computes in float32 and rounds once. `ends` is int32 [L]; rows from ends[L-1] on are the tail,
which may hold anything: torch works through it, the kernels leave it alone. `swiglu` and `scaled` are what autograd
differentiates by itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .ops import swiglu_module


def swiglu(h: Tensor) -> Tensor:
    """[N, I] of h [N, 2I], the gate half first."""
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def scaled(rows: Tensor, weights_N: Tensor) -> Tensor:
    """Rows times their weights, multiplied in at least float32 and rounded once."""
    return (rows * weights_N.unsqueeze(-1)).to(rows.dtype)


def activate(h: Tensor, weights_N: Tensor | None, ends: Tensor, *, kernels: bool) -> Tensor:
    """[N, I] of h [N, 2I], the gate half first; times the weights where they are given."""
    if kernels:
        act: Tensor = swiglu_module().swiglu(h, weights_N, ends[-1:])
        return act
    gate, up = h.chunk(2, dim=-1)
    act = F.silu(gate).mul_(up)
    return act if weights_N is None else act.mul_(weights_N.unsqueeze(1))


def activate_backward(
    q: Tensor, h: Tensor, weights_N: Tensor, ends: Tensor, needs: tuple[bool, bool, bool], *, kernels: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """From q [N, I], which is overwritten: d_h [N, 2I], the activation times the weights [N, I], d_weights float32 [N].

    Each is None where `needs` says that it is not needed. The tail of each is anything.
    """
    need_h, need_act, need_weights = needs
    if kernels:
        dh, act, d_weights = swiglu_module().swiglu_backward(q, h, weights_N, ends[-1:], need_h, need_act)
        return dh if need_h else None, act if need_act else None, d_weights if need_weights else None
    gate, up = h.chunk(2, dim=-1)
    silu = F.silu(gate)
    act = silu * up
    d_weights = row_dot(q, act) if need_weights else None
    dh = _d_hidden(q.mul_(weights_N.unsqueeze(1)), gate, up, silu) if need_h else None
    return dh, act.mul_(weights_N.unsqueeze(1)) if need_act else None, d_weights


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """float32 [N] of the rows' inner products, products and sums in float32."""
    return a.to(torch.float32, copy=True).mul_(b).sum(-1)


def _d_hidden(d_act: Tensor, gate: Tensor, up: Tensor, silu: Tensor) -> Tensor:
    """Gradient [N, 2I] of the pre-activation, written as one tensor so that the next product needs no copy."""
    inner_size = d_act.shape[1]
    dh = d_act.new_empty((d_act.shape[0], 2 * inner_size))
    torch.mul(d_act, silu, out=dh[:, inner_size:])
    torch.ops.aten.silu_backward.grad_input(d_act.mul_(up), gate, grad_input=dh[:, :inner_size])
    return dh


def scale_(rows: Tensor, weights_N: Tensor, ends: Tensor, *, kernels: bool) -> Tensor:
    """Multiply every row in place by its float32 weight: the product is taken in float32 and rounded once."""
    if not kernels:
        return rows.mul_(weights_N.unsqueeze(1))
    swiglu_module().scale_rows(rows, weights_N, ends[-1:])
    return rows


def zero_tail_(rows: Tensor, ends: Tensor, total: int | None, *, kernels: bool) -> Tensor:
    """Zero the tail in place; `total` is ends[L-1] where the host knows it."""
    # filled, not multiplied: the tail may hold NaN, and 0 * NaN is NaN (huggingface/transformers#48205)
    if total is not None:
        if total < rows.shape[0]:
            rows[total:].zero_()
    elif kernels:
        swiglu_module().zero_tail(rows, ends[-1:])
    else:
        tail_N = torch.arange(rows.shape[0], device=rows.device) >= ends[-1]
        rows.masked_fill_(tail_N.view(-1, *([1] * (rows.dim() - 1))), 0)
    return rows

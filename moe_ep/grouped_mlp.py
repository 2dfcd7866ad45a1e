"""SwiGLU over grouped rows, row weights included, as one autograd function on `torch.nn.functional.grouped_mm`.

    h = x W_gate_up^T     a = silu(h_gate) * h_up     y = w * (a W_down^T)        (w: one weight a row)

Backward needs three products with dy, whichever side of W_down the weight stands on:

    q = dy W_down     dw = <q, a>     da = w * q     dW_down = dy^T (w * a)

so the gradient of the row weights costs no saved [N, H] and the scaled output is never kept.

What `grouped_mm` asks for is met here and nowhere else: the stride of every row and the address of every operand
are multiples of 16 bytes (`pad_inputs`, `aligned`), gradients are not expanded (`aligned`; pytorch/pytorch#144060),
and no group table meets zero rows (`rows_mm`, `weight_grad`). It leaves the rows beyond the last group unwritten.
Everything below works row by row there, and what leaves for other rows or other modules is zeroed (`zero_tail_`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .activation import activate, activate_backward, scale_, zero_tail_
from .autocast import no_autocast
from .expert_input import ExpertInput
from .permute import gather_rows
from .sms import leave_free, left_free

ROW_ALIGNMENT = 16  # bytes, of grouped_mm's row strides and addresses


def grouped_swiglu(inp: ExpertInput, w_gate_up: Tensor, w_down: Tensor, *, weight_activation: bool) -> Tensor:
    """Weighted SwiGLU of every expert row; differentiable in source, row weights and both weights.

    Kept for backward, in bytes (e = element size): h 2*I*N*e; the rows, min(U, N)*H*e (unique rows are gathered again
    in backward), only if W_gate_up needs a gradient; row weights 4*N; two references to the parameters; the integers
    of `inp`. Sizes that are not multiples of 16 bytes a row count as padded, and then a padded copy of both weights
    is kept as well. Parts that no wanted gradient needs are neither kept nor computed.

    Args:
        inp: rows of float32, bfloat16 or float16; row weights float32.
        w_gate_up: [L, 2I, H] in the rows' dtype, the gate half first.
        w_down: [L, H, I].
        weight_activation: scale the activation instead of the output row (the same value up to rounding).

    Returns:
        [N, H]. Weights multiply in float32 and are rounded once. Rows beyond offsets[L] hold anything; their gradients
        are zero and the gradient that comes in for them is never read.
    """
    hidden_size = w_gate_up.shape[2]
    inp, w_gate_up, w_down = pad_inputs(inp, w_gate_up, w_down)
    plan = _plan(inp, weight_activation)
    y_NH: Tensor = _GroupedSwiGLU.apply(inp.rows(), inp.row_weights, w_gate_up, w_down, plan)
    return y_NH if y_NH.shape[1] == hidden_size else y_NH[:, :hidden_size].contiguous()


def pad_inputs(inp: ExpertInput, w_gate_up: Tensor, w_down: Tensor) -> tuple[ExpertInput, Tensor, Tensor]:
    """Widen H and I with zeros to whole 16-byte units; exact, because silu(0) * 0 = 0 and zero columns add nothing.

    Returns its arguments untouched where both sizes fit already. Otherwise it copies the rows and both weights.
    """
    num_local, hidden_size, inner_size = w_down.shape
    unit = ROW_ALIGNMENT // w_down.element_size()
    pad_h, pad_i = -hidden_size % unit, -inner_size % unit
    if pad_h == 0 and pad_i == 0:
        return inp, w_gate_up, w_down
    halves = w_gate_up.reshape(num_local, 2, inner_size, hidden_size)
    w_gate_up = F.pad(halves, (0, pad_h, 0, pad_i)).flatten(1, 2)
    source = F.pad(inp.source, (0, pad_h))
    return dataclasses.replace(inp, source=source), w_gate_up, F.pad(w_down, (0, pad_i, 0, pad_h))


@dataclasses.dataclass(slots=True, kw_only=True)
class _Plan:
    """What forward and backward share beside the differentiable tensors."""

    ends: Tensor  # int32 [L], where each expert's rows end
    total: int | None  # offsets[L] where the host knows it without waiting for a device
    weight_activation: bool
    gather: tuple[Tensor, Tensor, Tensor] | None  # source, row_index, positions: gather the rows again in backward
    free_sms: int  # what the forward left free, backward does
    kernels: bool  # of this package, in place of plain torch


def _plan(inp: ExpertInput, weight_activation: bool) -> _Plan:
    gather = None
    if inp.row_index is not None and inp.positions is not None and inp.source.shape[0] < inp.capacity:
        gather = (inp.source.detach(), inp.row_index, inp.positions)
    return _Plan(
        ends=inp.offsets[1:],
        total=known_total(inp),
        weight_activation=weight_activation,
        gather=gather,
        free_sms=left_free(),
        kernels=inp.kernels and inp.source.is_cuda,
    )


def known_total(inp: ExpertInput) -> int | None:
    """offsets[L] as an int, or None where only the device knows it."""
    if inp.host_counts is not None:
        return sum(inp.host_counts)
    return int(inp.offsets[-1]) if inp.offsets.device.type == "cpu" else None


class _GroupedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, weights_N: Tensor, w_gate_up: Tensor, w_down: Tensor, plan: _Plan) -> Tensor:
        h = rows_mm(x_NH, w_gate_up, plan.ends, transpose=True)
        act = activate(h, weights_N if plan.weight_activation else None, plan.ends, kernels=plan.kernels)
        y_NH = rows_mm(act, w_down, plan.ends, transpose=True)
        if not plan.weight_activation:
            scale_(y_NH, weights_N, plan.ends, kernels=plan.kernels)
        _keep(ctx, h, (x_NH, weights_N, w_gate_up, w_down), plan)
        return y_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NH: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
        h, weights_N, w_gate_up, w_down, ends, *rows = ctx.saved_tensors
        need_x, need_weights, need_gate_up, need_down = ctx.needs_input_grad[:4]
        dx = d_weights = d_gate_up = d_down = dh = act = None
        dy_NH, plan = aligned(dy_NH), ctx.plan
        with leave_free(plan.free_sms):
            if need_x or need_weights or need_gate_up:
                q = rows_mm(dy_NH, w_down, ends, transpose=False)
                needs = (need_x or need_gate_up, need_down, need_weights)
                dh, act, d_weights = activate_backward(q, h, weights_N, ends, needs, kernels=plan.kernels)
            if d_weights is not None:
                zero_tail_(d_weights, ends, plan.total, kernels=plan.kernels)
            if need_down:
                act = activate(h, weights_N, ends, kernels=plan.kernels) if act is None else act
                d_down = weight_grad(dy_NH, act, ends)
            if need_x and dh is not None:
                dx = rows_mm(dh, w_gate_up, ends, transpose=False)
                zero_tail_(dx, ends, plan.total, kernels=plan.kernels)
            if need_gate_up and dh is not None:
                d_gate_up = weight_grad(dh, _rows_again(rows, plan), ends)
        return dx, d_weights, d_gate_up, d_down, None


def _keep(ctx: Any, h: Tensor, inputs: tuple[Tensor, Tensor, Tensor, Tensor], plan: _Plan) -> None:
    """Save what the wanted gradients need, and nothing else."""
    need_x, need_weights, need_gate_up, _ = ctx.needs_input_grad[:4]
    x_NH, weights_N, w_gate_up, w_down = inputs
    rows = (plan.gather or (x_NH,)) if need_gate_up else ()
    ctx.plan, plan.gather = plan, None  # what is kept of it, autograd keeps
    ctx.save_for_backward(
        h,
        weights_N,
        w_gate_up if need_x else None,
        w_down if need_x or need_weights or need_gate_up else None,
        plan.ends,
        *rows,
    )


def _rows_again(kept: list[Tensor], plan: _Plan) -> Tensor:
    """The rows that backward kept, or gathered again."""
    if len(kept) == 1:
        return kept[0]
    return gather_rows(*kept, bound=plan.ends[-1:], kernels=plan.kernels)


def rows_mm(a_NK: Tensor, w: Tensor, ends_L: Tensor, *, transpose: bool) -> Tensor:
    """[N, M]: each expert's rows times its w [K, M] (or [M, K]^T); rows beyond ends[L-1] stay unwritten."""
    w = aligned(w).transpose(1, 2) if transpose else aligned(w)
    return _grouped_mm(aligned(a_NK), w, ends_L) if a_NK.shape[0] > 0 else a_NK.new_empty((0, w.shape[2]))


def weight_grad(a_NP: Tensor, b_NQ: Tensor, ends_L: Tensor) -> Tensor:
    """[L, P, Q]: a^T b over each expert's own rows, exactly zero for an expert without rows."""
    if a_NP.shape[0] == 0:
        return a_NP.new_zeros((ends_L.shape[0], a_NP.shape[1], b_NQ.shape[1]))
    return _grouped_mm(aligned(a_NP).t(), aligned(b_NQ), ends_L)


def _grouped_mm(a: Tensor, b: Tensor, ends_L: Tensor) -> Tensor:
    with no_autocast(a.device):
        return F.grouped_mm(a, b, offs=ends_L)


def aligned(t: Tensor) -> Tensor:
    """`t`, or a copy of it where its memory is not what grouped_mm takes (a view, a slice, an expanded gradient)."""
    if t.is_contiguous() and 1 not in t.shape and t.data_ptr() % ROW_ALIGNMENT == 0:
        return t
    # strides are compared one by one: is_contiguous() ignores those of dimensions of size 1, grouped_mm does not
    strides = [math.prod(t.shape[dim + 1 :]) for dim in range(t.dim())]
    good = list(t.stride()) == strides and t.data_ptr() % ROW_ALIGNMENT == 0
    return t if good else t.clone(memory_format=torch.contiguous_format)

"""SwiGLU over grouped rows on quack-kernels, as one autograd function: gather, SwiGLU and its backward fused.

    h = x W_gate_up^T     a = silu(h_gate) * h_up     y = w * (a W_down^T)        (w: one weight a row)

One kernel gathers unique rows, multiplies and activates; one multiplies and weighs. In backward one kernel makes
q = dy W_down, the gradient of h, the activation again and the gradient of the weights; another gathers the rows again
while it multiplies. Left to us: the sum of the rows' gradients into unique rows, and zeros beyond the counts.

The experts may come in several sets (a rank's own, then those in its replica slots): each product is then one call a
set, on tensors that are shared.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import quack_gemms, quack_library
from .activation import scale_, zero_tail_
from .errors import InputError, Unavailable
from .expert_input import ExpertInput
from .grouped_mlp import aligned, known_total
from .permute import sum_rows
from .quack_library import Library
from .sms import left_free

Weights = tuple[Tensor, Tensor]


def quack_swiglu(inp: ExpertInput, *sets: Weights, weight_activation: bool) -> Tensor:
    """Weighted SwiGLU of every expert row; differentiable in source, row weights and all weights.

    Kept for backward, in bytes (e = element size): h 2*I*N*e; a reference to `source`, if any W_gate_up needs a
    gradient (rows are never expanded); row weights 4*N; references to the weights; the integers of `inp`.
    At the peak backward holds dh 2*I*N*e, the weighted activation I*N*e and, for unique rows, their gradients one by
    one H*N*e beside that.

    Args:
        inp: rows of bfloat16 or float16 on a GPU, unique rows with their index as they are; row weights float32.
        *sets: (w_gate_up [L_s, 2I, H], w_down [L_s, H, I]) each, in the rows' dtype; the experts of the first set own
            the first groups of rows, those of the second the next. Autograd keeps references: what a set holds in
            backward is what backward computes with.
        weight_activation: scale the activation instead of the output row (the same value up to rounding).

    Returns:
        [N, H]. Weights multiply in float32. Rows beyond the last group hold anything; their gradients are zero, and
        the gradient that comes in for them is never read.

    Raises:
        InputError: sets that hold another number of experts than the rows are grouped for.
        Unavailable: no quack here, or rows that are not on a GPU.
    """
    sizes = [w_down.shape[0] for _, w_down in sets]
    if sum(sizes) != inp.num_local_experts or 0 in sizes:
        raise InputError(
            f"sets of {sizes} experts came with rows for {inp.num_local_experts}; give one set for the rank's own "
            "experts, and one for its replica slots if it has any"
        )
    flat = [weight for both in sets for weight in both]
    y_NH: Tensor = _QuackSwiGLU.apply(inp.source, inp.row_weights, _plan(inp, sets, weight_activation), *flat)
    return y_NH


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What forward and backward share beside the differentiable tensors."""

    library: Library
    starts: tuple[Tensor, ...]  # int32 [L_s+1] of each set, where its experts' rows start, and end behind
    ends: Tensor  # int32 [L], where each expert's rows end
    total: int | None  # offsets[L] where the host knows it without waiting for a device
    index: Tensor | None
    positions: Tensor | None
    weight_activation: bool
    free_sms: int  # what the forward left free, backward does
    kernels: bool  # of this package, in place of plain torch


def _plan(inp: ExpertInput, sets: tuple[Weights, ...], weight_activation: bool) -> _Plan:
    quack_library.require_device(inp.source.device)
    library, why = quack_library.load()
    if library is None:
        raise Unavailable(f"experts = 'quack' cannot run here: {why}")
    starts, first = [], 0
    for _, w_down in sets:
        last = first + w_down.shape[0]
        starts.append(aligned(inp.offsets[first : last + 1]))
        first = last
    return _Plan(
        library=library,
        starts=tuple(starts),
        ends=inp.offsets[1:],
        total=known_total(inp),
        index=None if inp.row_index is None else aligned(inp.row_index),
        positions=inp.positions,
        weight_activation=weight_activation,
        free_sms=left_free(),
        kernels=inp.kernels and inp.source.is_cuda,
    )


class _QuackSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, weights_N: Tensor, plan: _Plan, *flat: Tensor) -> Tensor:
        source, weights_N = aligned(source), aligned(weights_N)
        flat = tuple(map(aligned, flat))
        hidden_size, inner_size = flat[1].shape[1:]
        num_rows = weights_N.shape[0]
        y_NH = source.new_empty((num_rows, hidden_size))
        act = source.new_empty((num_rows, inner_size))
        h = source.new_empty((num_rows, 2 * inner_size)) if any(ctx.needs_input_grad) else None
        with quack_library.leave_free(plan.library, plan.free_sms):
            _forward(plan, source, weights_N, flat, (h, act, y_NH))
        ctx.plan = plan
        ctx.save_for_backward(source if any(ctx.needs_input_grad[3::2]) else None, weights_N, h, *flat)
        return y_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NH: Tensor) -> tuple[Tensor | None, ...]:
        source, weights_N, h, *flat = ctx.saved_tensors
        needs, plan = ctx.needs_input_grad, ctx.plan
        with quack_library.leave_free(plan.library, plan.free_sms):
            dy_NH = aligned(dy_NH)
            dh, act, d_weights = _hidden_grads(plan, dy_NH, weights_N, h, flat, needs[1])
            d_source = _source_grad(plan, dh, flat) if needs[0] else None
            d_flat = _weight_grads(plan, (source, dy_NH, dh, act), flat, needs[3:])
        return d_source, d_weights, None, *d_flat


def _forward(
    plan: _Plan, x: Tensor, weights_N: Tensor, flat: tuple[Tensor, ...], out: tuple[Tensor | None, Tensor, Tensor]
) -> None:
    h, act, y_NH = out
    for starts, w_gate_up in zip(plan.starts, flat[::2], strict=True):
        quack_gemms.up(plan.library, x, plan.index, w_gate_up, starts, h, act)
    if plan.weight_activation:
        scale_(act, weights_N, plan.ends, kernels=plan.kernels)
    for starts, w_down in zip(plan.starts, flat[1::2], strict=True):
        quack_gemms.down(plan.library, act, w_down, None if plan.weight_activation else weights_N, starts, y_NH)


def _hidden_grads(
    plan: _Plan, dy_NH: Tensor, weights_N: Tensor, h: Tensor, flat: list[Tensor], need_weights: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """d_h [N, 2I], the activation times the weights [N, I], d_weights float32 [N] with zeros in the tail."""
    dh, act = torch.empty_like(h), h.new_empty((h.shape[0], h.shape[1] // 2))
    d_weights = None
    for starts, w_down in zip(plan.starts, flat[1::2], strict=True):
        found = quack_gemms.hidden_grad(
            plan.library, dy_NH, w_down, h, weights_N, starts, dh=dh, act=act, need_weights=need_weights
        )
        d_weights = found if d_weights is None or found is None else _joined(d_weights, found, starts)
    if d_weights is not None:
        zero_tail_(d_weights, plan.ends, plan.total, kernels=plan.kernels)
    return dh, act, d_weights


def _joined(before: Tensor, found: Tensor, starts: Tensor) -> Tensor:
    """What an earlier set's call found, and from starts[0] on what this set's did."""
    return torch.where(torch.arange(found.shape[0], device=found.device) < starts[0], before, found)


def _source_grad(plan: _Plan, dh: Tensor, flat: list[Tensor]) -> Tensor:
    """The gradient [U, H] of the unique rows, or [N, H] of grouped ones with zeros in the tail."""
    dx = dh.new_empty((dh.shape[0], flat[0].shape[2]))
    for starts, w_gate_up in zip(plan.starts, flat[::2], strict=True):
        quack_gemms.row_grad(plan.library, dh, w_gate_up, starts, dx)
    if plan.index is None or plan.positions is None:
        return zero_tail_(dx, plan.ends, plan.total, kernels=plan.kernels)
    return sum_rows(dx, plan.index, plan.positions, bound=plan.ends[-1:], kernels=plan.kernels)


def _weight_grads(
    plan: _Plan, rows: tuple[Tensor, Tensor, Tensor, Tensor], flat: list[Tensor], needs: tuple[bool, ...]
) -> list[Tensor | None]:
    source, dy_NH, dh, act = rows
    grads = [torch.empty_like(weight) if need else None for weight, need in zip(flat, needs, strict=True)]
    for starts, d_gate_up, d_down in zip(plan.starts, grads[::2], grads[1::2], strict=True):
        if d_down is not None:
            quack_gemms.down_grad(plan.library, dy_NH, act, starts, d_down)
        if d_gate_up is not None:
            quack_gemms.gate_up_grad(plan.library, source, plan.index, dh, starts, d_gate_up)
    return grads

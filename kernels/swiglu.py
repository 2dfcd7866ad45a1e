"""The elementwise part of grouped SwiGLU experts: activation, its backward with the row weights, scaling, the tail.

    act[n]  = silu(gate[n]) * up[n] * w[n]         h = [gate, up], the two halves of the up projection's output
    d_w[n]  = <q[n], silu(gate[n]) * up[n]>        q = gradient of the weighted activation
    d_h[n]  = w[n] * q[n] times the derivative

All in float32 from what is stored, each result rounded once. Rows from bound[0] on are neither read nor written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .library import DTYPES, launch
from .registry import register

Bound = Tensor | None
Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def _within(rows: Tensor, bound: Tensor | None) -> int:
    return rows.shape[0] if bound is None else min(int(bound[0]), rows.shape[0])


def _halves(h: Tensor, end: int) -> Pair:
    gate, up = h[:end].to(torch.promote_types(h.dtype, torch.float32)).chunk(2, dim=-1)
    return gate, up


def swiglu_reference(h: Tensor, weights: Tensor | None, bound: Tensor | None) -> Tensor:
    """Reference of `swiglu`; behind the bound zeros, where the kernel writes nothing."""
    end = _within(h, bound)
    gate, up = _halves(h, end)
    act = torch.nn.functional.silu(gate) * up
    if weights is not None:
        act = act * weights[:end, None]
    out = h.new_zeros((h.shape[0], h.shape[1] // 2))
    out[:end] = act.to(h.dtype)
    return out


def swiglu_backward_reference(
    q: Tensor, h: Tensor, weights: Tensor, bound: Bound, need_h: bool, need_act: bool
) -> Triple:
    """Reference of `swiglu_backward`; behind the bound zeros."""
    end = _within(h, bound)
    gate, up = _halves(h, end)
    wide, weight = q[:end].to(gate.dtype), weights[:end, None]
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    d_act = weight * wide
    dh, act = (t.new_zeros(t.shape if need else (0, t.shape[1])) for t, need in ((h, need_h), (q, need_act)))
    if need_h:
        dh[:end] = torch.cat([d_act * up * sigmoid * (1 + gate * (1 - sigmoid)), d_act * silu], dim=1).to(h.dtype)
    if need_act:
        act[:end] = (weight * (silu * up)).to(q.dtype)
    d_weights = torch.zeros_like(weights)
    d_weights[:end] = (wide * (silu * up)).sum(-1)
    return dh, act, d_weights


def scale_rows_reference(rows: Tensor, weights: Tensor, bound: Tensor | None) -> None:
    """Reference of `scale_rows`."""
    end = _within(rows, bound)
    rows[:end] = (rows[:end].to(torch.promote_types(rows.dtype, torch.float32)) * weights[:end, None]).to(rows.dtype)


def zero_tail_reference(rows: Tensor, bound: Tensor) -> None:
    """Reference of `zero_tail`."""
    rows[int(bound[0]) :].zero_()


def _swiglu(h: Tensor, weights: Tensor | None, bound: Tensor | None) -> Tensor:
    h, act = h.contiguous(), _fake_swiglu(h, weights, bound)
    weights = None if weights is None else weights.contiguous()
    launch("moe_ep_swiglu", h, DTYPES[h.dtype], h, act, weights, bound, *act.shape)
    return act


def _swiglu_backward(q: Tensor, h: Tensor, weights: Tensor, bound: Bound, need_h: bool, need_act: bool) -> Triple:
    q, h, weights = q.contiguous(), h.contiguous(), weights.contiguous()
    dh, act, d_weights = _fake_swiglu_backward(q, h, weights, bound, need_h, need_act)
    wanted = (dh if need_h else None, act if need_act else None)
    launch("moe_ep_swiglu_backward", h, DTYPES[h.dtype], q, h, *wanted, d_weights, weights, bound, *q.shape)
    return dh, act, d_weights


def _scale_rows(rows: Tensor, weights: Tensor, bound: Tensor | None) -> None:
    assert rows.is_contiguous(), "scale_rows works in place on contiguous rows"
    launch("moe_ep_scale_rows", rows, DTYPES[rows.dtype], rows, weights.contiguous(), bound, *rows.shape)


def _zero_tail(rows: Tensor, bound: Tensor) -> None:
    assert rows.is_contiguous(), "zero_tail works in place on contiguous rows"
    launch("moe_ep_zero_tail", rows, rows, bound, rows.shape[0], rows.shape[1:].numel() * rows.element_size())


def _fake_swiglu(h: Tensor, weights: Tensor | None, bound: Tensor | None) -> Tensor:
    return h.new_empty((h.shape[0], h.shape[1] // 2))


def _fake_swiglu_backward(q: Tensor, h: Tensor, weights: Tensor, bound: Bound, need_h: bool, need_act: bool) -> Triple:
    dh, act = (t.new_empty(t.shape if need else (0, t.shape[1])) for t, need in ((h, need_h), (q, need_act)))
    return dh, act, torch.empty_like(weights)


def _fake_in_place(rows: Tensor, *_: object) -> None:
    return None


swiglu = register(
    "swiglu(Tensor h, Tensor? weights, Tensor? bound) -> Tensor",
    reference=swiglu_reference,
    kernel=_swiglu,
    fake=_fake_swiglu,
)
# d_h, the activation scaled by the weights, and d_weights; of the first two no rows where they are not needed
swiglu_backward = register(
    "swiglu_backward(Tensor q, Tensor h, Tensor weights, Tensor? bound, bool need_h, bool need_act) "
    "-> (Tensor, Tensor, Tensor)",
    reference=swiglu_backward_reference,
    kernel=_swiglu_backward,
    fake=_fake_swiglu_backward,
)
scale_rows = register(
    "scale_rows(Tensor(a!) rows, Tensor weights, Tensor? bound) -> ()",
    reference=scale_rows_reference,
    kernel=_scale_rows,
    fake=_fake_in_place,
)
zero_tail = register(
    "zero_tail(Tensor(a!) rows, Tensor bound) -> ()",
    reference=zero_tail_reference,
    kernel=_zero_tail,
    fake=_fake_in_place,
)

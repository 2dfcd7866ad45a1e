"""Whether what was timed also computed the right thing: float64 references that know no dispatcher.

Stages are checked with experts that multiply by a constant, f_e(x) = (e + 1)/E x, so that every lost, doubled or
misplaced row and every mix-up of ids and weights shows in closed form. A layer is checked against its own expert
weights: a few tokens of every rank go to all ranks by an all-gather, each rank adds what its experts make of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ep.expert_input import ExpertInput
from moe_ep.layer import MoELayer
from moe_ep.routing import Routing

from .bench_setting import Place, Setting, gather, sum_ranks

STAGE_SAMPLES, LAYER_SAMPLES = 256, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Sampled tokens of this rank that are wrong, and the largest relative error (norm over H) among all samples."""

    wrong: int
    err: float


def sample_tokens(num_tokens: int, most: int, device: torch.device) -> Tensor:
    """Evenly spaced tokens, the first and the last among them: int64 [min(T, most)]."""
    return torch.linspace(0, num_tokens - 1, min(num_tokens, most)).round().long().to(device)


def merge_checks(checks: list[Check]) -> Check:
    """Of one candidate."""
    return Check(wrong=sum(check.wrong for check in checks), err=max(check.err for check in checks))


def compare(pairs: list[tuple[Tensor, Tensor]], tolerance: float) -> Check:
    """Relative error of each row of each (got [n, ...], want float64 [n, ...]); NaN is wrong."""
    wrong, worst = 0, 0.0
    for got, want in pairs:
        error_n = (got.double() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1).clamp_min(1e-300)
        wrong += int((~(error_n <= tolerance)).sum())
        worst = max(worst, float(error_n.nan_to_num(float("inf")).max())) if len(error_n) else worst
    return Check(wrong=wrong, err=worst)


def constant_factors(inp: ExpertInput, first_expert: int, num_experts: int) -> Tensor:
    """(e + 1)/E of each expert row, float32 [N]; anything in the tail."""
    place = torch.arange(inp.capacity, device=inp.offsets.device)
    local = torch.searchsorted(inp.offsets[1:].long(), place, right=True).clamp_max(inp.num_local_experts - 1)
    return (first_expert + local + 1).float() / num_experts


def stage_tolerance(dtype: torch.dtype, top_k: int) -> float:
    """A row is rounded to its dtype after the experts, as a partial sum and at home; sums and weights are float32.

    All terms of a token are multiples of its x with one sign, so relative errors do not grow by cancellation.
    """
    return 4 * torch.finfo(dtype).eps / 2 + (top_k + 4) * torch.finfo(torch.float32).eps / 2


def check_stages(setting: Setting, iteration: int, y: Tensor, grads: tuple[Tensor, Tensor] | None) -> Check:
    """Hold y = sum_k w (id+1)/E x, dx = sum_k (id+1)/E dy and dw = (id+1)/E against the constant experts."""
    shape, routing = setting.shape, setting.routings[iteration]
    tokens = sample_tokens(shape.T, STAGE_SAMPLES, y.device)
    factors_nK = (routing.expert_ids[tokens] + 1).double() / shape.E
    scale_n = (routing.weights[tokens].double() * factors_nK).sum(1, keepdim=True)
    pairs = [(y[tokens], setting.x[tokens].double() * scale_n)]
    if grads is not None:
        dx, dweights = grads
        pairs.append((dx[tokens], setting.dy[tokens].double() * factors_nK.sum(1, keepdim=True)))
        pairs.append((dweights[tokens], factors_nK))
    return compare(pairs, stage_tolerance(setting.dtype, shape.K))


def layer_tolerance(setting: Setting) -> float:
    """Room for rounding, far below what a lost row does (1/K of the norm and more).

    Five roundings to the dtype on the way (rows, both GEMMs, activation, sums), each grown by about 3 where terms
    cancel, and float32 accumulation over H and I, whose error grows with the root of the length.
    """
    longest = max(setting.shape.H, setting.shape.I)
    return 16 * torch.finfo(setting.dtype).eps / 2 + 8 * longest**0.5 * torch.finfo(torch.float32).eps / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSample:
    """What went through a MoE layer at some tokens: x, the gradient that arrived at y, ids; y and the gradient of x.

    `dx` None: there was no backward. `y_error` [n]: how far rounding alone may move y (in norm).
    """

    x: Tensor
    dy: Tensor
    ids: Tensor
    y: Tensor
    dx: Tensor | None
    y_error: Tensor | None = None


class Scripted(Protocol):
    """A router that takes ids from a list and computes their weights."""

    script: list[Tensor]

    def __call__(self, x_TH: Tensor) -> tuple[Routing, Any]:
        """The routing, and anything."""


def check_layer(layer: MoELayer, router: Scripted, setting: Setting, sample: LayerSample) -> Check:
    """Hold y, and dx where there is one, against float64 SwiGLU experts. Collective, with as many tokens everywhere.

    Args:
        layer: whose experts' weights are used; its shared experts are not.
        router: the layer's.
        setting: ranks and sizes.
        sample: [n, ...] of each.
    """
    with torch.enable_grad():
        x_nH = sample.x.detach().requires_grad_()
        router.script = [sample.ids]
        weights_nK = router(x_nH)[0].weights
    dy_nH = sample.dy.double()
    f_nKH, dx_nH = _dense(layer, setting.place, x_nH.detach().double(), sample.ids, weights_nK.detach().double(), dy_nH)
    y_nH = (weights_nK.detach().double().unsqueeze(-1) * f_nKH).sum(1)
    tolerance = layer_tolerance(setting)
    found = [compare([(_nearer(sample.y.double(), y_nH, sample.y_error), y_nH)], tolerance)]
    if sample.dx is not None:
        dweights_nK = torch.einsum("nh,nkh->nk", dy_nH, f_nKH)
        (through_router,) = torch.autograd.grad(weights_nK, x_nH, dweights_nK.float())
        found.append(compare([(sample.dx, dx_nH + through_router.double())], tolerance))
    return merge_checks(found)


def _nearer(got_nH: Tensor, want_nH: Tensor, by_n: Tensor | None) -> Tensor:
    """`got`, moved towards `want` by a norm of at most `by`: what remains of the error is none of rounding's."""
    if by_n is None:
        return got_nH
    off_nH = got_nH - want_nH
    norm_n = off_nH.norm(dim=1)
    return want_nH + off_nH * ((norm_n - by_n).clamp_min(0) / norm_n.clamp_min(1e-300)).unsqueeze(1)


def _dense(
    layer: MoELayer, place: Place, x_nH: Tensor, ids_nK: Tensor, weights_nK: Tensor, dy_nH: Tensor
) -> tuple[Tensor, Tensor]:
    """f_k(x) [n, K, H] of every route of this rank's tokens, and d x [n, H] through the experts, all float64."""
    x, ids, weights, dy = (gather(t, place).flatten(0, 1) for t in (x_nH, ids_nK, weights_nK, dy_nH))
    f = x.new_zeros((*ids.shape, x.shape[1]))
    dx = torch.zeros_like(x)
    first = place.rank * layer.experts.w_down.shape[0]
    for local, (w_gate_up, w_down) in enumerate(zip(layer.experts.w_gate_up, layer.experts.w_down, strict=True)):
        token, k = (ids == first + local).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        with torch.enable_grad():
            rows = x[token].requires_grad_()
            gate, up = (rows @ w_gate_up.detach().double().T).chunk(2, dim=1)
            out = (F.silu(gate) * up) @ w_down.detach().double().T
        f[token, k] = out.detach()
        (drows,) = torch.autograd.grad(out, rows, weights[token, k, None] * dy[token])
        dx.index_add_(0, token, drows)
    mine = slice(place.rank * len(x_nH), (place.rank + 1) * len(x_nH))
    return sum_ranks(f, place)[mine], sum_ranks(dx, place)[mine]

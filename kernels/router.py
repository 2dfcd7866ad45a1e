"""What a router does with each token's logits and scores, in four ops: one launch each instead of about thirty.

    mask_logits      logits from their parts; tokens that are padding, or not finite, get 0 and are counted
    top_experts      ids of the K/G highest scores of each of G groups
    weigh_routes     scores of the chosen experts, normalised and scaled, and each expert's load
    weigh_backward   gradient of the scores

Worked example of `weigh_routes`: scores [[.1, .3, .6]], ids [[2, 1]], normalised, scale 1: weights [[2/3, 1/3]],
load [0, 1, 1].
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .library import launch
from .registry import register

MAX_EXPERTS = 1024  # of top_experts: kMaxColumns of router.cu times the lanes of a warp
Valid = Tensor | None


def mask_logits_reference(logits: Tensor, valid: Valid, parts: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of `mask_logits`."""
    *rest, last = logits.chunk(parts, 1)
    logits = functools.reduce(torch.add, reversed(rest), last.clone())
    finite = logits.isfinite().all(-1)
    counted = torch.ones_like(finite) if valid is None else valid
    alive = finite & counted
    counts = torch.stack([(counted & ~finite).sum(), counted.sum()])
    return logits.masked_fill(~alive[:, None], 0), alive, counts


def top_experts_reference(scores: Tensor, alive: Tensor, top_k: int, num_groups: int) -> Tensor:
    """Reference of `top_experts`, by a stable sort: the lower id wins a tie."""
    num_tokens, num_experts = scores.shape
    size = num_experts // num_groups
    # + 0.0 turns -0.0 into 0.0
    grouped = (scores + 0.0).view(num_tokens, num_groups, size)
    chosen = grouped.sort(dim=-1, descending=True, stable=True).indices[..., : top_k // num_groups]
    if num_groups > 1:
        chosen = chosen + torch.arange(0, num_experts, size, device=scores.device)[:, None]
    return chosen.reshape(num_tokens, top_k).masked_fill(~alive[:, None], -1)


def weigh_routes_reference(
    scores: Tensor, ids: Tensor, normalize: bool, smallest: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Reference of `weigh_routes`."""
    num_experts = scores.shape[1]
    routes = (ids >= 0) & (ids < num_experts)
    chosen = scores.gather(1, ids.where(routes, 0)).masked_fill(~routes, 0)
    if normalize:
        chosen = chosen / chosen.sum(-1, keepdim=True).clamp_min(smallest)
    return chosen * scale, torch.bincount(ids[routes], minlength=num_experts)


def weigh_backward_reference(
    scores: Tensor, ids: Tensor, d_weights: Tensor, normalize: bool, smallest: float, scale: float
) -> Tensor:
    """Reference of `weigh_backward`."""
    routes = (ids >= 0) & (ids < scores.shape[1])
    at, d_chosen = ids.where(routes, 0), d_weights * scale
    if normalize:
        chosen = scores.gather(1, at).masked_fill(~routes, 0)
        total = chosen.sum(-1, keepdim=True)
        share = chosen / total.clamp_min(smallest)
        d_chosen = d_chosen - (d_chosen * share).sum(-1, keepdim=True) * (total > smallest)
        d_chosen = d_chosen / total.clamp_min(smallest)
    return torch.zeros_like(scores).scatter_add_(1, at, d_chosen.masked_fill(~routes, 0))


def _mask_logits(logits: Tensor, valid: Valid, parts: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.contiguous()
    masked, alive, counts = _fake_mask_logits(logits, valid, parts)
    valid = None if valid is None else valid.contiguous()
    launch("moe_ep_mask_logits", logits, logits, valid, masked, alive, counts, *masked.shape, parts)
    return masked, alive, counts


def _top_experts(scores: Tensor, alive: Tensor, top_k: int, num_groups: int) -> Tensor:
    scores, alive = scores.contiguous(), alive.contiguous()
    ids = _fake_top_experts(scores, alive, top_k, num_groups)
    launch("moe_ep_top_experts", scores, scores, alive, ids, *scores.shape, top_k, num_groups)
    return ids


def _weigh_routes(scores: Tensor, ids: Tensor, normalize: bool, smallest: float, scale: float) -> tuple[Tensor, Tensor]:
    scores, ids = scores.contiguous(), ids.contiguous()
    weights, load = _fake_weigh_routes(scores, ids, normalize, smallest, scale)
    sizes = (*scores.shape, ids.shape[1], normalize, smallest, scale)
    launch("moe_ep_weigh_routes", scores, scores, ids, weights, load, *sizes)
    return weights, load


def _weigh_backward(
    scores: Tensor, ids: Tensor, d_weights: Tensor, normalize: bool, smallest: float, scale: float
) -> Tensor:
    scores, ids, d_weights = scores.contiguous(), ids.contiguous(), d_weights.contiguous()
    d_scores = torch.empty_like(scores)
    sizes = (*scores.shape, ids.shape[1], normalize, smallest, scale)
    launch("moe_ep_weigh_backward", scores, scores, ids, d_weights, d_scores, *sizes)
    return d_scores


def _fake_mask_logits(logits: Tensor, valid: Valid, parts: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, columns = logits.shape
    alive = logits.new_empty(num_tokens, dtype=torch.bool)
    return logits.new_empty((num_tokens, columns // parts)), alive, logits.new_empty(2, dtype=torch.int64)


def _fake_top_experts(scores: Tensor, alive: Tensor, top_k: int, num_groups: int) -> Tensor:
    return scores.new_empty((scores.shape[0], top_k), dtype=torch.int64)


def _fake_weigh_routes(
    scores: Tensor, ids: Tensor, normalize: bool, smallest: float, scale: float
) -> tuple[Tensor, Tensor]:
    return scores.new_empty(ids.shape), ids.new_empty(scores.shape[1])


def _fake_weigh_backward(
    scores: Tensor, ids: Tensor, d_weights: Tensor, normalize: bool, smallest: float, scale: float
) -> Tensor:
    return torch.empty_like(scores)


# logits float32 [T, parts E], to be added up from the last part on, valid bool [T] -> their sum [T, E] with 0 in the
# rows that do not live, alive bool [T], and counts int64 [2]: tokens that are valid but not finite, and valid tokens
mask_logits = register(
    "mask_logits(Tensor logits, Tensor? valid, int parts=1) -> (Tensor, Tensor, Tensor)",
    reference=mask_logits_reference,
    kernel=_mask_logits,
    fake=_fake_mask_logits,
)
# scores float32 [T, E] without NaN, alive bool [T] -> ids int64 [T, K], -1 for the tokens that do not live. E at most
# MAX_EXPERTS.
top_experts = register(
    "top_experts(Tensor scores, Tensor alive, int top_k, int num_groups) -> Tensor",
    reference=top_experts_reference,
    kernel=_top_experts,
    fake=_fake_top_experts,
)
# scores float32 [T, E], ids int64 [T, K], those outside [0, E) no routes -> weights float32 [T, K], load int64 [E]
weigh_routes = register(
    "weigh_routes(Tensor scores, Tensor ids, bool normalize, float smallest, float scale) -> (Tensor, Tensor)",
    reference=weigh_routes_reference,
    kernel=_weigh_routes,
    fake=_fake_weigh_routes,
)
# the same with the weights' gradient -> that of the scores
weigh_backward = register(
    "weigh_backward(Tensor scores, Tensor ids, Tensor d_weights, bool normalize, float smallest, float scale) "
    "-> Tensor",
    reference=weigh_backward_reference,
    kernel=_weigh_backward,
    fake=_fake_weigh_backward,
)

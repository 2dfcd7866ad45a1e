"""A router's work around its scores, in plain torch or, on a GPU, in the kernels of `moe_ep.kernels.router`.

    logits -> `mask_logits` -> scores -> the choice -> `weigh_routes` -> weights and load

Both ways give the same ids, masks and counts; weights and gradients agree up to float32's rounding. Thirty small ops a
micro-batch keep a host busier than the GPU where layers are small, and while a dispatcher waits for counts nothing
else feeds the GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .load import expert_load
from .ops import router_module
from .routing import NO_ROUTE

SMALLEST_SUM = 1e-20  # sigmoid scores may all underflow to 0; far below the sum of any top-k of a softmax


def by_kernels(x_TH: Tensor, allowed: bool) -> bool:
    """Whether the kernels serve: on a GPU, and where no compiler looks on, which fuses torch's own ops itself."""
    return allowed and x_TH.is_cuda and not is_traceable_wrapper_subclass(x_TH) and not torch.compiler.is_compiling()


class _MaskLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, valid_T: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        masked_TE, alive_T, counts = router_module().mask_logits(logits_TE, valid_T)
        ctx.mark_non_differentiable(alive_T, counts)
        ctx.set_materialize_grads(False)
        return masked_TE, alive_T, counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None  # no weight and no loss reads a row that is not alive, so its gradient is 0 as it stands


def mask_logits(
    logits_TE: Tensor, valid_T: Tensor | None, *, kernels: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Set the logits of padding and of tokens with a NaN or an infinity to 0.

    Args:
        logits_TE: float32 [T, E].
        valid_T: bool [T], False for padding; None: there is none.
        kernels: let the CUDA kernels do it.

    Returns:
        logits, float32 [T, E]; the tokens that are valid and finite, bool [T]; how many are valid but not finite, and
        how many are valid, int64 [] each.
    """
    if kernels:
        masked_TE, alive_T, counts = _MaskLogits.apply(logits_TE, valid_T)
        return masked_TE, alive_T, counts[0], counts[1]
    # a NaN is the largest, and not less
    finite_T = torch.linalg.vector_norm(logits_TE.detach(), math.inf, dim=-1) < math.inf
    dead_T = ~finite_T
    if valid_T is None:
        num_tokens = torch.full((), finite_T.shape[0], device=finite_T.device)
        return logits_TE.masked_fill(dead_T[:, None], 0), finite_T, dead_T.sum(), num_tokens
    alive_T = finite_T & valid_T
    return logits_TE.masked_fill(~alive_T[:, None], 0), alive_T, (dead_T & valid_T).sum(), valid_T.sum()


class _WeighRoutes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, ids_TK: Tensor, how: tuple[bool, float, float]) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(scores_TE, ids_TK)
        ctx.how = how
        weights_TK, load_E = router_module().weigh_routes(scores_TE, ids_TK, *how)
        ctx.mark_non_differentiable(load_E)
        ctx.set_materialize_grads(False)
        return weights_TK, load_E

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grads[0] is None:
            return None, None, None
        return router_module().weigh_backward(*ctx.saved_tensors, grads[0], *ctx.how), None, None


def weigh_routes(
    scores_TE: Tensor, ids_TK: Tensor, *, normalize: bool, scale: float, kernels: bool = False
) -> tuple[Tensor, Tensor]:
    """Scores of the chosen experts as weights, and each expert's load.

    Args:
        scores_TE: float32 [T, E], differentiable.
        ids_TK: int64 [T, K]; -1 is no route, and gets weight 0.
        normalize: divide by the token's sum of them.
        scale: multiplies all.
        kernels: let the CUDA kernels do it.

    Returns:
        float32 [T, K] and int64 [E].
    """
    if kernels:
        weights_TK, load_E = _WeighRoutes.apply(scores_TE, ids_TK, (normalize, SMALLEST_SUM, scale))
        return weights_TK, load_E
    missing_TK = ids_TK == NO_ROUTE
    chosen = scores_TE.gather(1, ids_TK.clamp_min(0)).masked_fill(missing_TK, 0)
    if normalize:
        chosen = chosen / chosen.sum(-1, keepdim=True).clamp_min(SMALLEST_SUM)
    return chosen if scale == 1 else chosen * scale, expert_load(ids_TK, scores_TE.shape[1])

"""A router's logits: float32 products of x and the weights, and who of the tokens has finite ones.

On a GPU with the kernels, bfloat16 rows meet the weights in the tensor cores: a float32 weight is the sum of three
bfloat16 parts, a product of two bfloat16 numbers fits float32, and sums are taken in float32. Nothing is lost but what
the tensor cores cut off where they add, which grows with the columns: 2e-6 of the logits' norm for 2048 of them, 8e-6
for 7168 (tools/results/router-H200.jsonl), where bfloat16 weights would lose 2e-3. float32's own product is more exact,
and takes five times as long with the copy of the rows that it needs; `kernels = "torch"` takes it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .autocast import no_autocast
from .ops import router_module, split_module
from .scoring import mask_logits

Logits = tuple[Tensor, Tensor, Tensor, Tensor]
PARTS = (0, 1, 2)
# dx = d @ w up to 2^-16 of each term, behind which x's dtype rounds to 2^-9: (d0 + d1 + d2) w0 + d0 w1
_D_PARTS, _W_PARTS = (*PARTS, 0), (0, 0, 0, 1)


class _SplitLogits(torch.autograd.Function):
    """Kept for backward: x and the weights themselves."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor, valid_T: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x_TH, weight_EH)
        with no_autocast(x_TH.device):
            parts_nEH = split_module().split_bfloat16(weight_EH.detach(), PARTS, False)
            logits_TnE = torch.mm(x_TH, parts_nEH.t(), out_dtype=torch.float32)
        masked_TE, alive_T, counts = router_module().mask_logits(logits_TnE, valid_T, len(PARTS))
        ctx.mark_non_differentiable(alive_T, counts)
        ctx.set_materialize_grads(False)
        return masked_TE, alive_T, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        # no weight and no loss reads a row that is not alive, so its gradient is 0 as it stands
        if grads[0] is None:
            return None, None, None
        x_TH, weight_EH = ctx.saved_tensors
        num_experts, hidden = weight_EH.shape
        split = split_module().split_bfloat16
        dx_TH = d_weight_EH = None
        with no_autocast(x_TH.device):
            d_TnE = split(grads[0], _D_PARTS, True)
            if ctx.needs_input_grad[0]:
                dx_TH = torch.mm(d_TnE, split(weight_EH.detach(), _W_PARTS, False))
            if ctx.needs_input_grad[1]:
                columns = d_TnE[:, : len(PARTS) * num_experts]
                d_nEH = torch.mm(columns.t(), x_TH, out_dtype=torch.float32)
                d_weight_EH = d_nEH.view(len(PARTS), num_experts, hidden).sum(0)
        return dx_TH, d_weight_EH, None


def masked_logits(x_TH: Tensor, weight_EH: Tensor, valid_T: Tensor | None, *, kernels: bool) -> Logits:
    """Logits of a router, 0 for padding and for tokens with a NaN or an infinity.

    Args:
        x_TH: [T, H], any float dtype.
        weight_EH: float32 [E, H].
        valid_T: bool [T], False for padding; None: there is none.
        kernels: let the CUDA kernels do what they can.

    Returns:
        See `scoring.mask_logits`; differentiable in x and the weights.
    """
    if kernels and x_TH.dtype is torch.bfloat16 and x_TH.shape[1] % 8 == 0:  # rows that the tensor cores take
        masked_TE, alive_T, counts = _SplitLogits.apply(x_TH, weight_EH, valid_T)
        return masked_TE, alive_T, counts[0], counts[1]
    with no_autocast(x_TH.device):
        logits_TE = F.linear(x_TH.float(), weight_EH)
    return mask_logits(logits_TE, valid_T, kernels=kernels)

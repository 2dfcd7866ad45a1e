"""`experts = "torch"`: SwiGLU on `torch.nn.functional.grouped_mm`."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .config import MoEConfig
from .errors import Unavailable
from .expert_input import ExpertInput
from .experts import SplitExperts, Weights
from .experts_registry import register_experts
from .grouped_mlp import grouped_swiglu
from .sms import grouped_mm_refusal


@register_experts("torch")
class TorchExperts(SplitExperts):
    """Experts on `torch.nn.functional.grouped_mm`: float32, bfloat16 and float16, any H and I.

    On CUDA, bfloat16 waits for the host nowhere; for float32 and float16 grouped_mm itself reads the offsets on the
    host. See `moe_ep.grouped_mlp` for what is kept for backward and for sizes that are not multiples of 16 bytes.
    """

    fresh_grads: ClassVar[bool] = True

    def __init__(self, config: MoEConfig, num_local: int, first_expert: int, layer_index: int) -> None:
        _refuse_float64(getattr(torch, config.dtype))
        super().__init__(config, num_local, first_expert, layer_index)

    def compute_set(self, inp: ExpertInput, weights: Weights) -> Tensor:
        """See SplitExperts."""
        _refuse_float64(self.w_down.dtype)
        return grouped_swiglu(inp, *weights, weight_activation=self.config.weighting == "activation")

    def reserve_refusal(self, device: torch.device) -> str | None:
        """See GroupedExperts."""
        return grouped_mm_refusal(device, self.w_down.dtype)


def _refuse_float64(dtype: torch.dtype) -> None:
    if dtype == torch.float64:
        raise Unavailable(
            "experts = 'torch' cannot compute in float64: torch.nn.functional.grouped_mm takes float32, bfloat16 and "
            "float16 only; set experts = 'loop'"
        )

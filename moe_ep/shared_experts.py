"""The shared experts of a layer, which every token visits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .activation import scaled, swiglu
from .autocast import no_autocast
from .config import MoEConfig
from .errors import InputError
from .initial import SHARED_EXPERT_ID, generator_for, normal_
from .schema import require


class SharedExperts(nn.Module):
    """The experts that every token visits: one SwiGLU of num_shared_experts * shared_intermediate_size.

    Attributes:
        w_gate_up: [2*I_s, H], the gate half first.
        w_down: [H, I_s].
        w_gate: [H], or None without `shared_expert_gate`: the output is scaled by sigmoid(x . w_gate), as in
            Qwen2-MoE (arXiv:2407.10671).
    """

    def __init__(self, config: MoEConfig, layer_index: int = 0) -> None:
        super().__init__()
        inner_size = config.num_shared_experts * config.shared_intermediate_size
        require(inner_size >= 1, f"shared experts need num_shared_experts >= 1, got {config.num_shared_experts}")
        self.config, self.layer_index = config, layer_index
        dtype: torch.dtype = getattr(torch, config.dtype)
        self.w_gate_up = nn.Parameter(torch.empty(2 * inner_size, config.hidden_size, dtype=dtype))
        self.w_down = nn.Parameter(torch.empty(config.hidden_size, inner_size, dtype=dtype))
        self.w_gate: nn.Parameter | None = None
        if config.shared_expert_gate:
            self.w_gate = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype))
        self.reset_parameters(0)

    def reset_parameters(self, seed: int) -> None:
        """Draw float32 normal(0, init_std) values that depend on (seed, layer_index) alone, and cast them."""
        generator = generator_for(seed, self.layer_index, SHARED_EXPERT_ID)
        for parameter in self.parameters():
            normal_(parameter, self.config.init_std, generator)

    def forward(self, x_TH: Tensor) -> Tensor:
        """[T, H] in x's dtype, which must be the parameters' (InputError otherwise); T may be 0."""
        if x_TH.dtype != self.w_down.dtype or x_TH.shape[-1] != self.w_down.shape[0]:
            raise InputError(
                f"shared experts of H = {self.w_down.shape[0]} in {self.w_down.dtype} got x {tuple(x_TH.shape)} in "
                f"{x_TH.dtype}; cast x or build the layer with its dtype and size"
            )
        with no_autocast(x_TH.device):
            y_TH = F.linear(swiglu(F.linear(x_TH, self.w_gate_up)), self.w_down)
            if self.w_gate is None:
                return y_TH
            return scaled(y_TH, torch.sigmoid(_at_least_float32(x_TH @ self.w_gate)))


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()

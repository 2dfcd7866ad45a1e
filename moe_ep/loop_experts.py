"""`experts = "loop"`: one expert after the other, which the others are held to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .activation import scaled, swiglu
from .expert_input import ExpertInput
from .experts import GroupedExperts, Weights
from .experts_registry import register_experts


@register_experts("loop")
class LoopExperts(GroupedExperts):
    """The reference: one expert after the other in plain torch, any float dtype; waits for the counts on a device."""

    fresh_grads: ClassVar[bool] = True

    def compute(self, inp: ExpertInput) -> Tensor:
        """See GroupedExperts.forward; here the rows beyond offsets[L] are zero."""
        return self.compute_sets(inp, [(self.w_gate_up, self.w_down)])

    def compute_sets(self, inp: ExpertInput, sets: Sequence[Weights]) -> Tensor:
        """See GroupedExperts; one expert after the other all the same."""
        counts = inp.host_counts or tuple(inp.tokens_per_expert.tolist())
        every = [both for gate_up, down in sets for both in zip(gate_up, down, strict=True)]
        total = sum(counts)
        # every expert is visited, also without rows: its parameters must get zero gradients, not None
        rows = inp.rows()[:total].split(counts)
        weights = inp.row_weights[:total].split(counts)
        parts = [self._expert(expert, x, w) for expert, x, w in zip(every, rows, weights, strict=True)]
        tail = parts[0].new_zeros((inp.capacity - total, self.w_down.shape[1]))
        return torch.cat([*parts, tail])

    def _expert(self, expert: Weights, x_NH: Tensor, weights_N: Tensor) -> Tensor:
        w_gate_up, w_down = expert  # [2I, H], [H, I]
        act = swiglu(F.linear(x_NH, w_gate_up))
        if self.config.weighting == "activation":
            return F.linear(scaled(act, weights_N), w_down)
        return scaled(F.linear(act, w_down), weights_N)

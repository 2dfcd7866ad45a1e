"""A rank's experts that have copies: only they need sums in float32; the others' gradients stay as they are."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from .plan import Plan
from .transport import grad_dtype


class Hot(NamedTuple):
    """What is reduced of a rank's masters.

    Attributes:
        plan: with instances counted among the B experts a rank reduces in place of its L.
        locals_B: int64 [B], local experts, those with copies ascending and in front, then others; None: all L of them.
    """

    plan: Plan
    locals_B: Tensor | None

    def of(self, grad: Tensor) -> Tensor:
        """[B, ...] of its own, of the dtype that is summed in, from a gradient [L, ...]."""
        dtype = grad_dtype(grad.dtype)
        if self.locals_B is None:
            return grad.to(dtype, copy=True)
        return grad.index_select(0, self.locals_B).to(dtype)


def hot_experts(plan: Plan, rank: int, device: torch.device) -> Hot:
    """Those of a rank, without a host sync; nothing is left out where (R - 1) S copies could be of all L experts.

    Args:
        plan: the same on every rank, wherever it lies.
        rank: whose experts.
        device: of the gradients.

    Example: L = 4, R = 2, S = 1, and rank 1 has a copy of expert 2. Rank 0 reduces B = 1 expert, local 2, which `plan`
    counts as its expert 0.
    """
    num_ranks, num_local, held = plan.num_ranks, plan.num_local, plan.instances
    most = (num_ranks - 1) * plan.slots
    if most >= num_local:
        return Hot(plan, None)
    copied = torch.zeros(num_ranks * num_local + 1, dtype=torch.int32, device=held.device)
    copied = copied.index_fill_(0, (held + 1).flatten().long(), 1)[1:].view(num_ranks, num_local)
    number = (copied.cumsum(1) - 1).flatten()  # among those of its home
    expert = held.clamp_min(0).long()
    counted = expert // num_local * num_local + number[expert]
    renumbered = torch.where(held >= 0, counted, -1).to(held.dtype)
    locals_B = (1 - copied[rank]).argsort(stable=True)[:most].to(device)
    return Hot(dataclasses.replace(plan, instances=renumbered), locals_B)

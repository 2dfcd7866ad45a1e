"""Optimizers over Megatron's gradient buffers: torch's AdamW, or Megatron's distributed optimizer."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor, nn

from moe_ep.gradients import clip_, global_norm
from recipes.megatron_recipe import MegatronRecipe
from recipes.optim import BETAS, EPS
from recipes.ranks import Ranks


class Optimizer(Protocol):
    """What the loop asks for."""

    def zero_grad(self) -> None:
        """Before a step's first micro-batch."""

    def step(self, lr: float) -> float:
        """One update at rate `lr`; the global norm of the gradients before clipping."""
        ...


class BufferAdamW:
    """torch's AdamW on float32 masters, fed from `main_grad`. Matrices decay, vectors do not.

    Args:
        model: wrapped in Megatron's DistributedDataParallel.
        weight_decay, clip_norm: of a recipe.
        ranks: all of them hold the dense parameters, `ranks.dp_size` of them each expert.
    """

    def __init__(self, model: nn.Module, weight_decay: float, clip_norm: float, ranks: Ranks) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach() if p.dtype == torch.float32 else p.detach().float() for p in self.params]
        self.clip_norm, self.ranks = clip_norm, ranks
        groups = [
            {"params": [m for m in self.masters if m.dim() >= 2], "weight_decay": weight_decay},
            {"params": [m for m in self.masters if m.dim() < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPS, fused=True)

    def zero_grad(self) -> None:
        """The buffers are zeroed by the model."""

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """See Optimizer."""
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad = param.main_grad.float()  # type: ignore[attr-defined]  # Megatron's
        norm = global_norm(self._counted(), 2.0, self.ranks.group, self.ranks.device)
        clip_([m.grad for m in self.masters if m.grad is not None], norm, self.clip_norm)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        for param, master in zip(self.params, self.masters, strict=True):
            if param.dtype != torch.float32:
                param.copy_(master)
        return norm.item()

    def _counted(self) -> list[Tensor]:
        """Gradients that this rank counts in the global norm: dense ones on rank 0, experts once each."""
        first_copy = self.ranks.rank < self.ranks.ep_size
        found = []
        for param, master in zip(self.params, self.masters, strict=True):
            expert = not getattr(param, "allreduce", True)
            if master.grad is not None and (first_copy if expert else self.ranks.rank == 0):
                found.append(master.grad)
        return found


class Distributed:
    """Megatron's distributed optimizer (Adam with decoupled decay)."""

    def __init__(self, loaded: MegatronRecipe, model: nn.Module) -> None:
        train = loaded.recipe.train
        config = OptimizerConfig(
            optimizer="adam",
            lr=train.lr,
            min_lr=train.min_lr,
            weight_decay=train.weight_decay,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPS,
            clip_grad=train.clip_norm,
            bf16=loaded.recipe.model.torch_dtype == torch.bfloat16,
            params_dtype=loaded.recipe.model.torch_dtype,
            use_distributed_optimizer=True,
        )
        self.inner: Any = get_megatron_optimizer(config, [model])

    def zero_grad(self) -> None:
        """See Optimizer."""
        self.inner.zero_grad()

    def step(self, lr: float) -> float:
        """See Optimizer."""
        for group in self.inner.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
        _, norm, _ = self.inner.step()
        return float(norm)


def build_optimizer(loaded: MegatronRecipe, model: nn.Module, ranks: Ranks) -> Optimizer:
    """The recipe's optimizer."""
    train = loaded.recipe.train
    if loaded.megatron.optimizer == "distributed":
        return Distributed(loaded, model)
    return BufferAdamW(model, train.weight_decay, train.clip_norm, ranks)

"""Optimizer and learning rate over parameters of which each rank owns a part.

A parameter is plain (whole on this rank) or a DTensor (sharded by FSDP2), and torch's multi-tensor code refuses lists
of both. Everything here therefore works on the *local shards*, plain tensors: one list, one fused AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_ep.gradients import counts_shard, is_sharded, local_shard

BETAS = (0.9, 0.95)
EPS = 1e-8


@dataclass(frozen=True, slots=True)
class OwnedParameter:
    """A parameter, its name, and whether this rank counts it in sums over all ranks.

    Attributes:
        name: fully qualified name in the model.
        param: plain or DTensor.
        counted: exactly one rank counts each element: every rank its own shard or its own experts, one rank a replica.
    """

    name: str
    param: nn.Parameter
    counted: bool


def owned_parameters(named: Iterable[tuple[str, nn.Parameter]], experts: set[str], rank: int) -> list[OwnedParameter]:
    """Classify parameters.

    Args:
        named: `model.named_parameters()`.
        experts: names of parameters that differ from rank to rank although they may be plain tensors.
        rank: this rank in the whole job.
    """
    owned = []
    for name, param in named:
        counted = counts_shard(param) if is_sharded(param) else name in experts or rank == 0
        owned.append(OwnedParameter(name, param, counted))
    return owned


def learning_rate(step: int, *, peak: float, floor: float, warmup: int, total: int) -> float:
    """Rate of step `step` (1 is the first): linear to `peak` at `warmup`, then a cosine to `floor` at `total`."""
    if step <= warmup:
        return peak * step / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))


class ShardedAdamW:
    """AdamW over local shards, with float32 masters of parameters in a lower precision.

    Two groups: matrices decay, vectors (norms, biases) do not. Gradients of plain low-precision parameters are summed
    in float32 over the micro-batches of a step; FSDP2 does the same for the ones it shards. A parameter without a
    gradient is stepped with zero, so that all ranks and all parameters count the same steps.

    Args:
        params: all parameters of this rank.
        weight_decay: of matrices.
    """

    def __init__(self, params: Sequence[OwnedParameter], weight_decay: float) -> None:
        self.params = list(params)
        self.shards = [local_shard(p.param) for p in self.params]
        self.masters = [s if s.dtype == torch.float32 else s.float() for s in self.shards]
        self._sums: dict[int, Tensor] = {}
        for index, owned in enumerate(self.params):
            if owned.param.dtype != torch.float32 and not is_sharded(owned.param):
                owned.param.register_post_accumulate_grad_hook(self._sum_into(index))
        matrices = [m for p, m in zip(self.params, self.masters, strict=True) if p.param.dim() >= 2]
        vectors = [m for p, m in zip(self.params, self.masters, strict=True) if p.param.dim() < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        # a rate of 0 until the first step(lr)
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=BETAS, eps=EPS, fused=True)
        for master in self.masters:
            step = torch.zeros((), dtype=torch.float32, device=master.device)
            moments = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
            self.adamw.state[master] = {"step": step, **moments}

    def _sum_into(self, index: int):  # type: ignore[no-untyped-def]  # the hook's type is torch's own
        def hook(param: Tensor) -> None:
            assert param.grad is not None
            if index in self._sums:
                self._sums[index] += param.grad
            else:
                self._sums[index] = param.grad.float()
            param.grad = None

        return hook

    def gradients(self) -> list[Tensor]:
        """Float32 gradient of every local shard, zero where there was none; in the parameters' order."""
        for index, (owned, master) in enumerate(zip(self.params, self.masters, strict=True)):
            grad = self._sums.get(index, owned.param.grad)
            master.grad = torch.zeros_like(master) if grad is None else local_shard(grad).to(master.dtype)
        return [master.grad for master in self.masters if master.grad is not None]

    def counted(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Those of `gradients()` that this rank counts in a global norm."""
        return [g for owned, g in zip(self.params, gradients, strict=True) if owned.counted]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One AdamW step with the gradients that `gradients()` laid out, at rate `lr`; then drops the gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.publish()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        self._sums.clear()
        for owned, master in zip(self.params, self.masters, strict=True):
            owned.param.grad = master.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters (nothing to do in float32, where they are one)."""
        for shard, master in zip(self.shards, self.masters, strict=True):
            if shard is not master:
                shard.copy_(master)

    def moments(self, index: int) -> dict[str, Tensor]:
        """First and second moment of one parameter's shard."""
        state = self.adamw.state[self.masters[index]]
        return {name: state[name] for name in ("exp_avg", "exp_avg_sq")}

    def set_step(self, step: int) -> None:
        """Number of optimizer steps done, for the bias correction (on resume)."""
        for master in self.masters:
            self.adamw.state[master]["step"].fill_(step)

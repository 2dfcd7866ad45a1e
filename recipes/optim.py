"""Optimizer, learning rate and global gradient norm over parameters of which each rank owns a part.

A parameter is plain (whole on this rank) or a DTensor (sharded by FSDP2), and torch's multi-tensor code refuses lists
of both. Everything here therefore works on the *local shards*, plain tensors: one list, one fused AdamW, one norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

BETAS = (0.9, 0.95)
EPS = 1e-8


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: shares its memory, carries no gradient history."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


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
        if isinstance(param, DTensor):
            mesh, coordinate = param.device_mesh, param.device_mesh.get_coordinate()
            assert coordinate is not None, f"{name} lives on a mesh that this rank is not part of"
            replicas = [i for i, place in enumerate(param.placements) if isinstance(place, Replicate)]
            counted = all(coordinate[i] == 0 for i in replicas if mesh.size(i) > 1)
        else:
            counted = name in experts or rank == 0
        owned.append(OwnedParameter(name, param, counted))
    return owned


@torch.no_grad()
def global_norm(
    grads: Sequence[Tensor], norm_type: float, group: dist.ProcessGroup | None, device: torch.device
) -> Tensor:
    """Norm over all elements of all ranks, float64 [], the same on every rank.

    Args:
        grads: what this rank counts (see `OwnedParameter.counted`), plain tensors; may be empty.
        norm_type: 1, 2, any p > 0, or infinity.
        group: all ranks; None: this rank alone.
        device: where the sum is made when `grads` is empty.
    """
    parts = [part for dtype in {g.dtype for g in grads} for part in _norms(grads, dtype, norm_type)]
    stacked = torch.stack(parts).double() if parts else torch.zeros(1, dtype=torch.float64, device=device)
    infinite = math.isinf(norm_type)
    total = stacked.max() if infinite else stacked.pow(norm_type).sum()
    if group is not None:
        dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    return total if infinite else total.pow(1.0 / norm_type)


def _norms(grads: Sequence[Tensor], dtype: torch.dtype, norm_type: float) -> list[Tensor]:
    chosen = [g for g in grads if g.dtype == dtype and g.numel()]
    return list(torch._foreach_norm(chosen, norm_type, dtype=torch.float32)) if chosen else []


@torch.no_grad()
def clip_(grads: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their global norm is at most `max_norm`; no host sync."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()
    for dtype in {g.dtype for g in grads}:
        torch._foreach_mul_([g for g in grads if g.dtype == dtype], scale)


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
            if owned.param.dtype != torch.float32 and not isinstance(owned.param, DTensor):
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

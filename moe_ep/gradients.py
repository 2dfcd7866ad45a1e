"""The norm of all gradients of a model whose experts are spread over ranks, and clipping by it.

`torch.nn.utils.clip_grad_norm_` sees this rank's experts only, so each rank scales by a factor of its own and copies
drift apart. Here every element of the model counts once: an expert on the rank that holds it, a shard on its owner, a
copy on one rank. The factor is the same on all ranks.

    norm = clip_grad_norm_(model, 1.0, group_of_all_ranks)      # after the backward of a step, before the optimizer
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import InputError, lost_peer
from .step import moe_layers

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@torch.no_grad()
def grad_norm(model: nn.Module, group: dist.ProcessGroup | None, *, norm_type: float = 2.0) -> Tensor:
    """Norm of all gradients of the model over all ranks, float64 [], the same on every rank. Collective.

    Gradients must be those of the whole step: experts' as the backward leaves them, all others summed over the ranks
    (and after FSDP2 they are). Parameters without a gradient count as zero.

    Args:
        model: each rank holds copies, or shards (DTensor), of all parameters, except that the experts of its MoE layers
            are those of its place in the expert-parallel group.
        group: all ranks that train the model; None: this rank alone.
        norm_type: 1, 2, any p > 0, or infinity.

    Raises:
        InputError: model is no module, norm_type is not above 0, or the experts' shards do not cover the group.
        PeerError: a rank did not come within the group's timeout.
    """
    counted, device = _counted_gradients(model, group)
    return global_norm(counted, norm_type, group, device)


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, group: dist.ProcessGroup | None, *, norm_type: float = 2.0
) -> Tensor:
    """Scale all gradients in place so that `grad_norm` is at most `max_norm`; returns the norm before. Collective.

    No host sync. A norm that is not finite is returned as it is, and leaves gradients that are not finite either: look
    at it before the optimizer's step, all ranks see the same.

    Raises:
        InputError, PeerError: see `grad_norm`; and max_norm is not above 0.
    """
    if not max_norm > 0:
        raise InputError(f"max_norm must lie above 0, got {max_norm}; use grad_norm to look without clipping")
    norm = grad_norm(model, group, norm_type=norm_type)
    clip_([local_shard(p.grad) for p in model.parameters() if p.grad is not None], norm, max_norm)
    return norm


def _counted_gradients(model: nn.Module, group: dist.ProcessGroup | None) -> tuple[list[Tensor], torch.device]:
    """The gradients that this rank counts, and the device of the model."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model must be an nn.Module, got {type(model).__name__}; parameters alone do not say which of them are "
            "experts, so give the model itself in place of model.parameters()"
        )
    rank = dist.get_rank() if dist.is_initialized() else 0
    everybody = [rank] if group is None else dist.get_process_group_ranks(group)
    holders = _expert_holders(model)
    for name, param in model.named_parameters():
        if param in holders:
            _check_expert(name, param, holders[param], everybody)
    params = list(model.parameters())
    counted = [p.grad for p in params if p.grad is not None and _counts(p, holders.get(p), rank, everybody[0])]
    device = params[0].device if params else torch.device("cpu")
    return [local_shard(grad) for grad in counted], device


def _expert_holders(model: nn.Module) -> dict[nn.Parameter, list[int]]:
    """The ranks of the expert-parallel group, for each parameter of an expert; [] where a layer has no group."""
    holders: dict[nn.Parameter, list[int]] = {}
    for layer in moe_layers(model):
        group = layer.dispatcher.group
        ranks = [] if group is None else dist.get_process_group_ranks(group)
        holders |= dict.fromkeys(layer.experts.parameters(), ranks)
    return holders


def _check_expert(name: str, param: Tensor, spread: list[int], everybody: list[int]) -> None:
    missing = set(spread) - set(everybody)
    if missing:
        raise InputError(
            f"{name} belongs to experts spread over ranks {spread}, of which the group lacks {sorted(missing)}; give "
            "the group of all ranks that train the model"
        )
    shards, num = param.device_mesh.size() if is_sharded(param) else 0, max(1, len(spread))
    if shards and shards * num != len(everybody):
        raise InputError(
            f"{name} is sharded over {shards} ranks and spread over {num}, which makes {shards * num}, but the group "
            f"has {len(everybody)}; shard experts over all ranks that hold the same ones, and give all ranks' group"
        )


def _counts(param: Tensor, spread: list[int] | None, rank: int, first: int) -> bool:
    """Whether this rank counts its part; `first` is the first rank of all, `spread` an expert's group."""
    if is_sharded(param):
        # experts: every mesh holds others; the rest: of several meshes with the same shards one counts
        return counts_shard(param) and (spread is not None or first in param.device_mesh.mesh.flatten().tolist())
    # of several expert-parallel groups with the same experts one counts; of copies, the first rank's
    return first in spread if spread else rank == first


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor; imports no DTensor where nobody else did."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: shares its memory, carries no gradient history."""
    with torch.no_grad():
        return tensor.to_local() if is_sharded(tensor) else tensor.detach()


def counts_shard(tensor: DTensor) -> bool:
    """Whether this rank is the one that counts its part among the ranks of the mesh that hold the same."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a parameter lives on a mesh that this rank is not part of"
    replicas = [i for i, place in enumerate(tensor.placements) if place.is_replicate()]
    return all(coordinate[i] == 0 for i in replicas if mesh.size(i) > 1)


@torch.no_grad()
def global_norm(
    grads: Sequence[Tensor], norm_type: float, group: dist.ProcessGroup | None, device: torch.device
) -> Tensor:
    """Norm over all elements of all ranks, float64 [], the same on every rank. Collective.

    Args:
        grads: what this rank counts, plain tensors; may be empty. Exactly one rank counts each element.
        norm_type: 1, 2, any p > 0, or infinity.
        group: all ranks; None: this rank alone.
        device: where the sum is made when `grads` is empty.

    Raises:
        InputError: norm_type is not above 0.
        PeerError: a rank did not come within the group's timeout.
    """
    if not norm_type > 0:
        raise InputError(f"norm_type must lie above 0 (1, 2, infinity), got {norm_type}")
    parts = [part for dtype in _dtypes(grads) for part in _norms(grads, dtype, norm_type)]
    stacked = torch.stack(parts).double() if parts else torch.zeros(1, dtype=torch.float64, device=device)
    infinite = math.isinf(norm_type)
    total = stacked.max() if infinite else stacked.pow(norm_type).sum()
    if group is not None:
        try:
            dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
        except RuntimeError as err:
            raise lost_peer("gradient norm", err) from err
    return total if infinite else total.pow(1.0 / norm_type)


def _dtypes(grads: Iterable[Tensor]) -> list[torch.dtype]:
    return list(dict.fromkeys(g.dtype for g in grads))


def _norms(grads: Sequence[Tensor], dtype: torch.dtype, norm_type: float) -> list[Tensor]:
    chosen = [g for g in grads if g.dtype == dtype and g.numel()]
    return list(torch._foreach_norm(chosen, norm_type, dtype=torch.float32)) if chosen else []


@torch.no_grad()
def clip_(grads: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their global norm is at most `max_norm`; no host sync."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()
    for dtype in _dtypes(grads):
        torch._foreach_mul_([g for g in grads if g.dtype == dtype], scale)

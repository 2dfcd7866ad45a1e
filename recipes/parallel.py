"""Sharding and recompute: FSDP2 over the mesh, and activation checkpoints that replay the routing.

A loss here is a sum divided by the global number of tokens, so a gradient is a plain sum over ranks everywhere.
Experts are sharded over `dp` only: the dispatcher's backward already sums over the tokens of all `ep` ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from moe_ep.schema import require
from recipes.ranks import Ranks


def expert_names(model: nn.Module) -> set[str]:
    """Names of the parameters that differ from rank to rank of an expert-parallel group."""
    return {
        f"layers.{index}.moe.experts.{name}"
        for index, layer in enumerate(_layers(model))
        if layer.moe is not None
        for name, _ in layer.moe.experts.named_parameters()
    }


def _layers(model: nn.Module) -> Sequence[Any]:
    layers = model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    return list(layers)


def shard(model: nn.Module, ranks: Ranks, dtype: torch.dtype) -> None:
    """Apply FSDP2: experts over `dp`, everything else over all ranks, one unit per layer and one for both ends.

    Where dp is 1 experts stay plain (a shard group of one rank ignored the divide factor, pytorch/pytorch#167178).
    Sharded parameters become float32 and are gathered in `dtype`; gradients are summed in float32.
    """
    if ranks.world is None or ranks.mesh is None:
        return
    low = dtype != torch.float32
    # inputs keep their dtype: activations have the right one already, and routing weights stay float32
    whole = MixedPrecisionPolicy(cast_forward_inputs=False)
    mixed = dataclasses.replace(whole, param_dtype=dtype, reduce_dtype=torch.float32) if low else whole
    plain: set[nn.Parameter] = set()
    for layer in _layers(model):
        if layer.moe is not None and ranks.dp_size == 1:
            plain |= set(layer.moe.experts.parameters())
    for param in model.parameters():
        if low and param not in plain:
            param.data = param.data.float()
    for layer in _layers(model):
        if layer.moe is not None and ranks.dp_size > 1:
            fully_shard(layer.moe.experts, mesh=ranks.mesh["dp"], mp_policy=mixed)
        if layer.moe is not None and low:  # the router computes in float32
            fully_shard(layer.moe.router, mesh=ranks.world, mp_policy=whole)
        fully_shard(layer, mesh=ranks.world, mp_policy=mixed, ignored_params=plain)
    fully_shard(model, mesh=ranks.world, mp_policy=mixed, ignored_params=plain)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
            module.set_gradient_divide_factor(1.0)


def set_last_micro_batch(model: nn.Module, last: bool) -> None:
    """Reduce gradients over ranks, and give up gathered parameters, at the last micro-batch of a step only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


def recompute(model: nn.Module, mode: str, context_fn: Callable[[], Any]) -> int:
    """Recompute whole layers ("layer") or MoE layers ("moe") in backward; returns how many layers do so.

    Args:
        model: a Decoder, before or after `shard`.
        mode: "none", "moe" or "layer".
        context_fn: makes the recomputed pass replay the routing of the first.

    Raises:
        RecipeError: no module of that kind in the model.
    """
    if mode == "none":
        return 0
    chosen = [layer for layer in _layers(model) if mode == "layer" or layer.moe is not None]
    require(bool(chosen), f"train.recompute = {mode!r} matched no module of this model; use 'layer' or 'none'")
    region = functools.partial(checkpoint, use_reentrant=False, context_fn=context_fn)
    for layer in chosen:
        layer.recompute_in(region, attention=mode == "layer")
    return len(chosen)

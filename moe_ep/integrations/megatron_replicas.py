"""Copies of hot experts in Megatron-Core's MoE layer: its experts compute their own rows, a second set of them others.

The second set is made like the first, for S experts, and has no parameters: its weights are the slots, which are put in
their place for each call. It stands in no module's tree, so parameters, optimizer, checkpoints and the gradient norm
know nothing of it. Copies travel by messages, since Megatron keeps each expert's matrices in parameters of their own.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor
from torch.func import functional_call

from ..config import MoEConfig, ReplicaConfig
from ..dispatch.base import Dispatcher
from ..errors import RecipeError
from ..replica.beside import LeaseBeside
from ..replica.flight import Tensors
from ..replica.runtime import ReplicaRuntime
from ..routing import Routing
from .megatron_limits import REPLICA_LIMITS, known_options, refuse

WHO = "copies of experts (replica) in moe_ep's MoE layer"
# of SequentialMLP, and of TEGroupedMLP
_WEIGHT = re.compile(r"(?:local_experts\.(?P<one>\d+)\.)?(?P<matrix>linear_fc[12])\.weight(?P<other>\d*)")
_MATRICES = ("linear_fc1", "linear_fc2")


def replica_config(given: Mapping[str, Any] | None, config: Any) -> ReplicaConfig:
    """The layer's option `replica`, held against what a TransformerConfig asks for.

    Raises:
        RecipeError: a key or value that does not exist, or that is not served here, by its name.
    """
    values = dict(given or {})
    known_options(values, [field.name for field in dataclasses.fields(ReplicaConfig)])
    replica = ReplicaConfig(**values)
    if replica.slots == 0:
        return replica
    refuse(config, REPLICA_LIMITS, WHO)
    if replica.transport == "peer":
        raise RecipeError(
            f"replica.transport = 'peer' is not supported by {WHO}: Megatron keeps each expert's matrices in "
            "parameters of their own, and the kernels push from one block; set it to 'messages' or 'auto'"
        )
    if replica.joint:
        raise RecipeError(
            f"replica.joint = true is not supported by {WHO}: each piece of a batch is sent before the next one is "
            "routed; set it to false"
        )
    return dataclasses.replace(replica, transport="messages")


class ExpertCopies:
    """The copies of one MoE layer.

    Args:
        layer: whose experts are copied; their forward takes the rows of copies, too, from now on.
        config: sizes, and `config.replica`.
        dispatcher: of P physical experts.
        pg_collection: Megatron's process groups.

    Attributes:
        expected: the micro-batch whose rows the experts compute next.

    Raises:
        RecipeError: experts that keep their weights in another way.
    """

    def __init__(self, layer: MoELayer, config: MoEConfig, dispatcher: Dispatcher, pg_collection: Any) -> None:
        experts, slots = layer.experts, config.replica.slots
        self.masters = _weights(experts, layer.num_local_experts)
        key = (config.replica, config.expert_intermediate_size, config.num_experts)
        runtime = dispatcher.companions.get(key)
        if runtime is None:
            runtime = dispatcher.companions[key] = ReplicaRuntime(config, dispatcher)
        assert isinstance(runtime, ReplicaRuntime), "the key is ours"
        self.runtime: ReplicaRuntime = runtime
        self._second = _second_set(layer, slots, pg_collection)
        self._names = list(_weights(self._second, slots))
        for parameter in self._second.parameters():
            parameter.data = parameter.data.new_empty(0)
        self._experts, self._native = experts, experts.forward
        self.expected: LeaseBeside | None = None
        self._num_local: int = layer.num_local_experts
        experts.forward = self._forward

    def open(self, layer: int, micro_batch: int = 0, num_micro_batches: int = 1, users: int = 1) -> LeaseBeside:
        """See ReplicaRuntime.open."""
        late = any(module._forward_pre_hooks for module in self._experts.modules())  # which gather parameters
        numbers = dict(layer=layer, micro_batch=micro_batch, num_micro_batches=num_micro_batches, users=users)
        return LeaseBeside(list(self.masters.values()), late=late, **numbers)

    def place(self, lease: LeaseBeside, routing: Routing) -> Routing:
        """See ReplicaRuntime.route."""
        return self.runtime.route(lease, [routing])[0]

    def _forward(self, rows: Tensor, counts: Tensor, probs: Tensor, *args: Any, **others: Any) -> Any:
        """The experts' forward: rows of their own, in front of those of the slots."""
        lease = self.expected
        if lease is None or len(counts) == self._num_local:
            return self._native(rows, counts, probs, *args, **others)
        own = int(counts[: self._num_local].sum())
        y, bias = self._native(rows[:own], counts[: self._num_local], probs[:own], *args, **others)
        slots = lease.slots()
        z = self._of_slots(slots, lease.enter(rows[own:]), counts[self._num_local :], probs[own:])
        return torch.cat([y, lease.again(z)]), bias

    def _of_slots(self, slots: Tensors, rows: Tensor, counts: Tensor, probs: Tensor) -> Tensor:
        if len(rows) == 0:
            return _tied(rows, slots)
        weights = [part for matrix in slots for part in matrix.unbind()]
        y: Tensor = functional_call(self._second, dict(zip(self._names, weights, strict=True)), (rows, counts, probs))[
            0
        ]
        return y


def _tied(rows: Tensor, slots: Tensors) -> Tensor:
    """No rows, and in backward still a gradient for the slots: every rank takes part in the reduction."""
    return _Tie.apply(rows, *slots)


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *slots: Tensor) -> Tensor:
        ctx.num = len(slots)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (grads[0], *(None for _ in range(ctx.num)))


def _weights(experts: torch.nn.Module, num: int) -> dict[str, Tensor]:
    """Parameters by name: the first matrix of each expert, then the second.

    Raises:
        RecipeError: others than those.
    """
    found: dict[tuple[str, int], str] = {}
    named = dict(experts.named_parameters())
    for name in named:
        match = _WEIGHT.fullmatch(name)
        if match is not None:
            found[match["matrix"], int(match["one"] or match["other"] or 0)] = name
    wanted = [(matrix, expert) for matrix in _MATRICES for expert in range(num)]
    if sorted(found) != sorted(wanted) or len(named) != len(wanted):
        raise RecipeError(
            f"replica is not supported with {type(experts).__name__}, whose parameters are {', '.join(named)}: copies "
            "need two matrices of each expert (SequentialMLP, TEGroupedMLP) and nothing else; leave replica out"
        )
    return {found[key]: named[found[key]] for key in wanted}


def _second_set(layer: MoELayer, slots: int, pg_collection: Any) -> torch.nn.Module:
    """Experts like the layer's, S of them, which draw no initial values and add gradients to no buffer."""
    config = copy.copy(layer.config)
    config.perform_initialization, config.gradient_accumulation_fusion = False, False
    spec = layer.submodules.experts
    groups = dict(pg_collection=get_default_pg_collection() if pg_collection is None else pg_collection)
    made: torch.nn.Module = (
        build_module(spec, slots, config, **groups) if hasattr(spec, "module") else spec(slots, config, **groups)
    )
    return made

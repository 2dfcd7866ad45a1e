"""A layer's replicas: refused where they cannot be, and one runtime for all layers that share a dispatcher."""

from __future__ import annotations

import torch.distributed as dist

from ..config import MoEConfig
from ..dispatch.base import Dispatcher
from ..errors import PlanError, RecipeError
from ..experts import GroupedExperts
from .checks import check_slots, copy_bytes
from .runtime import ReplicaRuntime


def build_runtime(config: MoEConfig, dispatcher: Dispatcher, experts: type[GroupedExperts]) -> ReplicaRuntime | None:
    """The replicas of a layer, shared with other layers alike; None where it has no slots. Collective.

    Raises:
        RecipeError: experts that cannot compute copies behind this dispatcher. PlanError: see `ReplicaRuntime`.
    """
    if config.replica.slots == 0:
        return None
    reason = experts.replica_refusal(dispatcher.host_syncs > 0)
    if reason is not None:
        raise RecipeError(
            f"replica.slots = {config.replica.slots} cannot be had with experts = {config.experts!r} and dispatcher = "
            f"{config.dispatcher!r}: {reason}; or set slots = 0"
        )
    key = (config.replica, config.expert_intermediate_size, config.num_experts)
    runtime = dispatcher.companions.get(key)
    if runtime is None:
        runtime = dispatcher.companions[key] = ReplicaRuntime(config, dispatcher)
    assert isinstance(runtime, ReplicaRuntime), "the key is ours"
    return runtime


def check_replicas(config: MoEConfig, group: dist.ProcessGroup | None) -> None:
    """Refuse replicas that no group of that size can have.

    Raises:
        RecipeError: value, limit and way out.
    """
    replica = config.replica
    if replica.slots == 0:
        return
    if not isinstance(group, dist.ProcessGroup) or group.size() == 1:
        raise RecipeError(
            f"replica.slots = {replica.slots} would have no effect on one rank, which computes everything itself; set "
            "it to 0, or give the layer a group of two ranks or more"
        )
    num_local = config.num_experts // group.size()
    others = config.num_experts - num_local
    if replica.slots > others:
        raise RecipeError(
            f"replica.slots = {replica.slots} are more than the {others} experts that the other ranks hold, and the "
            f"rest would stay empty; set it to {others} or fewer"
        )
    try:
        check_slots(replica.planner, replica.slots, replica.min_quota, num_local, copy_bytes(config))
    except PlanError as err:
        raise RecipeError(str(err)) from err

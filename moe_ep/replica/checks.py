"""What a planner refuses, and what every plan promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from ..config import MoEConfig
from ..errors import PlanError
from .planners import LARGEST_TOTAL

if TYPE_CHECKING:
    from .plan import Plan

Planner = Literal["quota", "fixed_rows"]


def check_load(
    load: Tensor, slots: int, min_quota: int, planner: str, domain_size: int | None, tolerance: int = 0
) -> None:
    """Refuse what `plan` cannot work with; the arguments are its own. Reads the load on the host.

    Raises:
        PlanError: value, limit and way out.
    """
    check_sizes(load, slots, min_quota, planner, domain_size, tolerance)
    if bool((load < 0).any()):
        raise PlanError(f"a load is {int(load.min())}; counts of routes are not negative")
    # an int64 sum may wrap: R*E terms below 2^31 cannot
    total = int(load.sum(dtype=torch.int64)) if int(load.max()) <= LARGEST_TOTAL else int(load.max())
    if total > LARGEST_TOTAL:
        raise PlanError(f"the loads add up to {total} rows or more, beyond 2^31 - 1; take smaller micro-batches")


def check_sizes(
    load: Tensor, slots: int, min_quota: int, planner: str, domain_size: int | None, tolerance: int = 0
) -> None:
    """The part of it that needs no value of the load.

    Raises:
        PlanError: value, limit and way out.
    """
    check_integers(slots=slots, min_quota=min_quota, tolerance=tolerance)
    if domain_size is not None:
        check_integers(domain_size=domain_size)
    dense = isinstance(load, Tensor) and load.layout == torch.strided
    if not dense or load.dtype not in (torch.int32, torch.int64) or load.dim() != 2 or 0 in load.shape:
        got = f"{load.dtype} {tuple(load.shape)}" if isinstance(load, Tensor) else type(load).__name__
        got += "" if dense or not isinstance(load, Tensor) else f" {load.layout}"
        raise PlanError(f"load must be int32 or int64 [R, E], a dense tensor, got {got}; count routes of ids")
    num_ranks, num_experts = load.shape
    if num_experts % num_ranks:
        raise PlanError(f"{num_experts} experts cannot be divided among {num_ranks} ranks; choose a divisor for R")
    if domain_size is not None and (domain_size < 1 or num_ranks % domain_size):
        raise PlanError(f"domain_size = {domain_size} must divide the {num_ranks} ranks; leave it out for one domain")
    check_slots(planner, slots, min_quota, num_experts // num_ranks)
    if not 0 <= tolerance <= 1000 or (tolerance and planner == "fixed_rows"):
        raise PlanError(
            f"tolerance = {tolerance} must lie in [0, 1000], thousandths of the mean, and be 0 for fixed_rows"
        )


def check_integers(**values: object) -> None:
    """Refuse what is no whole number.

    Raises:
        PlanError: name, value and type.
    """
    for name, value in values.items():
        if type(value) is not int:
            raise PlanError(f"{name} = {value!r} must be int, got {type(value).__name__}")


def check_slots(planner: str, slots: int, min_quota: int, num_local: int, expert_bytes: int | None = None) -> None:
    """Refuse a planner that cannot work with S slots, before there is any load.

    Args:
        planner: as for `plan`.
        slots: as for `plan`.
        min_quota: as for `plan`.
        num_local: L.
        expert_bytes: weights and float32 gradients of one expert, for the message.

    Raises:
        PlanError: value, limit and what the smallest possible number of slots would take.
    """
    if planner not in get_args(Planner):
        raise PlanError(f"planner = {planner!r} is unknown; use one of {', '.join(get_args(Planner))}")
    if slots < 0 or not 1 <= min_quota <= LARGEST_TOTAL:
        raise PlanError(
            f"slots = {slots} must be at least 0 and min_quota = {min_quota} at least 1 and below 2^31; rows are "
            "counted in 32 bits"
        )
    if planner != "fixed_rows":
        return
    if min_quota != 1:
        raise PlanError(f"min_quota = {min_quota} does not go with fixed_rows, whose rows are given; use 1, or quota")
    if slots < num_local:
        size = "" if expert_bytes is None else f", {num_local * expert_bytes / 2**20:.1f} MiB on each rank"
        raise PlanError(
            f"fixed_rows needs a slot for each of the L = {num_local} experts of a rank, and slots = {slots}; raise it "
            f"(weights and float32 gradients of {num_local} more experts{size}), or use the planner quota"
        )


def verify(plan: Plan, *, idle_replicas: bool = False) -> None:
    """Check what every plan promises, whoever made it; reads values on the host.

    Args:
        plan: to be checked.
        idle_replicas: whether a replica may have no row, as in a plan made together with others.

    Raises:
        PlanError: the first promise that is broken, with expert or rank.
    """
    quota, load = plan.quota.cpu().long(), plan.load.cpu().long()
    experts = torch.arange(plan.num_experts)
    home = experts // plan.num_local
    replica = torch.zeros_like(quota, dtype=torch.bool)
    for rank, filled in enumerate(plan.instances.tolist()):
        used = [expert for expert in filled if expert >= 0]
        _require(filled == sorted(set(used)) + [-1] * (plan.slots - len(used)), f"rank {rank} has slots {filled}")
        _require(all(expert < plan.num_experts for expert in used), f"rank {rank} has slots {filled}")
        _require(all(home[expert] != rank for expert in used), f"rank {rank} has a replica of its own among {filled}")
        replica[used, rank] = True
    hosts = replica.clone()
    hosts[experts, home] = True
    _require(bool((quota >= 0).all()), "a quota is negative")
    _require(not bool(quota[~hosts].any()), "a rank has a quota of an expert that it does not hold")
    _require(idle_replicas or bool((quota[replica] > 0).all()), "a replica computes no row")
    _require(torch.equal(quota.sum(1), load.sum(0)), "the quotas of an expert do not add up to its load")
    home_load = load.sum(0).view(plan.num_ranks, plan.num_local).sum(1)
    top = int(quota.sum(0).amax())
    _require(top == int(plan.max_load), f"max_load is {int(plan.max_load)}, the most loaded rank computes {top} rows")
    _require(
        top <= int(home_load.amax()), f"{top} rows on a rank, more than the {int(home_load.amax())} without replicas"
    )


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise PlanError(f"not a replica plan: {broken}; make plans with moe_ep.replica.plan")


def copy_bytes(config: MoEConfig) -> int:
    """Weights and gradients of one copy; gradients are float32, or float64 of float64 weights."""
    elements = 3 * config.hidden_size * config.expert_intermediate_size
    itemsize: int = getattr(torch, config.dtype).itemsize
    return elements * (itemsize + max(4, itemsize))

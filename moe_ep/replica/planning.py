"""From gathered loads to plans, as a configuration says: on the host, by kernels, or with nothing read on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import ReplicaConfig
from ..errors import PlanError
from ..faults import Fault
from ..peers import mark_everywhere
from .checks import check_load
from .device import plan_on_device
from .plan import Plan, plan, plan_together
from .planners import LARGEST_TOTAL

TOLERANCE = 10  # thousandths: ranks within 1 % of the mean are even enough, and a third of the copies is saved


def make_plans(replica: ReplicaConfig, loads: Sequence[Tensor], read: Sequence[Tensor], *, kernels: bool) -> list[Plan]:
    """Plans of micro-batches that are placed together, or of one.

    Args:
        replica: slots and planner.
        loads: int64 [R, E] each, the same on every rank.
        read: copies of them on the host.
        kernels: plan on the GPU where the loads are on one.

    Raises:
        PlanError: negative loads, or more than 2^31 - 1 rows; on every rank.
    """
    try:
        for load in read:
            check_load(load, replica.slots, replica.min_quota, replica.planner, None)
        if replica.joint:
            return plan_together(loads, replica.slots, replica.min_quota, tolerance=_tolerance(replica))
        if kernels and loads[0].is_cuda:
            return [plan_by_kernels(replica, loads[0])]
        return [plan(loads[0], replica.slots, replica.min_quota, replica.planner, tolerance=_tolerance(replica))]
    except PlanError as err:
        mark_everywhere(err)  # all have the same loads
        raise


def plan_by_kernels(replica: ReplicaConfig, load: Tensor) -> Plan:
    """A plan of int64 [R, E] on a GPU that add up to less than 2^31, without a host sync."""
    rows = load.to(torch.int32).contiguous()
    return plan_on_device(rows, replica.slots, replica.min_quota, replica.planner, tolerance=_tolerance(replica))


def bounded(load: Tensor) -> tuple[Tensor, Tensor]:
    """A load that can be planned, all zero in the place of one that cannot, and (code, value) for a fault record."""
    total = load.clamp(-1, LARGEST_TOTAL + 1).sum()
    good = (total <= LARGEST_TOTAL) & (load.amin() >= 0)
    code = torch.where(good, int(Fault.NONE), int(Fault.TOO_MANY_ROUTES))
    return torch.where(good, load, 0), torch.stack([code, total.abs()])


def _tolerance(replica: ReplicaConfig) -> int:
    return TOLERANCE if replica.planner == "quota" else 0

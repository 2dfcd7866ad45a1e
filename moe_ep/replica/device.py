"""Planning and rerouting on a GPU without a host sync: the kernels in the place of `plan` and `reroute`, same bits."""

from __future__ import annotations

from torch import Tensor

from ..errors import InputError
from ..routing import Routing
from .checks import Planner, check_sizes
from .plan import Plan
from .reroute import check_group


def plan_on_device(
    load: Tensor,
    slots: int,
    min_quota: int = 1,
    planner: Planner = "quota",
    *,
    tolerance: int = 0,
    domain_size: int | None = None,
) -> Plan:
    """`plan` by one launch.

    Args:
        load: int32 [R, E] on a GPU. Its values cannot be looked at: they must be counts that add up to less than 2^31.
        slots: as for `plan`.
        min_quota: as for `plan`.
        planner: as for `plan`.
        tolerance: as for `plan`.
        domain_size: as for `plan`.

    Raises:
        PlanError: sizes that do not fit each other.
        InputError: a load on the CPU, or of another dtype.
        KernelError: no kernels on this machine, or sizes beyond what a block of this GPU can hold.
    """
    check_sizes(load, slots, min_quota, planner, domain_size, tolerance)
    if not load.is_cuda or load.dtype.itemsize != 4:
        raise InputError(f"the kernels plan int32 loads on a GPU, got {load.dtype} on {load.device}; use plan there")
    from ..kernels.replica import plan_fixed_rows, plan_replicas

    size = domain_size or load.shape[0]
    made = (
        plan_fixed_rows(load, slots, size)
        if planner == "fixed_rows"
        else plan_replicas(load, slots, min_quota, tolerance, size)
    )
    quota, instances, peak, bound = made
    most, least = (peak[0], bound[0]) if size == load.shape[0] else (peak.amax(), bound.amax())
    return Plan(load=load, quota=quota, instances=instances, max_load=most, exact=most == least)


def reroute_on_device(routing: Routing, plan: Plan, rank: int) -> tuple[Routing, Tensor]:
    """`reroute` on a GPU.

    Returns:
        The routing to physical experts, and int64 []: experts of which the plan counts other rows than the routing has.
        Anything but 0 means a plan of another micro-batch; ids are defined all the same.

    Raises:
        InputError: another number of experts, a rank that the plan does not have, or ids on the CPU.
        KernelError: no kernels on this machine.
    """
    check_group(routing, plan, rank)
    if not routing.expert_ids.is_cuda:
        raise InputError(f"the kernels reroute ids on a GPU, got {routing.expert_ids.device}; use reroute there")
    from ..kernels.replica import reroute

    ids, wrong = reroute(routing.expert_ids, plan.load, plan.quota, plan.instances, rank)
    moved = Routing(
        expert_ids=ids, weights=routing.weights, num_experts=plan.num_physical, bad_tokens=routing.bad_tokens
    )
    return moved, wrong

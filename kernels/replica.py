"""Planner and rerouting of replicas on one GPU, without a word from the host. CUDA only; integers alone.

    plan_replicas   load [R, E] -> quotas [E, R], the slots' experts [R, S], largest load and its bound of each domain
    plan_fixed_rows the same, of equal rows on every rank
    reroute         ids [T, K] of one rank and that plan -> physical ids [T, K]

Both compute what `moe_ep/replica` computes in torch, bit for bit; the worked examples stand there. That is also why
there are no references here: they would be a second copy of it, and nothing here may import it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .build import KernelError
from .library import launch, library
from .registry import register
from .routes import sort_routes

Planned = tuple[Tensor, Tensor, Tensor, Tensor]
SHARED_BYTES = {8: 163 << 10, 9: 227 << 10, 10: 227 << 10}  # of a block, by major compute capability


def plan_replicas(load: Tensor, slots: int, min_quota: int, tolerance: int, domain_size: int) -> Planned:
    """Plan one micro-batch; one cluster of blocks a domain.

    Args:
        load: int32 [R, E] on a GPU. Values are not checked: negative ones, or a sum beyond 2^31 - 1, make a wrong plan.
        slots: S.
        min_quota: at least 1.
        tolerance: thousandths of the mean above it that are good enough.
        domain_size: divides R.

    Returns:
        quota int32 [E, R], instances int32 [R, S], peak and bound int64 [R / domain_size].

    Raises:
        KernelError: more ranks in a domain than a warp can hold, or more ranks, experts or slots than fit into the
            shared memory of a block.
    """
    made: Planned = plan_replicas_op(load, slots, min_quota, tolerance, domain_size)
    return made


def _plan_replicas(load: Tensor, slots: int, min_quota: int, tolerance: int, domain_size: int) -> Planned:
    num_ranks, num_experts = load.shape
    num_domains = num_ranks // domain_size
    inside = num_experts // num_domains
    _check_ranks(load, domain_size)
    needed = library(load.device.index).plan_shared_bytes(domain_size, inside, slots)
    limit = SHARED_BYTES.get(torch.cuda.get_device_capability(load.device)[0], 99 << 10)
    if needed > limit:
        raise KernelError(
            f"planning {domain_size} ranks, {inside} experts and {slots} slots takes {needed} bytes of shared memory, "
            f"and a block of this GPU has {limit}; plan in smaller domains, or on the host"
        )
    outputs = _outputs(load, slots, domain_size)
    sizes = (num_ranks, num_experts, domain_size, slots, min_quota, tolerance)
    launch("moe_ep_plan_replicas", load, load.contiguous(), *outputs, *sizes)
    return outputs


def plan_fixed_rows(load: Tensor, slots: int, domain_size: int) -> Planned:
    """Plan one micro-batch with equal rows on every rank; arguments and results as for `plan_replicas`.

    Args:
        load: int32 [R, E] on a GPU.
        slots: S, at least L.
        domain_size: divides R.

    Raises:
        KernelError: more ranks in a domain than a warp can hold.
    """
    made: Planned = plan_fixed_rows_op(load, slots, domain_size)
    return made


def _plan_fixed_rows(load: Tensor, slots: int, domain_size: int) -> Planned:
    _check_ranks(load, domain_size)
    outputs = _outputs(load, slots, domain_size)
    launch("moe_ep_plan_fixed_rows", load, load.contiguous(), *outputs, *load.shape, domain_size, slots)
    return outputs


def _check_ranks(load: Tensor, domain_size: int) -> None:
    limit = library(load.device.index).plain("moe_ep_plan_most_ranks")()
    if domain_size > limit:
        raise KernelError(
            f"the kernels plan up to {limit} ranks of a domain, got {domain_size}; plan in smaller domains, "
            "or on the host"
        )


def _outputs(load: Tensor, slots: int, domain_size: int) -> Planned:
    num_ranks, num_experts = load.shape
    quota, instances = load.new_empty(num_experts, num_ranks), load.new_empty(num_ranks, slots)
    peak, bound = (load.new_empty(num_ranks // domain_size, dtype=torch.int64) for _ in range(2))
    return quota, instances, peak, bound


def reroute(ids: Tensor, load: Tensor, quota: Tensor, instances: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Send each route to an instance of its expert.

    Args:
        ids: int64 [T, K] of this rank; ids outside [0, E) stay outside of [0, P).
        load: int32 [R, E].
        quota: int32 [E, R].
        instances: int32 [R, S].
        rank: whose tokens these are.

    Returns:
        Physical ids int64 [T, K], and int64 []: experts of which the plan counts other rows of this rank than it has.
    """
    made: tuple[Tensor, Tensor] = reroute_op(ids, load, quota, instances, rank)
    return made


def _reroute(ids: Tensor, load: Tensor, quota: Tensor, instances: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    num_ranks, num_experts = load.shape
    ids = ids.contiguous()
    _, _, positions, counts, offsets, _ = sort_routes(ids, num_experts, 1)
    out, wrong = torch.empty_like(ids), ids.new_empty(())
    kept, start = load.new_empty(2, num_experts).unbind()
    ends, physical = load.new_empty(2, num_experts, num_ranks).unbind()
    tables = (load.contiguous(), quota, instances, kept, start, ends, physical)
    sizes = (ids.numel(), num_ranks, num_experts, instances.shape[1], rank)
    launch("moe_ep_reroute", ids, *tables, ids, positions, offsets, counts, out, wrong, *sizes)
    return out, wrong


def _fake_reroute(ids: Tensor, load: Tensor, quota: Tensor, instances: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(ids, memory_format=torch.contiguous_format), ids.new_empty(())


plan_replicas_op = register(
    "plan_replicas(Tensor load, int slots, int min_quota, int tolerance, int domain_size) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    reference=None,
    kernel=_plan_replicas,
    fake=lambda load, slots, min_quota, tolerance, domain_size: _outputs(load, slots, domain_size),
)
plan_fixed_rows_op = register(
    "plan_fixed_rows(Tensor load, int slots, int domain_size) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=None,
    kernel=_plan_fixed_rows,
    fake=_outputs,
)
reroute_op = register(
    "reroute(Tensor ids, Tensor load, Tensor quota, Tensor instances, int rank) -> (Tensor, Tensor)",
    reference=None,
    kernel=_reroute,
    fake=_fake_reroute,
)

"""Which experts get replicas on which ranks, and how many rows each instance computes. Integers only, and pure.

Input is the load of one micro-batch, known to every rank; all ranks compute the same plan from it, bit for bit, so
nothing of it is ever sent. An expert's *instances* are its master, which stays on its home rank, and at most one
replica on each other rank. A *quota* is the number of rows that an instance computes; `reroute.py` realises it exactly.

`quota` lowers the largest rank load as far as it can with S slots a rank (Dots-Infra/UltraEP states the problem; the
exact optimum is NP-hard). `fixed_rows` gives every rank its equal share (after MoonshotAI/MoonEP). Both are in
`planners.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import PlanError
from .planners import LARGEST_TOTAL, fixed_rows, lower_bound, quota_rows

Planner = Literal["quota", "fixed_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Instances of E experts on R ranks with S slots each; all tensors on the load's device.

    Worked example: 2 ranks, 1 expert each, 1 slot, load [[6, 1], [2, 1]] has 8 rows for rank 0 and 2 for rank 1. Then
    quota is [[5, 3], [0, 2]], instances [[-1], [0]], max_load 5: rank 1 computes 3 of expert 0's rows in its slot.

    Attributes:
        load: int32 [R, E], rows that each source rank sends to each expert.
        quota: int32 [E, R], rows of each expert computed on each rank; 0 where it has no instance, and perhaps at home.
        instances: int32 [R, S], the expert in each slot, ascending, -1 for the unused slots behind them.
        max_load: int64 [], rows of the most loaded rank.
        exact: bool [], whether max_load is proven to be the smallest one possible.
    """

    load: Tensor
    quota: Tensor
    instances: Tensor
    max_load: Tensor
    exact: Tensor

    @property
    def num_ranks(self) -> int:
        """R."""
        return self.load.shape[0]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.load.shape[1]

    @property
    def num_local(self) -> int:
        """L, masters of a rank."""
        return self.num_experts // self.num_ranks

    @property
    def slots(self) -> int:
        """S."""
        return self.instances.shape[1]

    @property
    def num_physical(self) -> int:
        """P = R*(L+S). Rank r computes physical experts r*(L+S) .. : its L masters, then its S slots."""
        return self.num_ranks * (self.num_local + self.slots)

    def rank_load(self) -> Tensor:
        """Rows that each rank computes, int64 [R]."""
        return self.quota.sum(0)

    def num_replicas(self) -> Tensor:
        """Slots in use on all ranks, int64 []."""
        return (self.instances >= 0).sum()

    def physical_ids(self) -> Tensor:
        """Physical expert of each expert's instance on each rank, int64 [E, R]; -1 where it has none."""
        ranks, experts = torch.arange(self.num_ranks, device=self.quota.device), self._experts()
        per_rank = self.num_local + self.slots
        ids = torch.full((self.num_experts + 1, self.num_ranks), -1, device=self.quota.device)
        slot_ids = ranks[:, None] * per_rank + self.num_local + torch.arange(self.slots, device=ranks.device)
        filled = torch.where(
            self.instances >= 0, self.instances, self.num_experts
        ).long()  # unused: a row cut off below
        ids[filled, ranks[:, None]] = slot_ids
        home = experts // self.num_local
        ids[experts, home] = home * per_rank + experts % self.num_local
        return ids[:-1]

    def checksum(self) -> Tensor:
        """A hash of everything above, int64 [], without a host sync: ranks that disagree differ here (1 in 2^64)."""
        values = torch.cat([part.reshape(-1).long() for part in (self.load, self.quota, self.instances)])
        weights = (
            2 * torch.arange(len(values), device=values.device) + 1
        ) * -7046029254386353131  # wraps, as it should
        weights = (weights ^ (weights >> 29)) * -4658895280553007687
        return ((values + 2) * (weights | 1)).sum()  # + 2: an unused slot counts, too

    def _experts(self) -> Tensor:
        return torch.arange(self.num_experts, device=self.quota.device)


def plan(
    load: Tensor, slots: int, min_quota: int = 1, planner: Planner = "quota", *, domain_size: int | None = None
) -> Plan:
    """Plan one micro-batch.

    Args:
        load: int32 or int64 [R, E], rows that each source rank sends to each expert; rank r is home to experts r*E/R to
            (r+1)*E/R. The same on every rank. Its values are read on the host.
        slots: S, replicas that a rank can hold.
        min_quota: fewest rows that are worth a replica. A source may give away more than it needs to reach them.
        planner: "quota", or "fixed_rows": rank r computes floor(total/R) rows, one more where r < total % R.
        domain_size: ranks of a domain, such as those joined by NVLink; an expert's replicas stay in its home's domain
            of so many consecutive ranks. None: all ranks are one domain.

    Raises:
        PlanError: sizes that do not fit each other, negative loads, more than 2^31 - 1 rows, or a planner that cannot
            work with so few slots.
    """
    _check(load, slots, min_quota, planner, domain_size)
    num_ranks, num_experts = load.shape
    size, per_rank = domain_size or num_ranks, num_experts // num_ranks
    total_E = load.sum(0, dtype=torch.int64).cpu()
    domains = [(slice(r * per_rank, (r + size) * per_rank), slice(r, r + size)) for r in range(0, num_ranks, size)]
    quota = torch.zeros((num_experts, num_ranks), dtype=torch.int64)
    for experts, ranks in domains:
        rows_E = total_E[experts]
        quota[experts, ranks] = (
            quota_rows(rows_E, size, slots, min_quota) if planner == "quota" else fixed_rows(rows_E, size)
        )
    max_load = quota.sum(0).amax()
    bound = max(lower_bound(total_E[experts], size, slots, int(max_load)) for experts, _ in domains)
    return Plan(
        load=load.to(torch.int32),
        quota=quota.to(load.device, torch.int32),
        instances=_fill_slots(quota, slots).to(load.device),
        max_load=max_load.to(load.device),
        exact=(max_load == bound).to(load.device),
    )


def verify(plan: Plan) -> None:
    """Check what every plan promises, whoever made it; reads values on the host.

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
    _require(bool((quota[replica] > 0).all()), "a replica computes no row")
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


def _fill_slots(quota: Tensor, slots: int) -> Tensor:
    """Each rank's replicas in ascending order, int32 [R, S], -1 behind them."""
    num_experts, num_ranks = quota.shape
    own = torch.arange(num_experts)[:, None] // (num_experts // num_ranks) == torch.arange(num_ranks)
    ids = torch.where((quota > 0) & ~own, torch.arange(num_experts)[:, None], num_experts).T.sort(1).values
    filled = torch.full((num_ranks, slots), -1, dtype=torch.int32)
    shown = min(slots, num_experts)
    filled[:, :shown] = torch.where(ids < num_experts, ids, -1)[:, :shown]
    return filled


def _check(load: Tensor, slots: int, min_quota: int, planner: str, domain_size: int | None) -> None:
    if load.dtype not in (torch.int32, torch.int64) or load.dim() != 2 or 0 in load.shape:
        raise PlanError(
            f"load must be int32 or int64 [R, E], got {load.dtype} {tuple(load.shape)}; count routes of ids"
        )
    num_ranks, num_experts = load.shape
    if num_experts % num_ranks:
        raise PlanError(f"{num_experts} experts cannot be divided among {num_ranks} ranks; choose a divisor for R")
    if domain_size is not None and (domain_size < 1 or num_ranks % domain_size):
        raise PlanError(f"domain_size = {domain_size} must divide the {num_ranks} ranks; leave it out for one domain")
    check_slots(planner, slots, min_quota, num_experts // num_ranks)
    if bool((load < 0).any()):
        raise PlanError(f"a load is {int(load.min())}; counts of routes are not negative")
    # an int64 sum may wrap: R*E terms below 2^31 cannot
    total = int(load.sum(dtype=torch.int64)) if int(load.max()) <= LARGEST_TOTAL else int(load.max())
    if total > LARGEST_TOTAL:
        raise PlanError(f"the loads add up to {total} rows or more, beyond 2^31 - 1; take smaller micro-batches")


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
    if slots < 0 or min_quota < 1:
        raise PlanError(f"slots = {slots} must be at least 0 and min_quota = {min_quota} at least 1")
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

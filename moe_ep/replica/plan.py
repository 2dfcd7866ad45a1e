"""Which experts get replicas on which ranks, and how many rows each instance computes. Integers only, and pure.

Input is the load of one micro-batch, known to every rank; all ranks compute the same plan from it, bit for bit, so
nothing of it is ever sent. An expert's *instances* are its master, which stays on its home rank, and at most one
replica on each other rank. A *quota* is the number of rows that an instance computes; `reroute.py` realises it exactly.

`quota` lowers the largest rank load as far as it can with S slots a rank (Dots-Infra/UltraEP states the problem; the
exact optimum is NP-hard). `fixed_rows` gives every rank its equal share (after MoonshotAI/MoonEP). Both are in
`planners.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PlanError
from .checks import Planner, check_load
from .placed import rows_on
from .planners import fixed_rows, good_enough, lower_bound, quota_rows


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
    load: Tensor,
    slots: int,
    min_quota: int = 1,
    planner: Planner = "quota",
    *,
    tolerance: int = 0,
    domain_size: int | None = None,
) -> Plan:
    """Plan one micro-batch.

    Args:
        load: int32 or int64 [R, E], rows that each source rank sends to each expert; rank r is home to experts r*E/R to
            (r+1)*E/R. The same on every rank. Its values are read on the host.
        slots: S, replicas that a rank can hold.
        min_quota: fewest rows that are worth a replica. A source may give away more than it needs to reach them.
        planner: "quota", or "fixed_rows": rank r computes floor(total/R) rows, one more where r < total % R.
        tolerance: thousandths of the mean above it that are good enough for "quota". Filling every rank up to the very
            mean takes at least R-1 replicas; with 10 it is about a third less, and none where ranks are within 1 %.
        domain_size: ranks of a domain, such as those joined by NVLink; an expert's replicas stay in its home's domain
            of so many consecutive ranks. None: all ranks are one domain.

    Raises:
        PlanError: sizes that do not fit each other, negative loads, more than 2^31 - 1 rows, or a planner that cannot
            work with so few slots.
    """
    check_load(load, slots, min_quota, planner, domain_size, tolerance)
    num_ranks, num_experts = load.shape
    size, per_rank = domain_size or num_ranks, num_experts // num_ranks
    total_E = load.sum(0, dtype=torch.int64).cpu()
    domains = _domains(num_ranks, per_rank, size)
    quota = torch.zeros((num_experts, num_ranks), dtype=torch.int64)
    free_R, placed = torch.full((size,), slots), torch.zeros((size * per_rank, size), dtype=torch.bool)
    for experts, ranks in domains:
        rows_E = total_E[experts]
        if planner == "quota":
            quota[experts, ranks] = quota_rows(rows_E, free_R, placed, min_quota, tolerance)
        else:
            quota[experts, ranks] = fixed_rows(rows_E, size)
    return _plan_of(load, quota, total_E, domains, _fill_slots(quota > 0, slots))


def plan_together(
    loads: Sequence[Tensor], slots: int, min_quota: int = 1, *, tolerance: int = 0, domain_size: int | None = None
) -> list[Plan]:
    """Plan M micro-batches on one placement, so that one weight_sync serves them all.

    Their sum is planned first, then each micro-batch adds replicas to what is placed, as far as slots are left; in the
    end each gets quotas of its own on all of it. A replica may have no row in one of them.

    Args:
        loads: of each micro-batch, as for `plan`.
        slots: as for `plan`.
        min_quota: fewest rows of a replica where it is placed.
        tolerance: as for `plan`; a micro-batch that what is placed brings so near to its mean adds no replica.
        domain_size: as for `plan`.

    Raises:
        PlanError: as `plan`; no loads, or loads of different shapes.
    """
    if not isinstance(loads, list | tuple) or not loads:
        got = "none" if isinstance(loads, list | tuple) else type(loads).__name__
        raise PlanError(f"loads must be a list, with one of each micro-batch, got {got}")
    for load in loads:
        check_load(load, slots, min_quota, "quota", domain_size, tolerance)
    if any(load.shape != loads[0].shape or load.dtype != loads[0].dtype for load in loads):
        kinds = ", ".join(f"{load.dtype} {tuple(load.shape)}" for load in loads)
        raise PlanError(f"loads must be of one shape and dtype, got {kinds}")
    num_ranks, num_experts = loads[0].shape
    size = domain_size or num_ranks
    domains = _domains(num_ranks, num_experts // num_ranks, size)
    totals = torch.stack([load.sum(0, dtype=torch.int64).cpu() for load in loads])
    quotas = torch.zeros((len(loads), num_experts, num_ranks), dtype=torch.int64)
    placed = torch.zeros((num_experts, num_ranks), dtype=torch.bool)
    for experts, ranks in domains:
        placed[experts, ranks], quotas[:, experts, ranks] = _place_together(
            totals[:, experts], size, slots, min_quota, tolerance
        )
    instances = _fill_slots(placed, slots)
    return [_plan_of(load, q, t, domains, instances) for load, q, t in zip(loads, quotas, totals, strict=True)]


def _place_together(
    totals: Tensor, num_ranks: int, slots: int, min_quota: int, tolerance: int
) -> tuple[Tensor, Tensor]:
    """Replicas bool [E, R] for rows int64 [M, E] of micro-batches, and quotas int64 [M, E, R] on them.

    First the sum's replicas, then further ones for each micro-batch that all so far leave too uneven.
    """
    own = torch.arange(num_ranks).repeat_interleave(totals.shape[1] // num_ranks)[:, None] == torch.arange(num_ranks)
    placed = torch.zeros_like(own)
    for total_E in (totals.sum(0), *totals):
        enough = good_enough(total_E, num_ranks, tolerance)
        if int(rows_on(total_E, placed | own, enough).sum(0).amax()) > enough:
            quota = quota_rows(total_E, slots - placed.sum(0), placed, min_quota, tolerance)
            placed |= (quota > 0) & ~own
    return placed, torch.stack([rows_on(t, placed | own, good_enough(t, num_ranks, tolerance)) for t in totals])


def _domains(num_ranks: int, num_local: int, size: int) -> list[tuple[slice, slice]]:
    """Experts and ranks of each domain."""
    return [(slice(r * num_local, (r + size) * num_local), slice(r, r + size)) for r in range(0, num_ranks, size)]


def _plan_of(
    load: Tensor, quota: Tensor, total_E: Tensor, domains: list[tuple[slice, slice]], instances: Tensor
) -> Plan:
    max_load, slots = quota.sum(0).amax(), instances.shape[1]
    bound = max(lower_bound(total_E[e], r.stop - r.start, slots, int(max_load)) for e, r in domains)
    return Plan(
        load=load.to(torch.int32),
        quota=quota.to(load.device, torch.int32),
        instances=instances.to(load.device),
        max_load=max_load.to(load.device),
        exact=(max_load == bound).to(load.device),
    )


def _fill_slots(placed: Tensor, slots: int) -> Tensor:
    """Each rank's replicas, of bool [E, R], in ascending order, int32 [R, S], -1 behind them."""
    num_experts, num_ranks = placed.shape
    own = torch.arange(num_experts)[:, None] // (num_experts // num_ranks) == torch.arange(num_ranks)
    ids = torch.where(placed & ~own, torch.arange(num_experts)[:, None], num_experts).T.sort(1).values
    filled = torch.full((num_ranks, slots), -1, dtype=torch.int32)
    shown = min(slots, num_experts)
    filled[:, :shown] = torch.where(ids < num_experts, ids, -1)[:, :shown]
    return filled

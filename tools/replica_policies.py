"""Ways to place experts and to send tokens, compared by `tools/replica_report.py` on the same trace.

    none          every expert on its home rank
    balanced      what a router forced to balance would give: the bound for all others
    eplb-history  EPLB's placement (deepseek-ai/EPLB) from the loads of earlier micro-batches, tokens in turns
    eplb-exact    the same from the load of this very micro-batch, as UltraEP's authors compare with
    least-loaded  excess over the mean spills to the least loaded rank (after LLEP, arXiv 2601.17111), same slots
    quota         moe_ep's planner, rerouted as in training
    quota-joint   the same for micro-batches that interleave: one placement, quotas of their own; sent once for all
    fixed_rows    the other one; it has no smallest quota

EPLB moves masters, so its copies bring optimizer states along in training; only weights are counted here.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from moe_ep.recompute import even_experts
from moe_ep.replica import Plan, plan, plan_together, reroute
from moe_ep.replica.checks import Planner, check_slots
from moe_ep.routing import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all policies have in common: R, E, S, the fewest rows of a replica; quota's tolerance in thousandths."""

    num_ranks: int
    num_experts: int
    slots: int
    min_quota: int
    tolerance: int = 0

    @property
    def num_local(self) -> int:
        """L."""
        return self.num_experts // self.num_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What a policy decided: extra copies of experts, how many experts each rank sends, and how to send tokens."""

    replicas: int
    sent: list[int]
    plan: Plan | None = None
    even: bool = False  # the ids are replaced by even ones
    hosts: list[list[int]] | None = None  # the rank of each copy of each expert, tokens in turns


class Policy(Protocol):
    """One row of the report. `place` is what is timed."""

    @property
    def name(self) -> str:
        """As in the list above."""

    def place(self, loads: Sequence[Tensor], number: int, past: Sequence[Tensor]) -> Placement:
        """Decide for micro-batch `number` of those that interleave, from its load int64 [R, E].

        Args:
            loads: of all micro-batches that interleave.
            number: which of them.
            past: earlier totals int64 [E], the latest last.
        """


def destinations(placement: Placement, ids: Tensor, setting: Setting, rank: int) -> Tensor:
    """The rank that computes each route of one rank's tokens, int64 [T, K]; -1 where there is none."""
    if placement.plan is not None:
        weights = torch.empty(ids.shape)
        moved = reroute(Routing(expert_ids=ids, weights=weights, num_experts=setting.num_experts), placement.plan, rank)
        per_rank = setting.num_local + setting.slots
        return torch.where(ids >= 0, moved.expert_ids // per_rank, -1)
    if placement.hosts is not None:
        return in_turns(ids, placement.hosts, rank)
    if placement.even:
        ids = even_experts((ids >= 0).any(1), ids.shape[1], setting.num_experts, rank, setting.num_ranks)
    return torch.where(ids >= 0, ids // setting.num_local, -1)


def in_turns(ids: Tensor, hosts: list[list[int]], rank: int) -> Tensor:
    """The n-th of a rank's rows of an expert goes to its copy number (n + rank) modulo the copies."""
    flat, widest = ids.reshape(-1), max(map(len, hosts))
    table = torch.tensor([row + [0] * (widest - len(row)) for row in hosts])
    count = torch.tensor([len(row) for row in hosts])
    expert = flat.clamp_min(0).long()
    order = flat.argsort(stable=True)
    begins = torch.searchsorted(flat[order], flat[order])
    number = torch.empty_like(order)
    number[order] = torch.arange(len(flat)) - begins
    dest = table[expert, (number + rank) % count[expert]]
    return torch.where(flat >= 0, dest, -1).view(ids.shape)


@dataclass(slots=True)
class Still:
    """none and balanced: nothing moves."""

    name: str
    setting: Setting

    def place(self, loads: Sequence[Tensor], number: int, past: Sequence[Tensor]) -> Placement:
        """No copies."""
        return Placement(replicas=0, sent=[0] * self.setting.num_ranks, even=self.name == "balanced")


@dataclass(slots=True)
class Planned:
    """quota and fixed_rows.

    Raises:
        PlanError: at construction; a planner that cannot work with so few slots.
    """

    name: Planner
    setting: Setting

    def __post_init__(self) -> None:
        check_slots(self.name, self.setting.slots, self._min_quota, self.setting.num_local)

    @property
    def _min_quota(self) -> int:
        return self.setting.min_quota if self.name == "quota" else 1

    def place(self, loads: Sequence[Tensor], number: int, past: Sequence[Tensor]) -> Placement:
        """The planner's plan."""
        tolerance = self.setting.tolerance if self.name == "quota" else 0
        return planned(plan(loads[number], self.setting.slots, self._min_quota, self.name, tolerance=tolerance))


def planned(made: Plan) -> Placement:
    """A plan as a placement: each replica is sent by its expert's home."""
    copies = made.instances[made.instances >= 0] // made.num_local
    return Placement(replicas=len(copies), sent=torch.bincount(copies, minlength=made.num_ranks).tolist(), plan=made)


@dataclass(slots=True)
class Joint:
    """quota-joint: every micro-batch plans for all of them, as each rank of a training run does once."""

    setting: Setting
    name: str = "quota-joint"

    def place(self, loads: Sequence[Tensor], number: int, past: Sequence[Tensor]) -> Placement:
        """One of the plans; weights travel with the first micro-batch."""
        s = self.setting
        placement = planned(plan_together(loads, s.slots, s.min_quota, tolerance=s.tolerance)[number])
        return placement if number == 0 else replace(placement, sent=[0] * s.num_ranks)


@dataclass(slots=True)
class LeastLoaded:
    """Experts in order of load spill what exceeds the mean on their rank to the least loaded rank with a slot."""

    setting: Setting
    name: str = "least-loaded"

    def place(self, loads: Sequence[Tensor], number: int, past: Sequence[Tensor]) -> Placement:
        """Spill, at least `min_quota` rows at a time."""
        s, load = self.setting, loads[number]
        total = load.sum(0).tolist()
        rows = [sum(total[r * s.num_local : (r + 1) * s.num_local]) for r in range(s.num_ranks)]
        mean, free = -(-sum(total) // s.num_ranks), [s.slots] * s.num_ranks
        quota = torch.zeros((s.num_experts, s.num_ranks), dtype=torch.int32)
        filled: list[list[int]] = [[] for _ in range(s.num_ranks)]
        for expert in sorted(range(s.num_experts), key=lambda e: (-total[e], e)):
            home, left, hosts = expert // s.num_local, total[expert], {expert // s.num_local}
            while rows[home] > mean:
                open_ranks = [r for r in range(s.num_ranks) if free[r] and r not in hosts]
                target = min(open_ranks, key=lambda r: (rows[r], r), default=home)
                moved = min(left, rows[home] - mean, mean - rows[target])
                if target == home or moved < s.min_quota:
                    break
                rows[home], rows[target] = rows[home] - moved, rows[target] + moved
                left, free[target] = left - moved, free[target] - 1
                quota[expert, target] = moved
                hosts.add(target)
                filled[target].append(expert)
            quota[expert, home] = left
        slots = [sorted(experts) + [-1] * (s.slots - len(experts)) for experts in filled]
        instances = torch.tensor(slots, dtype=torch.int32).view(s.num_ranks, s.slots)
        peak = quota.sum(0).amax()
        made = Plan(load=load.int(), quota=quota, instances=instances, max_load=peak, exact=peak == mean)
        return planned(made)


@dataclass(slots=True)
class Eplb:
    """EPLB for one group of experts on one host: copies by load, then packed. Keeps what lies where."""

    setting: Setting
    name: str
    window: int  # earlier micro-batches that it sees; 0: the load of this one
    held: list[set[int]] | None = None

    def place(self, loads: Sequence[Tensor], number: int, past: Sequence[Tensor]) -> Placement:
        """A new placement of all experts; without any past nothing moves."""
        s, load = self.setting, loads[number]
        before = self.held or [set(range(r * s.num_local, (r + 1) * s.num_local)) for r in range(s.num_ranks)]
        seen = [load.sum(0)] if self.window == 0 else list(past[-self.window :])
        ranks = pack(torch.stack(seen).sum(0).tolist(), s) if seen else [sorted(held) for held in before]
        self.held = [set(experts) for experts in ranks]
        sent = [0] * s.num_ranks
        for rank, experts in enumerate(self.held):
            for expert in experts - before[rank]:
                sent[next(r for r, held in enumerate(before) if expert in held)] += 1
        hosts: list[list[int]] = [[] for _ in range(s.num_experts)]
        for rank, copies in enumerate(ranks):
            for expert in copies:
                hosts[expert].append(rank)
        return Placement(replicas=sum(map(len, hosts)) - s.num_experts, sent=sent, hosts=hosts)


def pack(load_E: list[int], setting: Setting) -> list[list[int]]:
    """The copies that each rank holds.

    Every further copy goes to the expert with most rows a copy. Then the heaviest copy comes first, to the lightest
    rank with room; nothing keeps two copies of one expert apart (deepseek-ai/EPLB#22).
    """
    s = setting
    copies = [1] * s.num_experts
    heap = [(-float(rows), expert) for expert, rows in enumerate(load_E)]
    heapq.heapify(heap)
    for _ in range(s.num_ranks * s.slots):
        expert = heap[0][1]
        copies[expert] += 1
        heapq.heapreplace(heap, (-load_E[expert] / copies[expert], expert))
    pieces = sorted((-load_E[e] / copies[e], e) for e in range(s.num_experts) for _ in range(copies[e]))
    ranks: list[list[int]] = [[] for _ in range(s.num_ranks)]
    room = [(0.0, rank) for rank in range(s.num_ranks)]
    for weight, expert in pieces:
        rows, rank = heapq.heappop(room)
        ranks[rank].append(expert)
        if len(ranks[rank]) < s.num_local + s.slots:
            heapq.heappush(room, (rows - weight, rank))
    return ranks


POLICIES = ("none", "balanced", "eplb-history", "eplb-exact", "least-loaded", "quota", "quota-joint", "fixed_rows")


def build_policy(name: str, setting: Setting, window: int) -> Policy:
    """A fresh policy, for one layer: EPLB remembers what lies where.

    Raises:
        PlanError: fixed_rows with too few slots.
    """
    if name in ("none", "balanced"):
        return Still(name, setting)
    if name in ("quota", "fixed_rows"):
        return Planned("quota" if name == "quota" else "fixed_rows", setting)
    if name == "quota-joint":
        return Joint(setting)
    if name == "least-loaded":
        return LeastLoaded(setting)
    return Eplb(setting, name, window if name == "eplb-history" else 0)

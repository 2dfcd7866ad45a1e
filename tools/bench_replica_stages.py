"""What copies of hot experts cost a layer: plan, reroute, weight_sync and grad_reduce, each alone and as exposed time.

    plan            the exchange of loads, the plan, the comparison of what the ranks planned
    reroute         ids of experts to ids of instances
    weight_sync     masters into slots; forward and backward it comes twice
    grad_reduce     gradients of slots to their masters

Alone: on an idle device, from its inputs to its result. Exposed: by how much the whole layer's time grows with it, from
the same layer run without it on the same routing, iteration by iteration. Left out are a plan and a routing that stand
ready from the run before, weights that are in the slots already, and gradients that stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ep.load import expert_load
from moe_ep.replica.checks import verify
from moe_ep.replica.plan import Plan
from moe_ep.replica.runtime import Planned
from moe_ep.replica.transport import copies
from moe_ep.routing import Routing

from .bench_case import BOTH, Case, Figure
from .bench_check import Check
from .bench_layer import BenchLayer
from .bench_setting import Setting, gather, sum_ranks
from .bench_without import Stage, runtime_of, stages_of
from .floors import Rates
from .timing import Stopwatch, Untimed, percentiles

Times = dict[str | None, list[float]]
_SAMPLES = 4096  # values of each weight that are compared


class ReplicaCase(Case):
    """The four stages of one micro-batch, each on its own.

    Attributes:
        crossing: of each run, bytes of weights that the busiest direction of a link carries in one weight_sync.
    """

    reference = "the masters, the sums of what the slots held and the plan's quotas"
    telling = False

    def __init__(self, layer: BenchLayer, pass_: str, setting: Setting) -> None:
        super().__init__(setting)
        self.layer, self.candidate, self.pass_ = layer, layer.candidate, pass_
        self.figures = [self._figure(stage) for stage in stages_of(pass_)]
        experts = layer.module.experts
        self.masters = [weight.detach() for weight in (experts.w_gate_up, experts.w_down)]
        self.totals = [torch.zeros_like(weight, dtype=torch.float32) for weight in self.masters]
        self.crossing: list[int] = []
        self._left: tuple[Planned, Routing] | None = None

    def _figure(self, stage: Stage) -> Figure:
        twice = stage == "weight_sync" and self.pass_ == BOTH
        marks = (stage, f"{stage}_bwd") if twice else (stage,)
        return Figure(stage=stage, pass_=self.pass_, form=None, marks=marks, dispatches=0, combines=0)

    def row_values(self) -> dict[str, Any]:
        """See Case."""
        return {"S": self.layer.slots, "experts": self.layer.module.config.experts}

    @property
    def label(self) -> str:
        """See Case."""
        return f"{super().label}-S{self.layer.slots}-replicas"

    def clear(self) -> None:
        """See Case."""
        self._left = None

    def run(self, iteration: int, watch: Stopwatch) -> None:
        """Marks plan, reroute, weight_sync, and weight_sync_bwd, grad_reduce."""
        runtime, drawn = runtime_of(self.layer), self.setting.routings[iteration]
        lease = runtime.open(None, 0)
        watch.begin()
        planned = runtime._plan(lease, [drawn], drawn.expert_ids.device)
        watch.mark("plan")
        watch.begin()
        moved = runtime._moved(lease, drawn, planned.plans[0])
        watch.mark("reroute")
        lane = runtime.lanes[planned.lane]
        for mark in self.figures[2].marks:
            watch.begin()
            lane.transport.weight_sync(planned.placed, self.masters, lane.buffers.weights).wait()
            watch.mark(mark)
        if self.pass_ == BOTH:
            self._fill(lane.buffers.grads)
            watch.begin()
            lane.transport.grad_reduce(planned.placed, lane.buffers.grads, self.totals).wait()
            watch.mark("grad_reduce")
        self._left = planned, moved
        self.crossing.append(self._busiest(planned.plans[0]))

    def _fill(self, grads: Sequence[Tensor]) -> None:
        for grad in grads:
            for slot, part in enumerate(grad):
                part.fill_(self._value(self.setting.place.rank, slot))
        for total in self.totals:
            total.zero_()

    @staticmethod
    def _value(rank: int, slot: int) -> int:
        """What a slot's gradient is filled with: small integers, whose sums are exact in every order."""
        return 7 * rank + slot + 1

    def _busiest(self, plan: Plan) -> int:
        sent, received = ([0] * plan.num_ranks for _ in range(2))
        for copy in copies(plan):
            sent[copy.home] += 1
            received[copy.rank] += 1
        return max(*sent, *received) * sum(weight[0].numel() * weight.element_size() for weight in self.masters)

    def check(self, iteration: int) -> Check:
        """Quotas realised, slots with their masters' weights, masters with their slots' gradients. Collective.

        Raises:
            PlanError: what is no plan.
        """
        self.run(iteration, Untimed())
        assert self._left is not None, "check before run"
        planned, moved = self._left
        plan, buffers = planned.plans[0], runtime_of(self.layer).lanes[planned.lane].buffers
        verify(plan)
        wrong = self._wrong_quotas(plan, moved) + self._wrong_weights(plan, buffers.weights)
        wrong += self._wrong_sums(plan, buffers.grads) if self.pass_ == BOTH else 0
        return Check(wrong=wrong, err=float(wrong > 0))

    def _wrong_quotas(self, plan: Plan, moved: Routing) -> int:
        place, num_local = self.setting.place, self.setting.num_local
        rows_RP = sum_ranks(expert_load(moved.expert_ids, moved.num_experts), place).cpu().view(place.num_ranks, -1)
        quota_ER, held_S = plan.quota.cpu().long(), plan.instances[place.rank].cpu().long()
        first = place.rank * num_local
        want = [*quota_ER[first : first + num_local, place.rank].tolist()]
        want += [int(quota_ER[expert, place.rank]) if expert >= 0 else 0 for expert in held_S.tolist()]
        return sum(a != b for a, b in zip(rows_RP[place.rank].tolist(), want, strict=True))

    def _wrong_weights(self, plan: Plan, slots: Sequence[Tensor]) -> int:
        wrong = 0
        for master, slot in zip(self.masters, slots, strict=True):
            there_RLn = gather(_sampled(master), self.setting.place)
            for copy in self._mine(plan):
                wrong += not torch.equal(_sampled(slot)[copy.slot], there_RLn[copy.home, copy.local])
        return wrong

    def _wrong_sums(self, plan: Plan, grads: Sequence[Tensor]) -> int:
        want = [0] * plan.num_local
        for copy in copies(plan):
            if copy.home == self.setting.place.rank:
                want[copy.local] += self._value(copy.rank, copy.slot)
        wrong = sum(bool((total[i] != value).any()) for total in self.totals for i, value in enumerate(want))
        return wrong + sum(bool(grad[copy.slot].any()) for grad in grads for copy in self._mine(plan))

    def _mine(self, plan: Plan) -> list[Any]:
        return [copy for copy in copies(plan) if copy.rank == self.setting.place.rank]


def _sampled(weight: Tensor) -> Tensor:
    """Evenly spaced values of each expert, [L, n]."""
    flat = weight.flatten(1)
    return flat[:, :: -(-flat.shape[1] // _SAMPLES)].contiguous()


def stage_fields(
    case: ReplicaCase, figure: Figure, us: dict[str, list[float]], whole: Times, rates: Rates | None
) -> dict[str, Any]:
    """Fields of a row: the stage alone, its bytes over the link as a floor, and what the layer's time grows by.

    Args:
        case: of the stages.
        figure: which of them.
        us: of the case, by mark, of each iteration the slowest rank's.
        whole: of the layer, likewise, without each stage and (None) with all of them.
        rates: for the floor.
    """
    alone = [sum(times) for times in zip(*(us[mark] for mark in figure.marks), strict=True)]
    p10, p50, p90 = percentiles(alone)
    moves = figure.stage in ("weight_sync", "grad_reduce")
    each = sum(case.crossing) / len(case.crossing)
    if figure.stage == "grad_reduce":
        each *= 4 / case.masters[0].element_size()  # float32
    num_bytes = each * len(figure.marks)
    floor_us = num_bytes / (rates.link_gbs * 1e3) if moves and rates is not None else None
    without = whole.get(figure.stage)  # None: it could not be run
    grown = None if without is None else [a - b for a, b in zip(whole[None], without, strict=True)]
    exposed = None if grown is None else percentiles(grown)[1]
    return {
        "stage": figure.stage, "us_p10": round(p10, 2), "us_p50": round(p50, 2), "us_p90": round(p90, 2),
        "floor_us": None if floor_us is None else round(floor_us, 2),
        "ratio": round(p50 / floor_us, 4) if floor_us else None,
        "dedup_bytes": round(each) if moves else None, "busbw": round(num_bytes / p50 / 1e3, 3) if moves else None,
        "exposed_us": None if exposed is None else round(exposed, 2),
        "hidden_share_steps": None if exposed is None else round(1 - exposed / p50, 4),
    }  # fmt: skip

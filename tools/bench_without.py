"""A layer with copies of hot experts whose time is taken with everything, and without one of the stages of copies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, get_args

from moe_ep.replica.lease import Lease
from moe_ep.replica.plan import Plan
from moe_ep.replica.runtime import Planned, ReplicaRuntime
from moe_ep.replica.transport import InFlight
from moe_ep.routing import Routing

from .bench_case import BOTH
from .bench_check import Check
from .bench_layer import BenchLayer, LayerCase
from .bench_setting import Setting
from .timing import Stopwatch

Stage = Literal["plan", "reroute", "weight_sync", "grad_reduce"]
STAGES: tuple[Stage, ...] = get_args(Stage)


def stages_of(pass_: str) -> tuple[Stage, ...]:
    """Those that a pass has."""
    return STAGES if pass_ == BOTH else STAGES[:-1]


def runtime_of(layer: BenchLayer) -> ReplicaRuntime:
    """Of a layer with slots."""
    assert layer.module.replicas is not None, "no slots"
    return layer.module.replicas


class WholeCase(LayerCase):
    """A layer whose time has no row of its own: with all of it, or without one stage.

    Args:
        layer: with slots.
        pass_: as in a row.
        setting: of the layer.
        without: what is left out, and taken over from the run with everything, which comes first in each iteration.
    """

    telling = False

    def __init__(self, layer: BenchLayer, pass_: str, setting: Setting, without: Stage | None = None) -> None:
        super().__init__(layer, pass_, setting)
        self.without, self.figures = without, []

    @property
    def label(self) -> str:
        """See Case."""
        return super().label if self.without is None else f"{super().label}-without-{self.without}"

    def run(self, iteration: int, watch: Stopwatch) -> None:
        """Mark "layer"."""
        runtime, kept = runtime_of(self.layer), self.layer.kept
        with contextlib.ExitStack() as left_out:
            if self.without is None:
                left_out.enter_context(_keeping(runtime, kept, iteration))
            elif self.without in ("plan", "reroute"):
                left_out.enter_context(_taking(runtime, kept[iteration], self.without))
            else:
                for lane in runtime.lanes:
                    left_out.enter_context(_replaced(lane.transport, self.without, _done))
            super().run(iteration, watch)

    def check(self, iteration: int) -> Check:
        """Nothing is promised of a layer that leaves something out."""
        return Check(wrong=0, err=0.0) if self.without else super().check(iteration)


def _done(*_: object, **__: object) -> InFlight:
    return InFlight(lambda: None)


@contextlib.contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Have one object's method be another function inside."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


@contextlib.contextmanager
def _keeping(runtime: ReplicaRuntime, kept: dict[int, tuple[Planned, Routing]], iteration: int) -> Iterator[None]:
    """Note the plan and the routing that are made inside."""
    plan, move = runtime._plan, runtime._moved
    made: list[Planned] = []

    def planned(*given: Any) -> Planned:
        made.append(plan(*given))
        return made[-1]

    def moved(*given: Any) -> Routing:
        there = move(*given)
        kept[iteration] = made[-1], there
        return there

    with _replaced(runtime, "_plan", planned), _replaced(runtime, "_moved", moved):
        yield


@contextlib.contextmanager
def _taking(runtime: ReplicaRuntime, kept: tuple[Planned, Routing], which: Stage) -> Iterator[None]:
    """Have the plan, or the ids of instances, at hand."""
    plan, there = kept

    def planned(*_: Any) -> Planned:
        return plan

    def moved(lease: Lease, routing: Routing, made: Plan) -> Routing:
        return Routing(expert_ids=there.expert_ids, weights=routing.weights, num_experts=there.num_experts)

    name, value = ("_plan", planned) if which == "plan" else ("_moved", moved)
    with _replaced(runtime, name, value):
        yield

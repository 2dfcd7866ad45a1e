"""Which cases a table has for one dispatcher, and how each of them is made."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from .bench_candidates import Candidate
from .bench_case import Case, StageCase
from .bench_domino import StackCase
from .bench_layer import BenchLayer, LayerCase
from .bench_options import Options
from .bench_replica_stages import ReplicaCase
from .bench_setting import Setting
from .bench_stack import BenchStack
from .bench_variants import plans
from .bench_without import Stage, WholeCase, stages_of

Recipe = tuple[dict[str, Any], Callable[[], Case]]


def recipes(
    options: Options, level: str, setting: Setting, candidate: Candidate, stack: BenchStack | None
) -> Iterator[Recipe]:
    """What rows of a case without times hold, and how to make it. `stack`: of the levels that have one."""
    if stack is not None:
        yield from _of_stack(options, level, candidate, stack)
        return
    for slots in options.replica_slots:
        if level == "stage" and slots == 0:
            for pass_ in options.passes:
                yield {"pass_": pass_, "S": slots}, functools.partial(StageCase, candidate, pass_, setting)
            continue
        # passes share the layer's weights
        layer = functools.cache(functools.partial(BenchLayer, candidate, options.experts, setting, slots))
        for pass_ in options.passes:
            make = _of_layer if level == "layer" else _of_replicas
            yield from make(layer, {"pass_": pass_, "S": slots, "experts": options.experts}, setting)


def _of_stack(options: Options, level: str, candidate: Candidate, stack: BenchStack) -> Iterator[Recipe]:
    for pass_, num, slots in itertools.product(options.passes, options.micro_batches, options.replica_slots):
        for plan in plans(level, pass_, num, options.reserve_sms, slots):
            values = {"pass_": pass_, "M": num, "variant": plan.variant, "reserve_sms": plan.reserve_sms}
            values |= {"attention": stack.attention_name, "layers": options.layers, "S": slots}
            yield values, functools.partial(StackCase, stack, candidate, plan)


def _of_layer(layer: Callable[[], BenchLayer], values: dict[str, Any], setting: Setting) -> Iterator[Recipe]:
    yield values, lambda: LayerCase(layer(), values["pass_"], setting)


def _of_replicas(layer: Callable[[], BenchLayer], values: dict[str, Any], setting: Setting) -> Iterator[Recipe]:
    """The stages of copies alone, then the layer with all of them and without each."""

    def without(stage: Stage | None) -> Recipe:
        return values | {"stage": stage}, lambda: WholeCase(layer(), values["pass_"], setting, stage)

    yield values, lambda: ReplicaCase(layer(), values["pass_"], setting)
    yield from (without(stage) for stage in (None, *stages_of(values["pass_"])))

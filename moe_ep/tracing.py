"""Names in a profiler's trace: which step, layer, micro-batch and stage something belongs to. Written and read here.

Without a profiler a range costs one look at a flag (about 0.3 us with its `with`), so they stand where communication is
launched and awaited and around every stage. A trace then shows, on the host's threads,

    moe_ep: step 12
    moe_ep: experts of layer 3, micro-batch 0            a stage; ranges nest, the innermost one counts
    moe_ep: launch dispatch of layer 3, micro-batch 0    a communication, forward
    moe_ep: wait for backward of combine of layer 3, micro-batch 1

Backward has ranges where communication is launched and awaited. Its computation has none: a trace links each of its
operations to the forward's.
"""

from __future__ import annotations

import contextlib
import re
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch.autograd.profiler as profiler

PREFIX = "moe_ep: "
Role = Literal["stage", "launch", "wait"]
_VERBS: dict[Role, str] = {"stage": "", "launch": "launch ", "wait": "wait for "}
_nothing = contextlib.nullcontext()


class Place(NamedTuple):
    """What a name says. `layer` None: a dense layer, which has no number here. `micro_batch`: the first of several."""

    role: Role
    stage: str
    layer: int | None
    micro_batch: int
    backward: bool = False


def stage_range(stage: str, layer: int | None, micro_batch: int) -> AbstractContextManager[Any]:
    """Around the work of a stage."""
    if not profiler._is_profiler_enabled:
        return _nothing
    where = "a dense layer" if layer is None else f"layer {layer}"
    return profiler.record_function(f"{PREFIX}{stage} of {where}, micro-batch {micro_batch}")


def transfer_range(role: Role, what: str) -> AbstractContextManager[Any]:
    """Around a launch of a communication, or a wait for it; `what` such as "dispatch of layer 3, micro-batch 0"."""
    return profiler.record_function(f"{PREFIX}{_VERBS[role]}{what}") if profiler._is_profiler_enabled else _nothing


def step_range(step: int) -> AbstractContextManager[Any]:
    """Around one optimizer step, or one iteration of a benchmark."""
    return profiler.record_function(f"{PREFIX}step {step}") if profiler._is_profiler_enabled else _nothing


_PLACE = re.compile(
    re.escape(PREFIX)
    + r"(?P<verb>launch |wait for )?(?P<backward>backward of )?(?P<stage>\w[\w ]*?) of "
    + r"(?:a dense layer|layer (?P<layer>\d+)), micro-batch (?P<micro_batch>\d+)(?: to \d+)?"
)
_STEP = re.compile(re.escape(PREFIX) + r"step (\d+)|ProfilerStep#(\d+)")


def parse_place(name: str) -> Place | None:
    """What a range's name says; None for every other name."""
    found = _PLACE.fullmatch(name)
    if found is None:
        return None
    role = next(role for role, verb in _VERBS.items() if verb == (found["verb"] or ""))
    layer = None if found["layer"] is None else int(found["layer"])
    return Place(role, found["stage"], layer, int(found["micro_batch"]), found["backward"] is not None)


def parse_step(name: str) -> int | None:
    """The number of a step's range, also of those that torch.profiler.profile.step() makes; None for other names."""
    found = _STEP.fullmatch(name)
    return None if found is None else int(found[1] or found[2])

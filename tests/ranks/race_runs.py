"""Runs under MOE_EP_RACE for the tests on gloo and on GPUs: schedules with a wait removed, seeds, what came out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from moe_ep import DominoStack, domino, race
from moe_ep.debug import debug
from moe_ep.schedule import Schedule, schedule, stack
from moe_ep.schedule_check import check
from moe_ep.schedule_steps import Key, Step
from tests.ranks.small_stack import inputs, loss_of

LAYERS = (False, True)  # one layer with experts; a dense one behind, whose schedule resolves


def without(steps: tuple[Step, ...], place: int, wait: Key) -> tuple[Step, ...]:
    """The steps, of which the one at `place` no longer waits for `wait`."""
    step = steps[place]
    assert wait in step.waits
    return *steps[:place], replace(step, waits=tuple(w for w in step.waits if w != wait)), *steps[place + 1 :]


@contextlib.contextmanager
def host_ahead(ahead: bool) -> Iterator[None]:
    """Layers run the order of a host that runs ahead, or that of one that computes itself, whatever the device."""
    with mock.patch.object(domino, "_host_runs_ahead", lambda x: ahead):
        yield


def necessary_waits(num: int, *, host_ahead: bool = False) -> list[tuple[str, str, int]]:
    """(who waits, for whom, micro-batch) of every wait of a layer's forward whose removal the checker finds."""
    found = []
    layers = stack([schedule(num, host_ahead=host_ahead)] * 2)
    for place, step in enumerate(layers):
        for wait in step.waits:
            if step.key.layer == 1 and check(without(layers, place, wait)):  # layer 1: resolves wait there, too
                found.append((str(step.key.kind), str(wait.kind), step.key.micro_batch))
    return found


def mutant(waits: str, awaited: str, micro_batch: int) -> Any:
    """A function like `schedule`, whose schedules lack one wait, in every layer that has it."""

    def make(num: int, **options: Any) -> Schedule:
        plan = schedule(num, **options)
        for place, step in enumerate(plan.steps):
            if (step.key.kind, step.key.micro_batch) == (waits, micro_batch):
                (wait,) = (w for w in step.waits if w.kind == awaited)
                return replace(plan, steps=without(plan.steps, place, wait))
        return plan

    return make


@contextlib.contextmanager
def racing(seed: int, longest_s: float = race.LONGEST_S) -> Iterator[None]:
    """MOE_EP_RACE is set, and the delays start again."""
    with mock.patch.dict(os.environ, MOE_EP_RACE=str(seed)), mock.patch.object(race, "LONGEST_S", longest_s):
        debug.cache_clear()
        race._race.cache_clear()
        try:
            yield
        finally:
            debug.cache_clear()


def on(device: torch.device, rank: int, num: int) -> list[Tensor]:
    return [x.detach().to(device).requires_grad_() for x in inputs(rank, num)]


def run_forward(model: DominoStack, rank: int, num: int, device: torch.device) -> list[Tensor]:
    """Outputs of M micro-batches."""
    ys, _ = model(on(device, rank, num))
    return [y.detach().clone() for y in ys]


def run_both_ways(model: DominoStack, rank: int, num: int, device: torch.device) -> list[Tensor]:
    """Outputs, gradients of the inputs and of the parameters."""
    xs = on(device, rank, num)
    model.zero_grad()
    ys, auxes = model(xs)
    torch.stack([loss_of(y, said) for y, said in zip(ys, auxes, strict=True)]).sum().backward()
    got: list[Any] = [*ys, *(x.grad for x in xs), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [t.detach().clone() for t in got]

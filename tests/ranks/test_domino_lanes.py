"""What micro-batches hold comes back: lanes, tickets and graphs, also where a step fails halfway."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import set_checkpoint_early_stop

from moe_ep import (
    NonFiniteError,
    moe_layers,
    recompute_region,
)
from moe_ep.dispatch.ticket import Ticket
from moe_ep.dispatch.transfer import Flight
from moe_ep.domino import DominoStack, launch
from moe_ep.domino_executor import Region
from moe_ep.in_flight import InFlight
from moe_ep.testing.ranks import RankPool
from tests.ranks.race_runs import host_ahead
from tests.ranks.small_stack import inputs, loss_of, small_stack

LAYERS = (False, False)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120) as ranks:
        yield ranks


def run_step(model: DominoStack, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    ys, auxes = model(xs)
    torch.stack([loss_of(y, said) for y, said in zip(ys, auxes, strict=True)]).sum().backward()
    return [*(y.detach() for y in ys), *(x.grad for x in xs)]


def body_steady(
    group: dist.ProcessGroup, rank: int, steps: int, num: int, ahead: bool, recompute: bool, early_stop: bool
) -> list[int]:
    with host_ahead(ahead), set_checkpoint_early_stop(early_stop):
        return left_over(group, rank, steps, num, recompute_region if recompute else None)


def left_over(group: dist.ProcessGroup, rank: int, steps: int, num: int, region: Region | None) -> list[int]:
    """What is left of micro-batches after step 10, after the last, with outputs pending, and without them.

    Lanes, free lanes, live tickets, transfers (those of a graph that is alive), communications in flight.
    """
    model = small_stack(group, dense=(False, True))
    for layer in model.layers:
        layer.recompute_in(region)  # type: ignore[operator]
    (dispatcher,) = {layer.dispatcher for layer in moe_layers(model)}

    def figures() -> list[int]:
        live = Counter(map(type, gc.get_objects()))
        return [dispatcher.lanes.num_lanes, dispatcher.lanes.num_free, live[Ticket], live[Flight], live[InFlight]]

    seen = []
    run_step(model, inputs(rank, num))  # torch sets things up, and leaves a cycle
    gc.collect()
    gc.disable()  # nothing may need the collector to go
    for number in range(1, steps + 1):
        run_step(model, inputs(rank, num))
        seen += figures() if number in (10, steps) else []
    pending = launch(model.layers[:1], inputs(rank, num))
    seen += figures()
    del pending  # abandoned, never resolved
    seen += figures()
    gc.enable()
    return seen


@pytest.mark.parametrize(
    ("steps", "num", "ahead", "recompute", "early_stop"),
    [
        (25, 2, False, False, True),
        (25, 2, True, False, True),
        (25, 2, True, True, True),
        (25, 2, False, True, False),
        pytest.param(200, 2, True, True, True, marks=pytest.mark.slow),
        pytest.param(200, 3, False, False, True, marks=pytest.mark.slow),
        pytest.param(200, 3, True, True, False, marks=pytest.mark.slow),
    ],
)
def test_lanes_and_tickets_do_not_grow_and_come_back(
    pool: RankPool, steps: int, num: int, ahead: bool, recompute: bool, early_stop: bool
) -> None:
    for seen in pool.run(body_steady, steps, num, ahead, recompute, early_stop):
        gone = [num, num, 0, 0, 0]
        assert seen == gone * 2 + [num, 0, num, 2 * num, num] + gone


class Broken(Exception):
    """What an expert of the user's raises."""


def body_error(group: dist.ProcessGroup, rank: int, layer: int, micro_batch: int) -> None:
    """Experts fail in the midst of a group, on all ranks; the next step knows nothing of it."""
    model, untouched = small_stack(group, dense=LAYERS), small_stack(group, dense=LAYERS)
    calls = 0

    def fail(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == micro_batch + 1:
            raise Broken

    hook = model.layers[layer].moe.experts.register_forward_pre_hook(fail)  # type: ignore[union-attr,arg-type]
    with pytest.raises(Broken):
        run_step(model, inputs(rank, 3))
    hook.remove()
    (dispatcher,) = {each.dispatcher for each in moe_layers(model)}
    assert dispatcher.lanes.num_free == dispatcher.lanes.num_lanes == 3
    model.zero_grad()
    for got, want in zip(run_step(model, inputs(rank, 3)), run_step(untouched, inputs(rank, 3)), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("layer", "micro_batch"), [(0, 0), (0, 2), (1, 1)])
def test_a_step_after_one_that_failed_halfway_is_whole(pool: RankPool, layer: int, micro_batch: int) -> None:
    pool.run(body_error, layer, micro_batch)


def test_the_error_of_a_micro_batch_names_it_and_gives_the_lanes_back() -> None:
    changes = dict(dispatcher="all2all", max_tokens=14)  # a dispatcher that no other test has
    model = small_stack(None, changes, dense=(False, False))
    xs = inputs(0, 3)
    xs[2] = torch.full_like(xs[2], torch.nan)
    (dispatcher,) = {layer.dispatcher for layer in moe_layers(model)}
    with pytest.raises(NonFiniteError, match="layer 0, micro-batch 2"):
        model(xs)
    assert dispatcher.lanes.num_free == dispatcher.lanes.num_lanes == 3

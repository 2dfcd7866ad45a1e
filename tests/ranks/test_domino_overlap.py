"""Domino hides communication: slow collectives on a thread of their own, computation that lasts, gloo ranks."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import set_checkpoint_early_stop

from moe_ep import (
    InputError,
    NonFiniteError,
    Pending,
    ProtocolError,
    RecipeError,
    domino,
    moe_layers,
    recompute_region,
)
from moe_ep.dispatch.ticket import Ticket
from moe_ep.dispatch.transfer import Flight
from moe_ep.domino import DominoLayer, DominoStack, launch
from moe_ep.domino_executor import Region
from moe_ep.in_flight import InFlight
from moe_ep.schedule import schedule
from moe_ep.schedule_steps import Key, Kind
from moe_ep.testing.ranks import RankPool
from tests.ranks.race_runs import host_ahead
from tests.ranks.small_stack import inputs, loss_of, recorded, slow_collectives, small_stack

DELAY_S, NAP_S = 0.05, 0.1
LAYERS = (False, False)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120) as ranks:
        yield ranks


def timed(model: DominoStack, groups: list[list[torch.Tensor]]) -> tuple[float, float, int, int]:
    """Seconds of forward and of backward of all groups; collectives in each."""
    forward_s = backward_s = 0.0
    with slow_collectives(DELAY_S) as works:
        forward = backward = 0
        for xs in groups:
            begin, seen = time.perf_counter(), len(works)
            ys, auxes = model(xs)
            losses = torch.stack([loss_of(y, said) for y, said in zip(ys, auxes, strict=True)]).sum()
            middle, launched = time.perf_counter(), len(works)
            losses.backward()
            backward_s += time.perf_counter() - middle
            forward_s += middle - begin
            forward += launched - seen
            backward += len(works) - launched
    return forward_s, backward_s, forward, backward


def body_overlap(group: dist.ProcessGroup, rank: int) -> tuple[float, float]:
    """Hidden share of the injected time, forward and backward."""
    model = small_stack(group, dense=LAYERS)
    for layer in model.layers:
        layer.log, layer.nap_s = [], NAP_S  # type: ignore[assignment]
    xs = inputs(rank, 2)
    model(xs)  # whatever the first call sets up is no part of the figures
    serial = timed(model, [[x] for x in xs])
    split = timed(model, [xs])
    per_layer = 2 * len(LAYERS)  # micro-batches times layers
    # counts, rows, weights and results one way each; gradients of results, rows and weights
    assert serial[2:] == split[2:] == (4 * per_layer, 3 * per_layer)
    injected = serial[2] * DELAY_S, serial[3] * DELAY_S
    return (serial[0] - split[0]) / injected[0], (serial[1] - split[1]) / injected[1]


def test_two_micro_batches_hide_communication(pool: RankPool) -> None:
    for forward, backward in pool.run(body_overlap):
        assert forward >= 0.4, "forward"
        assert backward >= 0.4, "backward"


def body_unfinished(group: dist.ProcessGroup, rank: int) -> list[bool]:
    """Whether the last collective was over: when the layer returned, and after its output was resolved."""
    model = small_stack(group, dense=(False,))
    xs = inputs(rank, 2)
    with slow_collectives(0.1) as works:
        pending, _ = model.layers[0]([Pending(base=x) for x in xs])
        ended = [works[-1].future.done()]
        for output in pending:
            output.resolve()
        return [*ended, works[-1].future.done()]


def test_a_layer_returns_before_its_last_combine_is_over(pool: RankPool) -> None:
    assert pool.run(body_unfinished) == [[False, True]] * 2


def body_counts(group: dist.ProcessGroup, rank: int, dispatcher: str) -> tuple[bool, bool]:
    """Whether micro-batch 0's rows had arrived when micro-batch 1's were launched, and at the end."""
    (layer,) = moe_layers(small_stack(group, {"dispatcher": dispatcher}, dense=(False,)))
    with slow_collectives(0.5, 0.01) as works:
        first = layer.launch_dispatch(inputs(rank, 2)[0])
        rows = works[1]
        second = layer.launch_dispatch(inputs(rank, 2)[1], micro_batch=1)
        early = rows.future.done()
        for flight in (first, second):
            layer.compute(flight)
        return early, rows.future.done()


@pytest.mark.parametrize("dispatcher", ["all2all", "agrs"])
def test_counts_do_not_stand_in_line_behind_rows(pool: RankPool, dispatcher: str) -> None:
    assert pool.run(body_counts, dispatcher) == [(False, True)] * 2


def run_step(model: DominoStack, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    ys, auxes = model(xs)
    torch.stack([loss_of(y, said) for y, said in zip(ys, auxes, strict=True)]).sum().backward()
    return [*(y.detach() for y in ys), *(x.grad for x in xs)]


def body_steady(
    group: dist.ProcessGroup, rank: int, num: int, ahead: bool, recompute: bool, early_stop: bool
) -> list[int]:
    with host_ahead(ahead), set_checkpoint_early_stop(early_stop):
        return left_over(group, rank, num, recompute_region if recompute else None)


def left_over(group: dist.ProcessGroup, rank: int, num: int, region: Region | None) -> list[int]:
    """What is left of micro-batches after step 10, after step 200, with outputs pending, and without them.

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
    for number in range(1, 201):
        run_step(model, inputs(rank, num))
        seen += figures() if number in (10, 200) else []
    pending = launch(model.layers[:1], inputs(rank, num))
    seen += figures()
    del pending  # abandoned, never resolved
    seen += figures()
    gc.enable()
    return seen


@pytest.mark.parametrize(
    ("num", "ahead", "recompute", "early_stop"),
    [
        (2, False, False, True),
        (2, True, False, True),
        (2, True, True, True),
        (2, False, True, False),
        pytest.param(3, False, False, True, marks=pytest.mark.slow),
        pytest.param(3, True, True, False, marks=pytest.mark.slow),
    ],
)
def test_lanes_and_tickets_do_not_grow_and_come_back(
    pool: RankPool, num: int, ahead: bool, recompute: bool, early_stop: bool
) -> None:
    for seen in pool.run(body_steady, num, ahead, recompute, early_stop):
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


def test_a_pending_output_is_resolved_once() -> None:
    model = small_stack(None, dense=(False,))
    (pending,), _ = launch(model.layers, inputs(0, 1))
    pending.resolve()
    with pytest.raises(ProtocolError, match="layer 0, micro-batch 0: its pending output was resolved before"):
        pending.resolve()
    x = torch.ones(2, 3)
    assert Pending(base=x).resolve() is x


def test_resolve_works_on_the_tensors_found_in_the_pending_output() -> None:
    """FSDP2 puts others in their place."""
    model = small_stack(None, dense=(False,))
    (plain,), _ = launch(model.layers, inputs(0, 1))
    (other,), _ = launch(model.layers, inputs(0, 1))
    leaves, spec = pytree.tree_flatten(other)
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) == 1 + len(other.in_flight) > 1
    doubled = pytree.tree_unflatten([2 * leaf if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
    assert torch.equal(doubled.resolve(), 2 * plain.resolve())
    assert doubled.in_flight == (), "the rows are needed no more"


def test_the_executor_follows_the_schedule_it_is_given() -> None:
    model = small_stack(None, dense=(False,))
    given = schedule(2)
    serial = replace(given, steps=tuple(sorted(given.steps, key=lambda step: step.key.micro_batch)))
    with recorded(model) as log:
        launch(model.layers, inputs(0, 2))
        log.append("serial")
        with mock.patch.object(domino, "schedule", lambda *_, **__: serial):
            launch(model.layers, inputs(0, 2))
    turns = [line.split(".")[0] for line in log if not line.startswith(("launch", "wait"))]
    one = ["attention 0", "experts 0"]
    assert turns == ["attention 0", "attention 0", "experts 0", "experts 0", "serial", *one, *one]


def test_a_wait_that_no_stage_makes_is_refused() -> None:
    model = small_stack(None, dense=(False,))
    given = schedule(1)
    steps = [
        replace(step, waits=(Key(Kind.ATTENTION, 0),)) if step.key.kind is Kind.SHARED else step for step in given.steps
    ]
    with (
        mock.patch.object(domino, "schedule", lambda *_, **__: replace(given, steps=tuple(steps))),
        pytest.raises(ProtocolError, match="the schedule has waits that no stage makes: shared for attention"),
    ):
        model(inputs(0, 1))


def test_misuse_is_refused() -> None:
    model = small_stack(None)
    with pytest.raises(InputError, match="got 0 micro-batches; give at least one"):
        model([])
    with pytest.raises(InputError, match="got 2 micro-batches and 1 masks"):
        model(inputs(0, 2), [None])
    with pytest.raises(RecipeError, match=r"layer 0 \(Linear\) has no attention, shared, moe"):
        DominoStack([torch.nn.Linear(2, 2)])
    with pytest.raises(NotImplementedError, match="DominoLayer must define attention"):
        DominoLayer().attention(torch.ones(1))


def test_the_error_of_a_micro_batch_names_it_and_gives_the_lanes_back() -> None:
    changes = dict(dispatcher="all2all", max_tokens=14)  # a dispatcher that no other test has
    model = small_stack(None, changes, dense=(False, False))
    xs = inputs(0, 3)
    xs[2] = torch.full_like(xs[2], torch.nan)
    (dispatcher,) = {layer.dispatcher for layer in moe_layers(model)}
    with pytest.raises(NonFiniteError, match="layer 0, micro-batch 2"):
        model(xs)
    assert dispatcher.lanes.num_free == dispatcher.lanes.num_lanes == 3

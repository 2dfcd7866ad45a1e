"""Replicas of micro-batches that interleave: each planned alone, or placed together; and of a second pass."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Iterator
from statistics import fmean
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from moe_ep import Ticket, close_dispatchers, moe_layers
from moe_ep.dispatch.transfer import Flight
from moe_ep.in_flight import InFlight
from moe_ep.recompute import recompute_context_fn, recompute_region
from moe_ep.replica.lease import Lease
from moe_ep.replica.messages import GroupTransport
from moe_ep.testing.ranks import RankPool
from tests.ranks.race_runs import host_ahead, run_both_ways
from tests.ranks.small_runtime import Step, Training, largest_difference, train
from tests.ranks.small_stack import small_stack
from tests.ranks.test_domino import compare

ON = dict(replica=dict(slots=2))
JOINT = dict(replica=dict(slots=2, joint=True))
CPU = torch.device("cpu")
PASSING = (Ticket, Flight, InFlight, Lease)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120) as ranks:
        yield ranks


def body_equal(group: dist.ProcessGroup, rank: int, num: int) -> None:
    for ahead in (False, True):
        with host_ahead(ahead):
            compare(small_stack(group, ON), rank, num)


@pytest.mark.parametrize("num", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_values_do_not_depend_on_m(pool: RankPool, num: int) -> None:
    """Bit for bit: each micro-batch is planned from its own load, interleaved or not."""
    pool.run(body_equal, num)


def body_joint(group: dist.ProcessGroup, rank: int, num: int, steps: int) -> tuple[list[Step], Counter[str]]:
    """Training, and how often weights and gradients travel."""
    calls: Counter[str] = Counter()

    def counting(name: str) -> Any:
        real = getattr(GroupTransport, name)

        def call(self: GroupTransport, *args: Any) -> Any:
            calls[name] += 1
            return real(self, *args)

        return mock.patch.object(GroupTransport, name, call)

    with counting("_push"), counting("_pull"), host_ahead(bool(num % 2)):
        return train(group, rank, JOINT, steps, num), calls


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_one_placement_for_all_micro_batches(pool: RankPool, num: int) -> None:
    """One copy of the weights forward, one backward and one sum of gradients, for two layers, whatever M is."""
    steps = 4
    theirs = pool.run(train, {}, steps, num)
    results = pool.run(body_joint, num, steps)
    assert largest_difference([ours for ours, _ in results], theirs) < 1e-5
    for ours, calls in results:
        assert calls == {"_push": 2 * 2 * steps, "_pull": 2 * steps}
        copies = [count for step in ours for count in step.replicas]
        assert sum(count > 0 for count in copies) >= 0.9 * len(copies)
        assert all(sum(step.moved) > 0 for step in ours)
        assert fmean(x for step in ours for x in step.after) < 1.1 < fmean(x for step in ours for x in step.before)


def body_recompute(
    group: dist.ProcessGroup, rank: int, changes: dict[str, Any], num: int, attention: bool, early_stop: bool
) -> tuple[list[Step], int]:
    """Training with regions, and how often weights travel in a step."""
    training = Training(group, changes, num)
    region = functools.partial(checkpoint, use_reentrant=False, context_fn=recompute_context_fn)
    for layer in training.stack.layers:
        layer.recompute_in(region, attention=attention)  # type: ignore[operator]
    pushes = 0
    real = GroupTransport._push

    def count(self: GroupTransport, *args: Any) -> Any:
        nonlocal pushes
        pushes += 1
        return real(self, *args)

    with set_checkpoint_early_stop(early_stop), mock.patch.object(GroupTransport, "_push", count):
        steps = [training.step(number) for number in range(3)]
    training.runtime.check_returned()
    return steps, pushes


@pytest.mark.parametrize("early_stop", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize(("num", "changes"), [(1, ON), (2, ON), (2, JOINT)])
def test_recompute_takes_over_the_plan_and_copies_weights_once_more(
    pool: RankPool, num: int, changes: dict[str, Any], attention: bool, early_stop: bool
) -> None:
    theirs = pool.run(train, {}, 3, num)
    results = pool.run(body_recompute, changes, num, attention, early_stop)
    assert largest_difference([ours for ours, _ in results], theirs) < 1e-5
    shared = 1 if changes is JOINT else num
    assert {pushes for _, pushes in results} == {3 * 2 * 2 * shared}, "forward, and the second pass; not a third time"
    assert all(count > 0 for step in results[0][0] for count in step.replicas)


def body_region_without_replay(group: dist.ProcessGroup, rank: int) -> list[Step]:
    """A checkpoint that replays nothing: routers choose, and the runtime plans, once more."""
    training = Training(group, ON)
    region = functools.partial(checkpoint, use_reentrant=False)
    for layer in training.stack.layers:
        layer.recompute_in(region)  # type: ignore[operator]
    return [training.step(number) for number in range(2)]


def test_a_second_pass_may_plan_for_itself(pool: RankPool) -> None:
    assert largest_difference(pool.run(body_region_without_replay), pool.run(train, {}, 2)) < 1e-5


def body_far_apart(group: dist.ProcessGroup, rank: int) -> float:
    """Two forwards, then their backwards, the older one first: as a pipeline does."""
    results = []
    for changes in (ON, {}):
        training = Training(group, changes)
        losses = [training.stack(training.inputs(number, 0))[0][0].square().mean() for number in (0, 5)]
        for loss in losses:
            loss.backward()
        results.append([p.grad for p in training.stack.parameters()])
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-6)) for a, b in zip(*results, strict=True))


def test_backwards_may_come_in_any_order(pool: RankPool) -> None:
    assert max(pool.run(body_far_apart)) < 1e-5


def body_steady(
    group: dist.ProcessGroup, rank: int, changes: dict[str, Any], recompute: bool, ahead: bool
) -> list[list[int]]:
    """What is left behind steps 3 and 12: lanes, free ones, tickets, transfers, communications in flight, leases."""
    close_dispatchers(group)  # lanes of other tests go with them
    model = small_stack(group, changes, dense=(False, True, False))
    for layer in model.layers:
        layer.recompute_in(recompute_region if recompute else None)  # type: ignore[operator]
    lanes, seen = moe_layers(model)[0].dispatcher.lanes, []
    with host_ahead(ahead):
        run_both_ways(model, rank, 2, CPU)  # torch sets things up, and leaves a cycle
        gc.collect()
        gc.disable()  # nothing may need the collector to go
        for number in range(1, 13):
            run_both_ways(model, rank, 2, CPU)
            if number in (3, 12):
                live = Counter(map(type, gc.get_objects()))
                seen.append([lanes.num_lanes, lanes.num_free, *(live[kind] for kind in PASSING)])
        gc.enable()
    return seen


@pytest.mark.parametrize(("recompute", "ahead"), [(False, True), (True, False)])
@pytest.mark.parametrize("changes", [ON, JOINT], ids=["alone", "together"])
def test_nothing_is_left_of_a_step(pool: RankPool, changes: dict[str, Any], recompute: bool, ahead: bool) -> None:
    for seen in pool.run(body_steady, changes, recompute, ahead):
        assert seen == [[2, 2, 0, 0, 0, 0]] * 2


def body_other_numbers(group: dist.ProcessGroup, rank: int, changes: dict[str, Any]) -> None:
    configured = small_stack(group, changes | dict(num_micro_batches=2))
    without = small_stack(group)
    for num in (1, 3, 2, 4):  # of other lengths each, one after the other
        got, want = (run_both_ways(model, rank, num, CPU) for model in (configured, without))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()) if b.numel() else 0.0)


@pytest.mark.parametrize("changes", [ON, JOINT], ids=["alone", "together"])
def test_other_numbers_of_micro_batches_than_configured(pool: RankPool, changes: dict[str, Any]) -> None:
    """InternLM/xtuner#2056: slots are pooled, and there are as many sets as micro-batches are under way."""
    pool.run(body_other_numbers, changes)

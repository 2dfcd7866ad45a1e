"""Replicas switched on in a layer: everything but the time equals the run without, and what is left out shows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep import close_dispatchers
from moe_ep.replica import lanes
from moe_ep.replica.flight import Flight
from moe_ep.replica.lanes import Phase
from moe_ep.replica.messages import GroupTransport
from moe_ep.replica.transport import InFlight
from moe_ep.testing.ranks import RankPool
from moe_ep.tracing import parse_place
from tests.ranks.shared_slots import SharedTransport, wait_for
from tests.ranks.small_runtime import Step, Training, largest_difference, train

ON = dict(replica=dict(slots=2))
STEPS = 20
CONFIGS: dict[str, dict[str, Any]] = {
    "all2all": {},
    "agrs": dict(dispatcher="agrs"),
    "all2all loop sigmoid": dict(experts="loop", router="sigmoid", bias_update_rate=0.001),
    "agrs grouped": dict(dispatcher="agrs", router="grouped", num_groups=2, top_k=2),
    "all2all fixed rows": dict(replica=dict(slots=4, planner="fixed_rows")),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=120) as ranks:
        yield ranks


def check_replicas_worked(steps: list[Step]) -> None:
    """Copies in 9 of 10 steps and layers, rows on them, ranks more even than without them."""
    copies = [count for step in steps for count in step.replicas]
    assert sum(count > 0 for count in copies) >= 0.9 * len(copies)
    assert all(moved > 0 for step in steps for moved, count in zip(step.moved, step.replicas, strict=True) if count)
    before, after = ([x for step in steps for x in getattr(step, name)] for name in ("before", "after"))
    assert all(a <= b for a, b in zip(after, before, strict=True))
    assert fmean(after) < 1.1 < 1.3 < fmean(before)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("all2all", 2), ("all2all", 4), ("agrs", 2), pytest.param("agrs", 4, marks=pytest.mark.slow)],
)
def test_training_equals_training_without(pool: RankPool, name: str, num_ranks: int) -> None:
    ours = pool.run(train, CONFIGS[name] | ON, STEPS, num_ranks=num_ranks)
    theirs = pool.run(train, CONFIGS[name], STEPS, num_ranks=num_ranks)
    assert largest_difference(ours, theirs) < 1e-5
    check_replicas_worked(ours[0])


@pytest.mark.parametrize("name", ["all2all loop sigmoid", "agrs grouped", "all2all fixed rows"])
def test_with_other_experts_routers_and_planners(pool: RankPool, name: str) -> None:
    ours = pool.run(train, ON | CONFIGS[name], 6)
    theirs = pool.run(train, CONFIGS[name] | dict(replica={}), 6)
    assert largest_difference(ours, theirs) < 1e-5
    check_replicas_worked(ours[0])


def places_in_a_trace(group: dist.ProcessGroup, rank: int, joint: bool) -> list[tuple[Any, ...]]:
    training = Training(group, dict(replica=dict(slots=2, joint=joint)), num=2, layers=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        training.step(0)
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [tuple(place) for event in events if (place := parse_place(event.name)) is not None]


@pytest.mark.parametrize("joint", [False, True])
def test_copying_stands_in_a_trace(pool: RankPool, joint: bool) -> None:
    for places in pool.run(places_in_a_trace, joint, num_ranks=2):
        for micro_batch in (0,) if joint else (0, 1):
            mine = [place for place in places if place[2:4] == (0, micro_batch)]
            found = {(stage, role, backward) for role, stage, *_, backward in mine}
            assert found >= {(name, role, False) for name in FORWARD_ONES for role in ("launch", "wait")}
            assert found >= {(name, role, True) for name in BACKWARD_ONES for role in ("launch", "wait")}
            assert sum(place[0] == "launch" and place[1] == "weight_sync" for place in mine) == 2
            order = [place[:2] + place[4:] for place in mine]
            for way in (HIDDEN[0], HIDDEN[2]) if joint else HIDDEN:  # together, the weights come for the last one
                assert [step for step in order if step in way] == list(way), "launched early, waited for late"


FORWARD_ONES = ("exchange of loads", "comparison of plans", "weight_sync")
BACKWARD_ONES = ("weight_sync", "grad_reduce")
HIDDEN: tuple[tuple[tuple[str, str, bool], ...], ...] = (
    (("launch", "weight_sync", False), ("launch", "dispatch", False), ("wait", "dispatch", False),
     ("wait", "weight_sync", False)),
    (("launch", "weight_sync", True), ("launch", "combine", True), ("wait", "combine", True),
     ("wait", "weight_sync", True)),
    (("launch", "dispatch", True), ("launch", "grad_reduce", True), ("wait", "dispatch", True),
     ("wait", "grad_reduce", True)),
)  # fmt: skip


def turns(group: dist.ProcessGroup, rank: int, joint: bool) -> list[str]:
    """The turns of attention and of the reduction in one step of two micro-batches."""
    training = Training(group, dict(replica=dict(slots=2, joint=joint)), num=2, layers=1)
    log: list[str] = []
    training.stack.layers[0].log = log  # type: ignore[assignment]

    def noting(name: str, said: str) -> Any:
        real = getattr(Flight, name)

        def call(self: Flight, *args: Any) -> Any:
            log.append(said)
            return real(self, *args)

        return mock.patch.object(Flight, name, call)

    with noting("reduce", "launch"), noting("wait_grads", "wait"):
        training.step(0)
    return [each for each in log if each in ("launch", "wait") or each.startswith("d")]


TURNS = {
    False: "dexperts 0.1, launch, dexperts 0.0, launch, dattention 0.1, wait, dattention 0.0, wait",
    True: "dexperts 0.1, dexperts 0.0, launch, dattention 0.1, dattention 0.0, wait",
}


@pytest.mark.parametrize("joint", [False, True])
def test_gradients_travel_behind_the_backward_of_attention(pool: RankPool, joint: bool) -> None:
    for taken in pool.run(turns, joint, num_ranks=2):
        assert ", ".join(taken) == TURNS[joint]


def mutant(group: dist.ProcessGroup, rank: int, name: str, steps: int) -> list[Step]:
    def kept(self: GroupTransport, *args: Any) -> InFlight:
        return InFlight(lambda: None)

    def twice(self: GroupTransport, plan: Any, slots: Any, masters: Any) -> InFlight:
        real(self, plan, [grad.clone() for grad in slots], masters).wait()
        return real(self, plan, slots, masters)

    def not_again(self: Flight, masters: Any) -> None:
        self.phase = Phase.BACKWARD

    real = GroupTransport._pull
    planted = {
        "not reduced": (GroupTransport, "_pull", kept),
        "reduced twice": (GroupTransport, "_pull", twice),
        "not brought again": (Flight, "bring", not_again),
    }
    with mock.patch.object(*planted[name]):
        return train(group, rank, ON, steps)


@pytest.mark.parametrize("name", ["not reduced", "reduced twice", "not brought again"])
def test_what_is_left_out_shows(pool: RankPool, name: str) -> None:
    theirs = pool.run(train, {}, 4, num_ranks=2)
    assert largest_difference(pool.run(mutant, name, 4, num_ranks=2), theirs) > 1e-3


def one_sided(group: dist.ProcessGroup, rank: int, folder: str, missing: str, late: str, steps: int) -> list[Step]:
    """Slots in shared memory; rank 0 is late to move what it moves, or rank 1 late to compute.

    With both fences they are late by some time. Where one is left out, by as long as it takes: rank 0 moves its first
    weights when the experts of rank 1 have run, and rank 1 has its first gradients when rank 0 has read them.
    """
    left, pulled = Path(folder) / "left-1", Path(folder) / "moved-pull-0"
    leave, reduce = Flight.leave, Flight.reduce

    def before() -> None:
        if late == "homes" and rank == 0:
            wait_for(left) if missing else time.sleep(0.05)

    def make(kind: str, group: dist.ProcessGroup, slots: int, like: Any, faults: Any) -> SharedTransport:
        return SharedTransport(group, Path(folder), slots, like, missing, before)

    def leave_noted(self: Flight) -> None:
        leave(self)
        (Path(folder) / f"left-{rank}").touch()

    def reduce_late(self: Flight, *args: Any) -> None:
        if late == "experts" and rank == 1:
            wait_for(pulled) if missing else time.sleep(0.05)
        reduce(self, *args)

    close_dispatchers(group)  # and the slots of other tests with them
    try:
        with (
            mock.patch.object(lanes, "make_transport", make),
            mock.patch.object(Flight, "leave", leave_noted),
            mock.patch.object(Flight, "reduce", reduce_late),
        ):
            training = Training(group, ON)
            for layer in training.stack.layers if late == "experts" and rank > 0 else []:
                layer.log, layer.nap_s = [], 0.01  # type: ignore[assignment]
            return [training.step(number) for number in range(steps)]
    finally:
        close_dispatchers(group)


@pytest.mark.parametrize(("missing", "late"), [("", "homes"), ("", "experts"), ("exit", "homes"), ("entry", "experts")])
def test_each_fence_is_needed(pool: RankPool, tmp_path: Path, missing: str, late: str) -> None:
    theirs = pool.run(train, {}, 3, num_ranks=2)
    difference = largest_difference(pool.run(one_sided, str(tmp_path), missing, late, 3, num_ranks=2), theirs)
    assert (difference > 1e-3) == bool(missing)
    assert missing or difference < 1e-5

"""Replicas where no host reads a plan, as with kernels over peer memory: the same code on CPU ranks, slots one-sided.

Kernels alone are left out: the planner is the one in torch, and slots lie in memory that the processes share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep import MoEError, close_dispatchers, moe_layers
from moe_ep.config import ReplicaConfig
from moe_ep.faults import Fault
from moe_ep.replica import Plan, exchange, planning, runtime
from moe_ep.replica import lanes as slot_lanes
from moe_ep.replica.planners import LARGEST_TOTAL
from moe_ep.replica.runtime import ReplicaRuntime
from moe_ep.testing.ranks import RankPool
from tests.ranks.shared_slots import SharedTransport
from tests.ranks.small_runtime import Step, Training, largest_difference, train

ON = dict(replica=dict(slots=2))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=90) as ranks:
        yield ranks


@contextlib.contextmanager
def nobody_reads(group: dist.ProcessGroup, folder: str, flip: bool = False) -> Iterator[list[int]]:
    """Gives each micro-batch in flight a transport of its own; `flip`: this rank plans from other loads."""
    close_dispatchers(group)
    lanes: list[int] = []

    def make(kind: str, group: dist.ProcessGroup, slots: int, like: Any, faults: Any) -> SharedTransport:
        lanes.append(len(lanes))
        place = Path(folder) / f"lane{len(lanes)}"
        place.mkdir(exist_ok=True)
        return SharedTransport(group, place, slots, like, "")

    def by_kernels(replica: ReplicaConfig, load: torch.Tensor) -> Plan:
        return planning.plan(load.flip(1).contiguous() if flip else load, replica.slots, tolerance=10)

    with (
        mock.patch.object(slot_lanes, "make_transport", make),
        mock.patch.object(runtime, "plan_by_kernels", by_kernels),
        mock.patch.object(ReplicaRuntime, "_on_host", lambda self, lane: False),
    ):
        yield lanes
    close_dispatchers(group)


def body_training(group: dist.ProcessGroup, rank: int, folder: str, num: int) -> tuple[list[Step], int]:
    with nobody_reads(group, folder) as lanes:
        training = Training(group, ON, num)
        steps = [training.step(number) for number in range(4)]
        for layer in moe_layers(training.stack):
            layer.dispatcher.raise_if_faulted()
        training.runtime.check_returned()
        return steps, len(lanes)


@pytest.mark.parametrize("num", [1, 2, 3])
def test_training_equals_training_without(pool: RankPool, tmp_path: Path, num: int) -> None:
    results = pool.run(body_training, str(tmp_path), num)
    assert largest_difference([steps for steps, _ in results], pool.run(train, {}, 4, num)) < 1e-5
    for steps, lanes in results:
        assert lanes == num, "a set of slots for each micro-batch that interleaves"
        assert all(count > 0 for step in steps for count in step.replicas)


def body_other_plan(group: dist.ProcessGroup, rank: int, folder: str) -> str:
    with nobody_reads(group, folder, flip=rank == 1), mock.patch("moe_ep.replica.reroute._check_counts"):
        training = Training(group, ON)
        training.stack(training.inputs(0, 0))
        try:
            moe_layers(training.stack)[0].dispatcher.raise_if_faulted()
        except MoEError as err:
            return f"{type(err).__name__}: {err}"
    return "nothing"


def test_a_plan_that_differs_is_found_with_the_next_one(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(body_other_plan, str(tmp_path)):
        assert said.startswith("PlanError: layer 1, micro-batch 0: the replica plan of rank 1 differs from rank 0's")


def body_failing_router(group: dist.ProcessGroup, rank: int, folder: str) -> list[str]:
    """Rank 1 fails before it has a routing: it goes along without tokens, so that nobody waits for it."""
    said, kept = [], []
    with nobody_reads(group, folder):
        training = Training(group, ON)
        layer = moe_layers(training.stack)[0]
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
        for wrong in (True, False):
            given = x[:, :5] if wrong and rank == 1 else x
            try:
                layer(given)[0].sum().backward()
                said.append("nothing")
            except MoEError as err:
                said.append(f"{type(err).__name__}: {err}")
                kept.append(err)  # and with it the frames of the call
    return said


def test_a_rank_that_fails_before_its_routing_is_waited_for_by_nobody(pool: RankPool, tmp_path: Path) -> None:
    (other, then), (own, then_own) = pool.run(body_failing_router, str(tmp_path))
    assert own.startswith("InputError: layer 0, micro-batch 0: x must be [..., 16]")
    assert other.startswith("PeerError: ") and "rank 1 reported a fault" in other
    assert then == then_own == "nothing"


def test_loads_that_nobody_can_plan_are_zero_and_a_fault() -> None:
    good = torch.tensor([[3, 4], [5, 6]])
    load, (code, _) = planning.bounded(good)
    assert torch.equal(load, good) and code == Fault.NONE
    for bad in (
        torch.tensor([[LARGEST_TOTAL, 1], [0, 0]]),
        torch.tensor([[-1, 4], [0, 0]]),
        torch.tensor([[2**62] * 4]),
    ):
        load, (code, value) = planning.bounded(bad)
        assert not load.any() and code == Fault.TOO_MANY_ROUTES and value >= 0
    assert planning.bounded(torch.tensor([[LARGEST_TOTAL, 0]]))[1][0] == Fault.NONE


def test_hashes_that_differ_name_the_first_rank() -> None:
    assert exchange.sums_status(torch.tensor([7, 7, 7])).tolist() == [Fault.NONE, 0]
    assert exchange.sums_status(torch.tensor([7, 7, 8, 9])).tolist() == [Fault.OTHER_PLAN, 2]

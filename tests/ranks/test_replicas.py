"""Replicas between processes: messages over gloo, and training with them beside training without."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from statistics import fmean

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moe_ep.errors import PeerError, PlanError
from moe_ep.replica import plan
from moe_ep.replica.messages import GroupTransport
from moe_ep.testing.ranks import RankPool
from tests.ranks.small_replicas import LAYERS, E, H, Run, S, Step, T, largest_difference, messages, train


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_messages_over_gloo(pool: RankPool, num_ranks: int, dtype: torch.dtype) -> None:
    pool.run(messages, dtype, num_ranks=num_ranks)


def disagreement(group: dist.ProcessGroup, rank: int) -> str:
    load = torch.ones(4, 8, dtype=torch.int32)
    load[0, 0] = 50 + (rank == 3)
    try:
        GroupTransport(group).agree(plan(load, 2))
    except PlanError as err:
        return str(err)
    return "no error"


def test_a_plan_that_differs_is_an_error_on_every_rank(pool: RankPool) -> None:
    said = pool.run(disagreement)
    assert len(set(said)) == 1
    assert said[0].startswith(
        "the replica plans of ranks [3] differ from rank 0's; all ranks must plan from the same load"
    )


@pytest.mark.parametrize("name", ["all2all", "agrs"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_training_with_replicas_equals_training_without(pool: RankPool, name: str, num_ranks: int) -> None:
    ours = pool.run(train, name, S, 20, num_ranks=num_ranks)
    theirs = pool.run(train, name, 0, 20, num_ranks=num_ranks)
    assert largest_difference(ours, theirs) < 1e-5
    assert sum(min(step.replicas) > 0 for step in ours[0]) >= 0.9 * 20
    for number, step in enumerate(ours[0]):
        rows = [sum(rank[number].rows[layer] for rank in ours) for layer in range(LAYERS)]
        assert all((count > 0) == (made > 0) for count, made in zip(rows, step.replicas, strict=True))
    before, after = ([value for step in ours[0] for value in getattr(step, name)] for name in ("before", "after"))
    assert all(a <= b for a, b in zip(after, before, strict=True))
    assert fmean(after) < 1.1 < 1.3 < fmean(before)


@pytest.mark.parametrize("mutant", ["not reduced", "reduced twice", "not brought again"])
def test_what_is_left_out_shows(pool: RankPool, mutant: str) -> None:
    theirs = pool.run(train, "all2all", 0, 4, num_ranks=2)
    assert largest_difference(pool.run(train, "all2all", S, 4, mutant, num_ranks=2), theirs) > 1e-3


def evaluate(group: dist.ProcessGroup, rank: int) -> tuple[float, float]:
    """A forward without gradients, then a training step, on the same buffers."""
    run, plain = Run(group, "all2all", S), Run(group, "all2all", 0)
    x_TH, step = torch.randn(T, H, generator=torch.Generator().manual_seed(rank)), Step()
    bias_E = torch.zeros(E).index_fill_(0, torch.tensor([1]), 2.0)
    with torch.no_grad():
        outputs = [each.layers[0](each, x_TH, bias_E, step) for each in (run, plain)]
    assert not outputs[0].requires_grad
    assert step.replicas[0] > 0
    return float((outputs[0] - outputs[1]).abs().max()), run.step(0).loss


def test_evaluation_between_steps(pool: RankPool) -> None:
    results = pool.run(evaluate, num_ranks=2)
    first = pool.run(train, "all2all", S, 1, num_ranks=2)
    for rank, (difference, loss) in enumerate(results):
        assert difference < 1e-6
        assert loss == first[rank][0].loss


def grouped(group: dist.ProcessGroup, rank: int, slots: int, sharded: bool) -> list[Step]:
    """Two groups of two expert-parallel ranks; equal experts are on ranks that differ in dp."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    run = Run(mesh.get_group("ep"), "all2all", slots, dp=mesh["dp"], sharded=sharded)
    return [run.step(number) for number in range(6)]


@pytest.mark.parametrize("sharded", [False, True])
def test_two_groups_of_ranks_with_the_same_experts(pool: RankPool, sharded: bool) -> None:
    """Gradients are reduced once over replicas and once over the groups, also where FSDP2 holds the masters."""
    ours, theirs = pool.run(grouped, S, sharded), pool.run(grouped, 0, False)
    assert largest_difference(ours, theirs) < 1e-5
    assert all(step.copies_equal for steps in ours for step in steps)
    assert all(min(step.replicas) > 0 for steps in ours for step in steps)


PHASES = ["agree", "weight_sync", "grad_reduce"]


def absent(group: dist.ProcessGroup, rank: int) -> str:
    """Each phase on two ranks of its own: the second one lives on but does not come; the group waits for a moment."""
    phase, first = PHASES[rank // 2], rank // 2 * 2
    dist.barrier(group=group)
    short = dist.new_group([first, first + 1], timeout=timedelta(seconds=2), use_local_synchronization=True)
    end, made = GroupTransport(short), plan(torch.tensor([[9, 1], [9, 1]]), 1)
    if rank > first:
        return ""
    masters, slots = [torch.ones(1, 4)], [torch.zeros(1, 4)]
    with pytest.raises(PeerError) as caught:
        if phase == "agree":
            end.agree(made)
        elif phase == "weight_sync":
            end.weight_sync(made, masters, slots).wait()
        else:
            end.grad_reduce(made, slots, masters).wait()
    return str(caught.value)


def test_a_rank_that_does_not_come_is_an_error_that_names_the_operation() -> None:
    with RankPool(2 * len(PHASES), timeout_s=30) as pairs:
        said = pairs.run(absent)
    for phase, message in zip(PHASES, said[::2], strict=True):
        assert ("agreement about a replica plan" if phase == "agree" else f"{phase} of replicas") in message
        assert "took longer than the group's timeout" in message, phase

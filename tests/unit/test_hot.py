"""Which experts of a rank are reduced: those with copies, in fewer rows, and gradients that only they change."""

from __future__ import annotations

import random

import pytest
import torch

from moe_ep.replica import Plan, plan
from moe_ep.replica.hot import hot_experts
from moe_ep.replica.lanes import SlotLane
from moe_ep.replica.simulated import LocalTransport, local_transports
from moe_ep.replica.transport import SlotBuffers, copies
from moe_ep.replica.with_replicas import WithReplicas
from tests.unit.test_replica_transport import in_threads

CPU = torch.device("cpu")


def some_plan(seed: int, num_ranks: int = 3, num_local: int = 8, slots: int = 2) -> Plan:
    rng = random.Random(seed)
    totals = [rng.randrange(1, 30) * (12 if rng.random() < 0.2 else 1) for _ in range(num_ranks * num_local)]
    return plan(torch.tensor([totals] * num_ranks), slots)


@pytest.mark.parametrize("seed", range(20))
def test_copies_are_counted_among_those_of_their_home(seed: int) -> None:
    made = some_plan(seed)
    found = [hot_experts(made, rank, CPU) for rank in range(3)]
    for hot in found:
        assert hot.locals_B is not None and len(hot.locals_B) == 4 == len(set(hot.locals_B.tolist()))
        assert torch.equal(hot.plan.instances, found[0].plan.instances), "the same on every rank"
    before, after = copies(made), copies(hot.plan)
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert (old.home, old.rank, old.slot) == (new.home, new.rank, new.slot), "in the same order"
        assert found[old.home].locals_B.tolist()[new.local] == old.local  # type: ignore[union-attr]


def test_where_all_may_have_copies_nothing_is_renumbered() -> None:
    made = some_plan(0, num_local=4)
    assert hot_experts(made, 1, CPU) == (made, None)


def test_without_copies_there_is_nothing_to_add() -> None:
    made = plan(torch.ones(2, 8, dtype=torch.int32), 1)
    hot = hot_experts(made, 1, CPU)
    assert hot.locals_B is not None and hot.locals_B.tolist() == [0]
    assert hot.plan.instances.tolist() == [[-1], [-1]]


LOAD = torch.tensor([[1, 1, 9, 1, 1, 1, 1, 1]] * 2)  # expert 2 of rank 0 gets a replica on rank 1


def backward_of(end: LocalTransport, fresh: bool, beside: bool) -> tuple[list[float], list[float], bool, list[int]]:
    """Gradients of a master and of a weight that shares its gradient; whether the first is what experts made; hot."""
    master = torch.ones(4, 1, dtype=torch.bfloat16, requires_grad=True)
    other = torch.zeros(4, 1, dtype=torch.bfloat16, requires_grad=True)
    made: list[int] = []
    replicas = WithReplicas([master])
    replicas.flight.fresh_grads = fresh
    replicas.sync(plan(LOAD, 1), SlotLane(end, SlotBuffers(1, [master])))
    masters, slots = replicas.take()
    used = masters[0] + other if beside else masters[0] * 1
    masters[0].register_hook(lambda grad: made.append(grad.data_ptr()))
    y = replicas.again((3 * used.float()).sum() + 5 * slots[0].float().sum())
    kept = replicas.flight
    y.backward()
    assert master.grad is not None
    same = master.grad.data_ptr() == made[0]
    others = [] if other.grad is None else other.grad.flatten().tolist()
    return master.grad.flatten().tolist(), others, same, [] if kept.hot is None else kept.hot.tolist()


@pytest.mark.parametrize("fresh", [False, True])
def test_only_experts_with_copies_get_another_gradient(fresh: bool) -> None:
    """In place where the experts say that nobody else holds the gradient they made."""
    first, second = in_threads(local_transports(2, 10), lambda end: backward_of(end, fresh, False))
    assert first == ([3, 3, 8, 3], [], fresh, [2])
    assert second == ([3, 3, 3, 3], [], fresh, [0])


def test_a_gradient_that_another_weight_shares_is_left_alone() -> None:
    first, _ = in_threads(local_transports(2, 10), lambda end: backward_of(end, False, True))
    assert first[:2] == ([3, 3, 8, 3], [3, 3, 3, 3])  # type: ignore[index]

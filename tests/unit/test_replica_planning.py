"""What a configuration says is what is planned: slots, planner, smallest quota, one placement, and the tolerance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_ep.config import ReplicaConfig
from moe_ep.errors import PlanError
from moe_ep.replica import Plan
from moe_ep.replica.planning import make_plans
from tests.unit.test_replica_plan import from_totals


def planned(replica: ReplicaConfig, *totals: list[int]) -> list[Plan]:
    loads: list[Tensor] = [from_totals(rows, 2) for rows in totals]
    return make_plans(replica, loads, loads, kernels=False)


def test_each_key_is_kept_to() -> None:
    hot = [100, 20, 30, 10]
    (made,) = planned(ReplicaConfig(slots=2), hot)
    assert made.slots == 2 and made.rank_load().tolist() == [80, 80]
    (made,) = planned(ReplicaConfig(slots=2, min_quota=60), hot)
    assert made.quota.tolist() == [[40, 60], [20, 0], [0, 30], [0, 10]]
    (made,) = planned(ReplicaConfig(slots=2, planner="fixed_rows"), [811, 0, 810, 0])
    assert made.rank_load().tolist() == [811, 810] and int(made.num_replicas()) == 0
    (made,) = planned(ReplicaConfig(slots=2, planner="fixed_rows"), [815, 0, 805, 0])
    assert made.rank_load().tolist() == [810, 810], "equal shares, however near they were"


def test_what_lies_within_a_hundredth_is_even_enough() -> None:
    (near,) = planned(ReplicaConfig(slots=2), [505, 505, 500, 490])
    (far,) = planned(ReplicaConfig(slots=2), [515, 505, 490, 490])
    assert int(near.num_replicas()) == 0 and near.rank_load().tolist() == [1010, 990]
    assert int(far.num_replicas()) == 1 and int(far.max_load) == 1010, "one hundredth above the mean is reached"


def test_one_placement_serves_micro_batches_with_other_popular_experts() -> None:
    """One copy evens out the sum; the micro-batch that it does not help gets one of its own."""
    for made in planned(ReplicaConfig(slots=2, joint=True), [100, 0, 0, 0], [0, 100, 0, 0]):
        assert made.instances.tolist() == [[-1, -1], [0, 1]] and made.rank_load().tolist() == [50, 50]


def test_one_placement_keeps_to_the_smallest_quota_too() -> None:
    first, second = planned(ReplicaConfig(slots=1, joint=True), [60, 30, 30, 10], [50, 30, 30, 20])
    assert torch.equal(first.instances, second.instances) and int(first.num_replicas()) == 1
    first, second = planned(ReplicaConfig(slots=1, joint=True, min_quota=200), [60, 30, 30, 10], [50, 30, 30, 20])
    assert int(first.num_replicas()) == int(second.num_replicas()) == 0


def test_a_load_that_cannot_be_planned_is_refused() -> None:
    with pytest.raises(PlanError, match="beyond 2\\^31 - 1"):
        planned(ReplicaConfig(slots=1), [2**31 - 1, 2, 0, 0])
    for joint in (False, True):
        load = torch.tensor([[1, -1], [0, 0]])
        with pytest.raises(PlanError, match="a load is -1"):
            make_plans(ReplicaConfig(slots=1, joint=joint), [load], [load], kernels=False)

"""Rerouting realises a plan: every route keeps its expert, and each instance gets its quota to the row."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_ep.errors import InputError, PlanError
from moe_ep.load import expert_load
from moe_ep.replica import Plan, plan, reroute
from moe_ep.replica.device import plan_on_device, reroute_on_device
from moe_ep.replica.reroute import split
from moe_ep.routing import Routing


def routing_of(ids: Tensor, num_experts: int) -> Routing:
    weights = torch.arange(ids.numel(), dtype=torch.float32).view(ids.shape) + 1
    return Routing(expert_ids=ids, weights=weights, num_experts=num_experts)


def loads_of(all_ids: list[Tensor], num_experts: int) -> Tensor:
    return torch.stack([expert_load(ids, num_experts) for ids in all_ids]).int()


@st.composite
def tokens(draw: st.DrawFn) -> tuple[list[Tensor], int]:
    """Ids of each rank, of skewed popularity, with unequal and zero T, missing routes and duplicates in a top-k."""
    num_ranks, num_local = draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8])), draw(st.integers(1, 3))
    num_experts = num_ranks * num_local
    rng = random.Random(draw(st.integers(0, 2**32)))
    power, top_k, missing = draw(st.sampled_from([0.0, 1.0, 3.0])), draw(st.integers(1, 4)), draw(st.floats(0, 0.5))
    popularity = [(1 + rng.randrange(num_experts)) ** -power for _ in range(num_experts)]

    def one() -> int:
        return -1 if rng.random() < missing else rng.choices(range(num_experts), popularity)[0]

    counts = [rng.choice([0, 1, rng.randrange(40)]) for _ in range(num_ranks)]
    ids = [torch.tensor([[one() for _ in range(top_k)] for _ in range(t)]).view(t, top_k).long() for t in counts]
    return ids, num_experts


def logical(made: Plan, physical: Tensor) -> Tensor:
    """The expert that each physical id computes, by the definition of the numbering."""
    per_rank = made.num_local + made.slots
    table = []
    for rank, filled in enumerate(made.instances.tolist()):
        table += [*range(rank * made.num_local, (rank + 1) * made.num_local), *filled]
    assert len(table) == per_rank * made.num_ranks
    return torch.where(physical >= 0, torch.tensor(table)[physical], -1)


def in_order(ids: Tensor, dest: Tensor, rows_ER: Tensor, rank: int) -> bool:
    """The rows of each expert, by token and then by k: its own rank's first, then the others' by rank."""
    own_first = [rank, *(other for other in range(rows_ER.shape[1]) if other != rank)]
    expected = [torch.tensor(own_first).repeat_interleave(rows[own_first]) for rows in rows_ER]
    return all(torch.equal(dest[ids == expert], wanted) for expert, wanted in enumerate(expected))


@settings(max_examples=150)
@given(tokens(), st.integers(0, 3), st.sampled_from([1, 1, 5]))
def test_every_instance_gets_its_quota_and_every_route_its_expert(
    case: tuple[list[Tensor], int], slots: int, min_quota: int
) -> None:
    all_ids, num_experts = case
    made = plan(loads_of(all_ids, num_experts), slots, min_quota)
    per_rank = made.num_local + slots
    realised = torch.zeros((num_experts, made.num_ranks), dtype=torch.int64)
    for rank, ids in enumerate(all_ids):
        routing = routing_of(ids, num_experts)
        moved = reroute(routing, made, rank)
        assert torch.equal(logical(made, moved.expert_ids), ids)
        assert moved.num_experts == made.num_physical
        assert moved.weights is routing.weights
        here = torch.zeros_like(realised)
        valid = ids >= 0
        here.index_put_((ids[valid], moved.expert_ids[valid] // per_rank), torch.tensor(1), accumulate=True)
        assert torch.equal(here, split(made, rank))
        assert in_order(ids, moved.expert_ids // per_rank, here, rank)
        own = torch.minimum(made.load[rank], made.quota[:, rank])
        assert torch.equal(here[:, rank], own.long())  # as much as possible stays
        realised += here
    assert torch.equal(realised, made.quota.long())


@settings(max_examples=100)
@given(st.integers(1, 9), st.integers(0, 2**32))
def test_both_margins_of_any_quotas_are_exact(num_ranks: int, seed: int) -> None:
    """Quotas that no planner makes, too: drawn freely, with the sums of the load."""
    rng = random.Random(seed)
    load = torch.tensor([[rng.choice([0, 1, rng.randrange(50)]) for _ in range(num_ranks)] for _ in range(num_ranks)])
    quota = torch.zeros((num_ranks, num_ranks), dtype=torch.int32)
    for expert, rows in enumerate(load.sum(0).tolist()):
        for rank in rng.choices(range(num_ranks), k=rows):
            quota[expert, rank] += 1
    made = Plan(
        load=load.int(),
        quota=quota,
        instances=torch.full((num_ranks, num_ranks), -1, dtype=torch.int32),
        max_load=quota.sum(0).amax(),
        exact=torch.tensor(False),
    )
    parts = torch.stack([split(made, rank) for rank in range(num_ranks)])
    assert torch.equal(parts.sum(2), load)
    assert torch.equal(parts.sum(0), quota.long())
    assert bool((parts >= 0).all())


def test_64_sources_of_one_row_each_miss_no_quota() -> None:
    """Rounding each source's rows by itself would send 63 of the 64 rows to one of the two instances."""
    load = torch.zeros((64, 64), dtype=torch.int32)
    load[:, 0] = 1
    made = plan(load, 1)
    assert made.rank_load().tolist() == [1] * 64
    two = plan(load, 1, min_quota=32)
    assert sorted(two.quota[0][two.quota[0] > 0].tolist()) == [32, 32]
    assert torch.equal(torch.stack([split(two, rank) for rank in range(64)]).sum(0)[0], two.quota[0].long())


def test_the_same_input_gives_the_same_instances() -> None:
    ids = torch.tensor([[0, 1], [0, 0], [-1, 0], [3, 0]])
    made = plan(loads_of([ids, ids.flip(0)], 4), 1)
    first = reroute(routing_of(ids, 4), made, 0).expert_ids
    assert torch.equal(first, reroute(routing_of(ids.clone(), 4), made, 0).expert_ids)
    strided = torch.empty(4, 4, dtype=torch.int64)[:, ::2].copy_(ids)
    assert torch.equal(first, reroute(routing_of(strided, 4), made, 0).expert_ids)


def test_gradients_reach_the_weights_of_the_logical_router() -> None:
    ids = torch.tensor([[0, 1], [0, 0], [-1, 0]])
    weights = torch.rand(3, 2, requires_grad=True)
    made = plan(loads_of([ids, ids], 2), 1)
    moved = reroute(Routing(expert_ids=ids, weights=weights, num_experts=2), made, 0)
    assert (moved.expert_ids != ids).any()
    (moved.weights * torch.tensor([[1.0, 2], [3, 4], [5, 6]])).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [[1, 2], [3, 4], [5, 6]]


def test_bad_ids_stay_bad_and_bad_tokens_are_kept() -> None:
    ids = torch.tensor([[0, 4], [7, -2], [1, -1]])
    made = plan(loads_of([ids, ids], 4), 2)
    routing = Routing(expert_ids=ids, weights=torch.ones(3, 2), num_experts=4, bad_tokens=torch.tensor(5))
    moved = reroute(routing, made, 1)
    physical = made.num_physical
    assert moved.expert_ids[0, 1] == physical
    assert moved.expert_ids[1].tolist() == [physical + 3, -2]
    assert moved.expert_ids[2, 1] == -1
    assert moved.bad_tokens is routing.bad_tokens


def test_the_plan_of_another_micro_batch_is_refused() -> None:
    ids = torch.tensor([[0], [0], [1]])
    made = plan(loads_of([ids, ids], 2), 1)
    with pytest.raises(PlanError, match="counts 2 rows of expert 0 from rank 0, the routing has 1"):
        reroute(routing_of(ids[1:], 2), made, 0)
    with pytest.raises(PlanError, match="the routing has 0"):
        reroute(routing_of(ids[:0], 2), made, 0)


def test_another_group_is_refused() -> None:
    ids = torch.tensor([[0], [1]])
    made = plan(loads_of([ids, ids], 2), 1)
    for routing, rank in ((routing_of(ids, 4), 0), (routing_of(ids, 2), 2), (routing_of(ids, 2), -1)):
        with pytest.raises(InputError, match="plan and reroute with the same expert-parallel group"):
            reroute(routing, made, rank)
    for arguments in ((None, made, 0), (routing_of(ids, 2), None, 0), (routing_of(ids, 2), made, True)):
        with pytest.raises(InputError, match="reroute takes a Routing, a Plan and a rank, got "):
            reroute(*arguments)


def test_the_kernels_refuse_what_lies_on_the_cpu() -> None:
    ids = torch.tensor([[0], [1]])
    load = loads_of([ids, ids], 2)
    with pytest.raises(InputError, match=r"the kernels plan int32 loads on a GPU, got torch\.int32 on cpu; use plan"):
        plan_on_device(load, 1)
    with pytest.raises(PlanError, match="slots = -1 must be at least 0"):
        plan_on_device(load, -1)
    with pytest.raises(InputError, match="the kernels reroute ids on a GPU, got cpu; use reroute there"):
        reroute_on_device(routing_of(ids, 2), plan(load, 1), 0)
    with pytest.raises(InputError, match="plan and reroute with the same expert-parallel group"):
        reroute_on_device(routing_of(ids, 4), plan(load, 1), 0)

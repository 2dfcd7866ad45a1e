"""Planner and rerouting on a GPU: the bits of the torch planner, without a host sync, and again from a CUDA graph."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from moe_ep.load import expert_load
from moe_ep.replica import Plan, plan, reroute, verify
from moe_ep.replica.device import plan_on_device, reroute_on_device
from moe_ep.routing import Routing
from tests.unit.test_replica_plan import ADVERSARIAL, COLDER, from_totals, random_case

pytestmark = pytest.mark.gpu
HOT = [45, 23, 23, 145, 238, 232, 40, 0, 121, 107, 85, 0, 408, 0, 19, 198]


@pytest.fixture(scope="module", autouse=True)
def kernels_are_there() -> None:
    """A GPU without kernels is a failure here, not a reason to skip."""
    from moe_ep.kernels import library

    assert library.missing(torch.cuda.current_device()) is None


def same(load: Tensor, slots: int, min_quota: int = 1, domain: int | None = None, tolerance: int = 0) -> None:
    want = plan(load, slots, min_quota, domain_size=domain, tolerance=tolerance)
    for _ in range(3):  # a race between warps may need another try to show
        got = plan_on_device(load.int().cuda(), slots, min_quota, domain_size=domain, tolerance=tolerance)
        case = (load.sum(0).tolist(), load.shape, slots, min_quota, domain, tolerance)
        assert torch.equal(got.quota.cpu(), want.quota), case
        assert torch.equal(got.instances.cpu(), want.instances), case
        assert int(got.max_load) == int(want.max_load), case
        assert bool(got.exact) == bool(want.exact), case
        assert int(got.checksum()) == int(want.checksum()), case


def test_equal_rows() -> None:
    rng = random.Random(4)
    for num_ranks, num_local, domain in (
        (1, 3, 1),
        (2, 40, 2),
        (12, 4, 6),
        (64, 4, 64),
        (256, 2, 256),
        *[(4, 3, 4)] * 50,
    ):
        totals = [rng.choice([0, 1, int(50 * rng.lognormvariate(0, 2))]) for _ in range(num_ranks * num_local)]
        load = from_totals(totals, num_ranks)
        want = plan(load, num_local + 1, 1, "fixed_rows", domain_size=domain)
        got = plan_on_device(load.int().cuda(), num_local + 1, 1, "fixed_rows", domain_size=domain)
        for name in ("load", "quota", "instances", "max_load", "exact"):
            assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), (totals, num_ranks, domain, name)


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_loads(name: str) -> None:
    totals, num_ranks, slots, _ = ADVERSARIAL[name]
    same(from_totals(totals, num_ranks), slots)


def test_random_loads() -> None:
    rng = random.Random(2)
    for _ in range(300):
        totals, num_ranks, slots = random_case(rng)
        same(from_totals(totals, num_ranks), slots, rng.choice([1, 1, 3, 40]))
    same(from_totals([14, 36, 0, 10, 97], 5), 3, 20)
    same(from_totals(HOT + COLDER, 8), 1)


@pytest.mark.parametrize(
    ("num_ranks", "num_local", "slots"),
    [(2, 80, 2), (8, 32, 2), (33, 2, 1), (64, 4, 2), (64, 4, 1), (128, 2, 2), (256, 2, 1), (320, 1, 1)],
)
@pytest.mark.parametrize("min_quota", [1, 64])
def test_large_loads(num_ranks: int, num_local: int, slots: int, min_quota: int) -> None:
    generator = torch.Generator().manual_seed(num_ranks)
    popularity = (torch.randn(num_ranks * num_local, generator=generator) * 1.2).softmax(0)
    load = torch.poisson((popularity * 8192 * 8).repeat(num_ranks, 1), generator=generator).int()
    same(load, slots, min_quota)
    same(load, slots, min_quota, tolerance=10)
    if num_ranks % 2 == 0:
        same(load, slots, min_quota, num_ranks // 2)


def test_more_ranks_than_a_warp_can_hold_are_refused() -> None:
    from moe_ep.kernels.build import KernelError

    load = torch.ones(1024, 1024, dtype=torch.int32, device="cuda")
    for planner in ("quota", "fixed_rows"):
        with pytest.raises(KernelError, match="the kernels plan up to 512 ranks of a domain, got 1024"):
            plan_on_device(load, 1, 1, planner)
    assert int(plan_on_device(load, 1, 1, "fixed_rows", domain_size=512).max_load) == 1024


def tokens(num_ranks: int, num_experts: int, num_tokens: int, top_k: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, top_k)
    return [(torch.rand(shape, generator=generator) ** 2 * (num_experts + 1)).long() - 1 for _ in range(num_ranks)]


def plans(all_ids: list[Tensor], num_experts: int, slots: int) -> tuple[Plan, Plan]:
    load = torch.stack([expert_load(ids, num_experts) for ids in all_ids]).int()
    return plan(load, slots), plan_on_device(load.cuda(), slots)


def routing_of(ids: Tensor, num_experts: int) -> Routing:
    return Routing(expert_ids=ids, weights=torch.ones(ids.shape, device=ids.device), num_experts=num_experts)


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "num_tokens", "top_k"),
    [(1, 4, 33, 2), (3, 6, 0, 2), (8, 64, 777, 4), (64, 256, 8192, 8)],
)
def test_rerouting(num_ranks: int, num_experts: int, num_tokens: int, top_k: int) -> None:
    few = tokens(min(num_ranks, 4), num_experts, num_tokens, top_k, 1)
    all_ids = [few[rank % len(few)].roll(rank, 0) for rank in range(num_ranks)]
    on_host, on_device = plans(all_ids, num_experts, 2)
    verify(on_host)
    for rank in {0, num_ranks // 2, num_ranks - 1}:
        want = reroute(routing_of(all_ids[rank], num_experts), on_host, rank)
        got, wrong = reroute_on_device(routing_of(all_ids[rank].cuda(), num_experts), on_device, rank)
        assert torch.equal(got.expert_ids.cpu(), want.expert_ids)
        assert got.num_experts == want.num_experts
        assert int(wrong) == 0


def test_bad_ids_and_plans_of_another_micro_batch() -> None:
    ids = torch.tensor([[0, 4], [7, -2], [1, -1]])
    on_host, on_device = plans([ids, ids], 4, 2)
    want = reroute(routing_of(ids, 4), on_host, 1)
    got, wrong = reroute_on_device(routing_of(ids.cuda(), 4), on_device, 1)
    assert torch.equal(got.expert_ids.cpu(), want.expert_ids)
    assert int(wrong) == 0
    _, wrong = reroute_on_device(routing_of(ids[:2].cuda(), 4), on_device, 1)
    assert int(wrong) == 1


def test_neither_waits_for_the_host_and_both_replay_from_a_graph() -> None:
    batches = [tokens(8, 64, 500, 4, seed) for seed in range(3)]
    loads = [torch.stack([expert_load(ids, 64) for ids in batch]).int() for batch in batches]
    load, ids = loads[0].cuda(), batches[0][3].cuda()
    plan_on_device(load, 2)
    reroute_on_device(routing_of(ids, 64), plan_on_device(load, 2), 3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan_on_device(load, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = plan_on_device(load, 2)
        moved, wrong = reroute_on_device(routing_of(ids, 64), made, 3)
    for batch, counts in zip(batches, loads, strict=True):
        load.copy_(counts)
        ids.copy_(batch[3])
        graph.replay()
        want = plan(counts, 2)
        assert torch.equal(made.quota.cpu(), want.quota)
        assert torch.equal(moved.expert_ids.cpu(), reroute(routing_of(batch[3], 64), want, 3).expert_ids)
        assert int(wrong) == 0


def test_ops_obey_their_schemas_and_fakes() -> None:
    from moe_ep.kernels.replica import plan_fixed_rows_op, plan_replicas_op, reroute_op

    load = torch.tensor([[6, 0, 1, 1], [0, 2, 3, 3]], dtype=torch.int32, device="cuda")
    ids = torch.tensor([[0, 2], [0, 3], [0, 0], [0, 0]], device="cuda")
    check, tests = torch.library.opcheck, ("test_schema", "test_faketensor")
    check(plan_replicas_op.op, (load, 1, 1, 0, 2), test_utils=tests)
    check(plan_fixed_rows_op.op, (load, 2, 2), test_utils=tests)
    quota, instances, _, _ = plan_replicas_op(load, 1, 1, 0, 2)
    check(reroute_op.op, (ids, load, quota, instances, 0), test_utils=tests)

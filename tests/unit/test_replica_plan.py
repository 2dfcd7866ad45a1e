"""What every plan promises, and how close to the optimum the planners come."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_ep.errors import PlanError
from moe_ep.replica import Plan, plan, plan_together, verify
from moe_ep.replica.checks import check_slots
from moe_ep.replica.planners import lower_bound
from moe_ep.replica.reroute import split
from tests.unit.replica_reference import best_for, optimum, scanned_greedy

COUNTS = st.one_of(st.integers(0, 3), st.integers(0, 1000), st.just(0), st.integers(0, 2**20))


@st.composite
def loads(draw: st.DrawFn) -> Tensor:
    num_ranks, num_local = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12])), draw(st.integers(1, 4))
    per_source = st.lists(COUNTS, min_size=num_ranks * num_local, max_size=num_ranks * num_local)
    rows = draw(st.lists(per_source, min_size=num_ranks, max_size=num_ranks))
    load = torch.tensor(rows, dtype=torch.int32)
    load[draw(st.lists(st.integers(0, num_ranks - 1), max_size=2))] = 0  # ranks without tokens
    return load


def from_totals(totals: list[int], num_ranks: int) -> Tensor:
    """A load with these sums over sources, spread over them."""
    load = torch.tensor(totals).repeat(num_ranks, 1) // num_ranks
    load[0] += torch.tensor(totals) - load.sum(0)
    return load


def home_load(load: Tensor) -> Tensor:
    return load.long().sum(0).view(load.shape[0], -1).sum(1)


def same(a: Plan, b: Plan) -> bool:
    return all(torch.equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Plan))


def each_replica_lowers_the_maximum(made: Plan) -> bool:
    """No replica's rows fit into the other instances of its expert under the plan's maximum."""
    room = int(made.max_load) - made.rank_load()
    hosts = made.physical_ids() >= 0
    for expert, rank in replicas(made):
        others = hosts[expert].clone()
        others[rank] = False
        if int(room[others].sum()) >= int(made.quota[expert, rank]):
            return False
    return True


def replicas(made: Plan) -> list[tuple[int, int]]:
    return [(expert, rank) for rank, filled in enumerate(made.instances.tolist()) for expert in filled if expert >= 0]


@settings(max_examples=150)
@given(loads(), st.integers(0, 5), st.sampled_from([1, 1, 2, 7, 1024]), st.sampled_from([0, 0, 10, 200]))
def test_what_every_plan_promises(load: Tensor, slots: int, min_quota: int, tolerance: int) -> None:
    made = plan(load, slots, min_quota, tolerance=tolerance)
    verify(made)
    mean = -(-int(load.sum()) // load.shape[0])
    assert mean <= int(made.max_load) <= int(home_load(load).amax())
    assert made.instances.shape == (load.shape[0], slots)
    assert all(int(made.quota[place]) >= min_quota for place in replicas(made))
    assert each_replica_lowers_the_maximum(made)
    if bool(made.exact):
        assert int(made.max_load) == lower_bound(load.long().sum(0), load.shape[0], slots, int(made.max_load))
    if int(made.max_load) == int(home_load(load).amax()):
        assert int(made.num_replicas()) == 0
    if int(home_load(load).amax()) <= mean + mean * tolerance // 1000:
        assert int(made.num_replicas()) == 0


@settings(max_examples=40)
@given(loads(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_same_on_every_rank_and_whichever_rank_the_rows_come_from(
    load: Tensor, slots: int, shuffle: random.Random
) -> None:
    first, again = plan(load, slots), plan(load.clone().long(), slots)
    assert same(first, again)
    assert int(first.checksum()) == int(again.checksum())
    order = list(range(load.shape[0]))
    shuffle.shuffle(order)
    assert torch.equal(plan(load[order], slots).quota, first.quota)


@settings(max_examples=60)
@given(loads(), st.sampled_from([0, 1]))
def test_fixed_rows_gives_every_rank_its_share(load: Tensor, spare: int) -> None:
    num_ranks, num_experts = load.shape
    made = plan(load, num_experts // num_ranks + spare, planner="fixed_rows")
    verify(made)
    share, more = divmod(int(load.sum()), num_ranks)
    assert made.rank_load().tolist() == [share + (rank < more) for rank in range(num_ranks)]
    assert bool(made.exact)


def random_case(rng: random.Random) -> tuple[list[int], int, int]:
    """Totals, ranks and slots of a small case: heavy tails, even, few, lognormal, or mostly cold loads."""
    num_ranks, num_local = rng.choice([(2, 1), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2), (4, 1), (4, 2)])
    draw = rng.choice(
        [
            lambda: int(rng.paretovariate(1) * 20) % 400 + 1,
            lambda: rng.randrange(1000),
            lambda: rng.randrange(20),
            lambda: int(100 * rng.lognormvariate(0, 2)),
            lambda: rng.randrange(5000 if rng.random() < 0.25 else 100),
        ]
    )
    return [draw() for _ in range(num_ranks * num_local)], num_ranks, rng.choice([1, 1, 2, 3])


def test_small_cases_against_the_optimum_and_the_scanned_greedy() -> None:
    rng, gaps, greedy_gaps = random.Random(5), [], []
    for _ in range(500):
        totals, num_ranks, slots = random_case(rng)
        reached = int(plan(from_totals(totals, num_ranks), slots).max_load)
        best, greedy = optimum(totals, num_ranks, slots), scanned_greedy(totals, num_ranks, slots, 1)
        assert best <= reached <= greedy, (totals, num_ranks, slots)
        gaps.append(reached / max(best, 1) - 1)
        greedy_gaps.append(greedy / max(best, 1) - 1)
    assert sum(gap == 0 for gap in gaps) >= 0.95 * len(gaps)
    assert sum(gaps) / len(gaps) <= 0.005
    assert sum(greedy_gaps) / len(gaps) > 0.005  # so the bound above says something


@pytest.mark.parametrize("min_quota", [2, 8, 40])
def test_a_smallest_quota_is_never_worse_than_the_scanned_greedy(min_quota: int) -> None:
    rng = random.Random(min_quota)
    for _ in range(100):
        totals, num_ranks, slots = random_case(rng)
        made = plan(from_totals(totals, num_ranks), slots, min_quota)
        verify(made)
        assert int(made.max_load) <= scanned_greedy(totals, num_ranks, slots, min_quota), (totals, num_ranks, slots)


def test_small_plans_use_their_placement_in_full() -> None:
    """No other quotas on the same instances are better, and without any one replica the maximum is larger."""
    rng, seen = random.Random(3), 0
    for _ in range(200):
        totals, num_ranks, slots = random_case(rng)
        made = plan(from_totals(totals, num_ranks), slots)
        hosts = [{r for r, place in enumerate(places) if place >= 0} for places in made.physical_ids().tolist()]
        assert best_for(totals, hosts, num_ranks) == int(made.max_load)
        for expert, rank in replicas(made):
            fewer = [ranks - {rank} if e == expert else ranks for e, ranks in enumerate(hosts)]
            assert best_for(totals, fewer, num_ranks) > int(made.max_load)
            seen += 1
    assert seen > 200


def test_numbers_of_ranks_do_not_matter_and_further_slots_never_harm() -> None:
    rng = random.Random(9)
    for _ in range(80):
        totals, num_ranks, slots = random_case(rng)
        if rng.random() < 0.3:
            num_ranks, totals = 8, [int(50 * rng.lognormvariate(0, 1.5)) for _ in range(16)]
        made, more = (plan(from_totals(totals, num_ranks), slots + spare) for spare in (0, 1))
        assert int(more.max_load) <= int(made.max_load), (totals, num_ranks, slots)
        num_local, order = len(totals) // num_ranks, list(range(num_ranks))
        rng.shuffle(order)
        renamed = [rows for rank in order for rows in totals[rank * num_local : (rank + 1) * num_local]]
        other = plan(from_totals(renamed, num_ranks), slots)
        assert (int(other.max_load), int(other.num_replicas())) == (int(made.max_load), int(made.num_replicas()))
        given = [expert // num_local for expert, _ in replicas(made)]
        assert all(given.count(rank) <= num_ranks - 1 + num_local for rank in range(num_ranks))


def test_a_tolerance_takes_fewer_replicas() -> None:
    rng = random.Random(21)
    for _ in range(20):
        totals = [int(500 * rng.lognormvariate(0, 1)) for _ in range(64)]
        load = from_totals(totals, 16)
        tight, loose = plan(load, 2), plan(load, 2, tolerance=20)
        verify(loose)
        mean = -(-sum(totals) // 16)
        assert int(tight.max_load) <= int(loose.max_load) <= max(int(tight.max_load), mean + mean // 50)
        assert int(loose.num_replicas()) < int(tight.num_replicas())
    nearly = from_totals([101, 99, 100, 100], 4)
    assert int(plan(nearly, 1).num_replicas()) == 1
    assert int(plan(nearly, 1, tolerance=10).num_replicas()) == 0


def test_exact_is_only_claimed_where_it_is_true() -> None:
    rng, claimed = random.Random(11), 0
    for _ in range(200):
        totals, num_ranks, slots = random_case(rng)
        made = plan(from_totals(totals, num_ranks), slots)
        if bool(made.exact):
            claimed += 1
            assert int(made.max_load) == optimum(totals, num_ranks, slots)
    assert claimed > 100


@pytest.mark.parametrize("ratio", [1.5, 2.0, 3.0])
def test_the_mean_is_reached_at_64_ranks_with_two_slots(ratio: float) -> None:
    generator = torch.Generator().manual_seed(33)
    shape = torch.randn(256, generator=generator)
    low, high = 0.0, 8.0
    for _ in range(30):  # the spread of popularity that gives this ratio of the largest rank load to the mean
        spread = (low + high) / 2
        popularity = (spread * shape).softmax(0)
        peak = float(popularity.view(64, 4).sum(1).max() * 64)
        low, high = (spread, high) if peak < ratio else (low, spread)
    load = torch.poisson((popularity * 8192 * 8).repeat(64, 1), generator=generator).int()
    before = home_load(load)
    assert float(before.max()) * 64 / float(before.sum()) == pytest.approx(ratio, rel=0.02)
    made = plan(load, 2)
    verify(made)
    assert int(made.max_load) * 64 <= 1.01 * int(load.sum())


ADVERSARIAL = {
    "all to one expert": ([1000, 0, 0, 0], 4, 1, 250),
    "all to one rank's experts": ([500, 500, 0, 0, 0, 0, 0, 0], 4, 1, 250),
    "nothing anywhere": ([0] * 8, 4, 2, 0),
    "one row": ([0, 1, 0], 3, 2, 1),
    "one rank": ([7, 9], 1, 3, 16),
    "ties everywhere": ([10] * 12, 6, 2, 20),
    "more slots than foreign experts": ([90, 0, 0], 3, 9, 30),
    "four equal experts, one slot elsewhere": ([100, 100, 100, 100, 0, 0, 0, 0], 2, 1, 300),
    "a hot expert on every rank": ([5000, 1, 1, 1, 1], 5, 1, 1001),
    "a source that only another source can help": ([197, 725, 500], 3, 1, 474),
    "one rank takes every slot": ([9600, 100, 50, 50, 50, 50] + [0] * 66, 12, 5, 825),
    "2^24 - 1": ([2**24 - 1, 0], 2, 1, 2**23),
    "2^24 + 1": ([2**24 + 1, 0], 2, 1, 2**23 + 1),
    "2^31 - 1": ([2**31 - 1, 0], 2, 1, 2**30),
    "more than 512 experts": ([2000, 1040, 640] + [10] * 637, 8, 2, 1257),
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_loads(name: str) -> None:
    totals, num_ranks, slots, expected = ADVERSARIAL[name]
    made = plan(from_totals(totals, num_ranks), slots)
    verify(made)
    assert int(made.max_load) == expected
    assert bool(made.exact)


def test_no_smallest_quota_is_too_large_for_a_plan() -> None:
    made = plan(from_totals([900, 10, 10, 10], 2), 2, min_quota=10**6)
    verify(made)
    assert int(made.num_replicas()) == 0
    # 5 rows would do, the quota asks for 40, and there is room for them
    made = plan(from_totals([100, 50], 2), 1, min_quota=40)
    assert made.quota.tolist() == [[60, 40], [0, 50]]


COLDER = [45, 0, 0, 115, 28, 71, 14, 34, 0, 56, 21, 85, 8, 7, 40, 92]


@pytest.mark.parametrize(
    ("totals", "num_ranks", "slots", "min_quota", "expected"),
    [
        ([14, 36, 0, 10, 97], 5, 3, 20, 2),
        (
            [45, 23, 23, 145, 238, 232, 40, 0, 121, 107, 85, 0, 408, 0, 19, 198, *COLDER],
            *(8, 1, 1, 6),
        ),
    ],
)
def test_a_replica_whose_rows_fit_elsewhere_is_dropped(
    totals: list[int], num_ranks: int, slots: int, min_quota: int, expected: int
) -> None:
    """The greedy leaves one replica here that its expert's other instances can do without."""
    made = plan(from_totals(totals, num_ranks), slots, min_quota)
    verify(made)
    assert each_replica_lowers_the_maximum(made)
    assert int(made.num_replicas()) == expected


def test_zero_slots_and_one_rank_change_nothing() -> None:
    load = from_totals([5, 6, 7, 80], 2)
    for made in (plan(load, 0), plan(load.sum(0, keepdim=True), 3)):
        verify(made)
        assert int(made.num_replicas()) == 0
        assert int(made.max_load) == int(home_load(made.load).amax())
        assert bool(made.exact)


def test_replicas_stay_in_their_domain() -> None:
    rng = random.Random(3)
    for _ in range(30):
        totals = [rng.randrange(1000) if rng.random() < 0.5 else 0 for _ in range(16)]
        load = from_totals(totals, 8)
        made = plan(load, 2, domain_size=4)
        verify(made)
        inside = torch.arange(16)[:, None] // 8 == torch.arange(8) // 4
        assert not made.quota[~inside].any()
        halves = [plan(from_totals(totals[:8], 4), 2), plan(from_totals(totals[8:], 4), 2)]
        assert int(made.max_load) == max(int(half.max_load) for half in halves)
    alone = plan(load, 2, domain_size=1)
    assert int(alone.num_replicas()) == 0


@pytest.mark.parametrize("sources", [slice(0, 2), slice(2, 4), slice(0, 4)])
def test_all_load_in_one_domain_stays_there(sources: slice) -> None:
    """Wherever its rows come from: only the experts' own domain counts."""
    load = torch.zeros(4, 8, dtype=torch.int32)
    load[sources, :2] = torch.tensor([300, 100], dtype=torch.int32)
    made = plan(load, 1, domain_size=2)
    verify(made)
    total = int(load.sum())
    assert made.rank_load().tolist() == [total // 2, total // 2, 0, 0]
    parts = torch.stack([split(made, rank) for rank in range(4)])
    assert torch.equal(parts.sum(0), made.quota.long()) and torch.equal(parts.sum(2), load.long())


class NoFloats(TorchDispatchMode):
    """Refuses every operation that touches a floating-point tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            assert not (isinstance(value, Tensor) and value.dtype.is_floating_point), f"{func} on {value.dtype}"
        return result


def test_planning_is_done_in_integers() -> None:
    """A sum or a quotient in floating point is another one on another device."""
    load = from_totals([197, 725, 500, 14, 36, 90], 3)
    with NoFloats():
        for planner, slots, tolerance in (("quota", 1, 0), ("quota", 2, 10), ("fixed_rows", 2, 0)):
            made = plan(load, slots, planner=planner, tolerance=tolerance)  # type: ignore[arg-type]
            made.checksum()
            made.physical_ids()
            split(made, 1)
        plan_together([load, load.flip(0)], 1, 5)


def test_micro_batches_planned_together_share_one_placement() -> None:
    rng, alone, together, home, idle = random.Random(8), 0.0, 0.0, 0.0, 0
    for _ in range(30):
        base = [int(50 * rng.lognormvariate(0, 1)) for _ in range(16)]
        loads = [from_totals([int(rows * rng.lognormvariate(0, 0.2)) for rows in base], 4) for _ in range(3)]
        made = plan_together(loads, 2)
        for load, one in zip(loads, made, strict=True):
            verify(one, idle_replicas=True)
            assert torch.equal(one.instances, made[0].instances)
            assert torch.equal(one.load, load.int())
            mean = int(load.sum()) / 4
            home += int(home_load(load).amax()) / mean
            together += int(one.max_load) / mean
            alone += int(plan(load, 2).max_load) / mean
            idle += sum(int(one.quota[place]) == 0 for place in replicas(one))
    assert alone <= together < alone + 0.1 * (home - alone)
    assert idle > 0  # a replica of one micro-batch may have no row in another


def test_one_micro_batch_planned_together_is_planned_alone() -> None:
    for seed in range(40):
        totals, num_ranks, slots = random_case(random.Random(seed))
        load = from_totals(totals, num_ranks)
        (one,) = plan_together([load], slots)
        assert int(one.max_load) == int(plan(load, slots).max_load)
        assert torch.equal(one.instances, plan(load, slots).instances)


def test_micro_batches_in_domains_and_senseless_ones() -> None:
    loads = [from_totals([90, 0, 0, 0, 5, 5, 60, 5], 4), from_totals([40, 40, 0, 0, 5, 5, 90, 5], 4)]
    for one in plan_together(loads, 1, domain_size=2):
        verify(one, idle_replicas=True)
        assert not one.quota[~(torch.arange(8)[:, None] // 4 == torch.arange(4) // 2)].any()
    for senseless in ([loads[0], loads[1].repeat(2, 1)], [loads[0], loads[1].int()]):
        with pytest.raises(PlanError, match="loads must be of one shape and dtype"):
            plan_together(senseless, 1, domain_size=2)
    no_lists: list[Any] = [[], None, loads[0]]
    for none in no_lists:
        with pytest.raises(PlanError, match="loads must be a list, with one of each micro-batch, got "):
            plan_together(none, 1)
    with pytest.raises(PlanError, match="a load is -1"):
        plan_together([loads[0], loads[0] - 1], 1)


@pytest.mark.parametrize(
    ("load", "arguments", "text"),
    [
        (torch.ones(2, 3, dtype=torch.int32), {}, "3 experts cannot be divided among 2 ranks"),
        (torch.ones(2, 4), {}, "int32 or int64 [R, E], a dense tensor, got torch.float32 (2, 4)"),
        (torch.ones(4, dtype=torch.int32), {}, "got torch.int32 (4,)"),
        (torch.ones(2, 0, dtype=torch.int32), {}, "got torch.int32 (2, 0)"),
        (torch.tensor([[1, -2], [0, 0]]), {}, "a load is -2"),
        (torch.tensor([[2**31 - 1, 1], [0, 0]]), {}, "2147483648 rows or more, beyond 2^31 - 1"),
        (torch.tensor([[2**62, 2**62], [2**62, 2**62]]), {}, "beyond 2^31 - 1; take smaller micro-batches"),
        (torch.full((2, 2), 2**30, dtype=torch.int32), {}, "4294967296 rows or more"),
        (torch.ones(2, 4, dtype=torch.int32), {"slots": -1}, "slots = -1 must be at least 0"),
        (torch.ones(2, 4, dtype=torch.int32), {"min_quota": 0}, "min_quota = 0 at least 1"),
        (torch.ones(2, 4, dtype=torch.int32), {"min_quota": 2**31}, "min_quota = 2147483648 at least 1 and below 2^31"),
        (torch.ones(2, 4, dtype=torch.int32), {"slots": 1.0}, "slots = 1.0 must be int, got float"),
        (torch.ones(2, 4, dtype=torch.int32), {"min_quota": True}, "min_quota = True must be int, got bool"),
        (torch.ones(2, 4, dtype=torch.int32), {"tolerance": None}, "tolerance = None must be int, got NoneType"),
        (torch.ones(2, 4, dtype=torch.int32), {"domain_size": "2"}, "domain_size = '2' must be int, got str"),
        ([[1, 1]], {}, "a dense tensor, got list; count routes of ids"),
        (torch.ones(2, 4, dtype=torch.int32).to_sparse(), {}, "got torch.int32 (2, 4) torch.sparse_coo; count routes"),
        (torch.ones(2, 4, dtype=torch.int32), {"planner": "best"}, "planner = 'best' is unknown; use one of quota"),
        (torch.ones(2, 4, dtype=torch.int32), {"tolerance": 1001}, "tolerance = 1001 must lie in [0, 1000]"),
        (
            torch.ones(2, 2, dtype=torch.int32),
            {"planner": "fixed_rows", "tolerance": 1},
            "tolerance = 1 must lie in [0, 1000], thousandths of the mean, and be 0 for fixed_rows",
        ),
        (torch.ones(4, 4, dtype=torch.int32), {"domain_size": 3}, "domain_size = 3 must divide the 4 ranks"),
        (
            torch.ones(2, 4, dtype=torch.int32),
            {"planner": "fixed_rows"},
            "each of the L = 2 experts of a rank, and slots = 1",
        ),
        (
            torch.ones(2, 2, dtype=torch.int32),
            {"planner": "fixed_rows", "min_quota": 5},
            "min_quota = 5 does not go with",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(load: Tensor, arguments: dict[str, object], text: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(load, **{"slots": 1, **arguments})  # type: ignore[arg-type]
    assert text in str(caught.value)


def test_the_memory_that_fixed_rows_takes_is_said_beforehand() -> None:
    with pytest.raises(PlanError, match=r"8 more experts, 288\.0 MiB on each rank"):
        check_slots("fixed_rows", 2, 1, 8, expert_bytes=36 * 2**20)
    check_slots("fixed_rows", 8, 1, 8)


def test_verify_finds_every_broken_promise() -> None:
    good = plan(from_totals([60, 20, 0, 0], 2), 2)
    assert good.instances.tolist() == [[-1, -1], [0, -1]]
    assert good.quota.tolist() == [[20, 40], [20, 0], [0, 0], [0, 0]]
    verify(good)

    def broken(text: str, **fields: list[list[int]] | int) -> None:
        parts = {name: torch.tensor(value, dtype=getattr(good, name).dtype) for name, value in fields.items()}
        with pytest.raises(PlanError, match=text):
            verify(dataclasses.replace(good, **parts))

    broken("a replica computes no row", quota=[[60, 0], [20, 0], [0, 0], [0, 0]], max_load=80)
    broken("does not hold", instances=[[-1, -1], [-1, -1]])
    broken("rank 1 has slots", instances=[[-1, -1], [-1, 0]])
    broken("rank 1 has slots", instances=[[-1, -1], [0, 0]])
    broken("a replica of its own", instances=[[1, -1], [0, -1]])
    broken("add up to its load", quota=[[20, 39], [20, 0], [0, 0], [0, 0]])
    broken("is negative", quota=[[-20, 80], [20, 0], [0, 0], [0, 0]])
    broken("the most loaded rank computes 40", max_load=39)
    broken("more than the 80", quota=[[0, 60], [20, 0], [0, 0], [0, 30]], load=[[0] * 4, [60, 20, 0, 30]], max_load=90)


def test_checksums_tell_plans_apart() -> None:
    load = from_totals([61, 20, 0, 0], 2)
    base = plan(load, 2)
    other_sources = load.flip(0)
    assert not torch.equal(other_sources, load)
    variants = [plan(other_sources, 2), plan(load, 1), plan(load, 2, min_quota=41), plan(load + 1, 2)]
    quota = base.quota.clone()
    quota[0] += torch.tensor([1, -1], dtype=torch.int32)
    variants.append(dataclasses.replace(base, quota=quota))
    sums = [int(made.checksum()) for made in (base, *variants)]
    assert len(set(sums)) == len(sums)


def test_physical_ids() -> None:
    made = plan(from_totals([60, 20, 0, 0], 2), 1)
    assert made.num_physical == 6  # rank 0: experts 0, 1 and a slot; rank 1: experts 2, 3 and a slot
    assert made.physical_ids().tolist() == [[0, 5], [1, -1], [-1, 3], [-1, 4]]


@pytest.mark.slow
def test_no_copy_of_an_expert_shares_a_rank_with_another_of_it() -> None:
    rng = random.Random(58)
    for _ in range(100):  # 32 copies more than experts, which is what the report had
        load = from_totals([int(50 * rng.lognormvariate(0, 2)) for _ in range(256)], 32)
        verify(plan(load, 1))
    for _ in range(10000):
        totals = [int(50 * rng.lognormvariate(0, 1.5)) for _ in range(16)]
        verify(plan(from_totals(totals, 4), rng.choice([1, 2])))

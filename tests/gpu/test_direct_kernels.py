"""`direct`'s kernels on one GPU that stands in for R: a stream and a block of memory for each rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu(1)
NO_BOUND = 2**31 - 1
LOST = 10


@dataclass(frozen=True, kw_only=True)
class Case:
    tokens: tuple[int, ...]  # of each rank
    num_experts: int = 8
    top_k: int = 4
    hidden: int = 64
    dtype: torch.dtype = torch.float32
    skip: float = 0.2  # routes without an expert
    one_expert: bool = False


CASES = {
    "one_rank": Case(tokens=(37,)),
    "two": Case(tokens=(50, 33)),
    "bfloat16": Case(tokens=(70, 65), dtype=torch.bfloat16, hidden=1024),
    "float16": Case(tokens=(9, 12), dtype=torch.float16, hidden=8),
    "zero_tokens": Case(tokens=(0, 40)),
    "no_tokens": Case(tokens=(0, 0)),
    "one_expert": Case(tokens=(40, 41), one_expert=True),
    "no_routes": Case(tokens=(20, 20), skip=1.0),
    "four": Case(tokens=(33, 0, 64, 7), num_experts=16, top_k=3),
    "eight": Case(tokens=(5, 40, 0, 33, 1, 2, 64, 64), num_experts=40, top_k=6, hidden=512),
    "many_routes": Case(tokens=(20, 30), num_experts=64, top_k=40),
    "long": Case(tokens=(5000, 4097), num_experts=128, top_k=8, hidden=16, skip=0.01),
}


class Group:
    """R ends of a domain on one GPU."""

    def __init__(self, case: Case, timeout_s: float = 20.0) -> None:
        from moe_ep.kernels.direct import Peers
        from moe_ep.kernels.direct_types import Codes, Shape

        self.case, self.device = case, torch.device("cuda", 0)
        self.num_ranks = len(case.tokens)
        self.shape = Shape(
            num_ranks=self.num_ranks,
            num_experts=case.num_experts,
            top_k=case.top_k,
            max_tokens=max(1, *case.tokens),
            row_bytes=case.hidden * case.dtype.itemsize,
        )
        size = self.shape.layout()[1]
        self.memory = [torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in case.tokens]
        self.faults = [torch.zeros((), dtype=torch.int64, device=self.device) for _ in case.tokens]
        self.streams = [torch.cuda.Stream() for _ in case.tokens]
        codes = Codes(bad_ids=3, non_finite=6, overflow=7, no_grad=8, place=9, lost=LOST)
        addresses = [block.data_ptr() for block in self.memory]
        self.peers = [
            Peers(self.shape, r, addresses, self.device, codes=codes, fault=self.faults[r], timeout_s=timeout_s)
            for r in range(self.num_ranks)
        ]
        torch.cuda.synchronize()

    def each(self, fn: Callable[[int], object], ranks: Sequence[int] | None = None) -> list:
        """fn(rank) on every rank's stream, nobody waiting for the host in between."""
        out = []
        for r in range(self.num_ranks) if ranks is None else ranks:
            with torch.cuda.stream(self.streams[r]):
                out.append(fn(r))
        return out


def make_ids(case: Case, gen: torch.Generator) -> list[Tensor]:
    ids = []
    for count in case.tokens:
        some = torch.randint(0, case.num_experts, (count, case.top_k), generator=gen)
        some = torch.zeros_like(some) if case.one_expert else some
        ids.append(torch.where(torch.rand(some.shape, generator=gen) < case.skip, -1, some))
    return ids


@dataclass
class Place:
    """What the kernels must come to, from plain Python loops in the documented order."""

    unique: list[list[tuple[int, int]]]  # of each rank: (source, token) in order
    rows: list[list[tuple[int, int, int, int]]]  # of each rank: (expert, source, token, k) in order


def place(ids: list[Tensor], num_experts: int) -> Place:
    num_ranks = len(ids)
    local = num_experts // num_ranks
    unique: list[list[tuple[int, int]]] = [[] for _ in ids]
    rows: list[list[tuple[int, int, int, int]]] = [[] for _ in ids]
    for source, table in enumerate(ids):
        for token, experts in enumerate(table.tolist()):
            for dest in {e // local for e in experts if e >= 0}:
                unique[dest].append((source, token))
            for k, e in enumerate(experts):
                if e >= 0:
                    rows[e // local].append((e, source, token, k))
    return Place(unique=[sorted(u) for u in unique], rows=[sorted(r) for r in rows])


def make_trips(group: Group, ids: list[Tensor]) -> list:
    from moe_ep.kernels.direct import rank_routes
    from moe_ep.kernels.direct_types import Trip

    return group.each(lambda r: Trip(layer=3, micro_batch=1, ids=ids[r], ranked=rank_routes(ids[r], group.shape)))


def run_forward(group: Group, trips: list, x: list[Tensor], weights: list[Tensor], expand: bool, capacity: int):
    """Exchange and push on all ranks; capacity 0: each rank has just the rows that come, so ranks differ."""
    group.each(lambda r: group.peers[r].exchange(trips[r], row_bound=capacity or NO_BOUND))
    torch.cuda.synchronize()
    for r, trip in enumerate(trips):
        rows, unique = group.peers[r].plan_parts(trip.plan)["totals"].tolist()
        most = group.num_ranks * group.shape.max_tokens
        trip.row_capacity, trip.unique_capacity = (capacity, min(most, capacity)) if capacity else (rows, unique)
    received = group.each(lambda r: group.peers[r].push_first(x[r], weights[r], trips[r], expand=expand, blocks=(2, 5)))
    torch.cuda.synchronize()
    return received


@pytest.mark.parametrize("exact", [False, True], ids=["capacity", "exact"])
@pytest.mark.parametrize("expand", [False, True], ids=["unique", "expanded"])
@pytest.mark.parametrize("name", CASES)
def test_rows_go_where_the_routes_say(name: str, expand: bool, exact: bool) -> None:
    case = CASES[name]
    gen = torch.Generator().manual_seed(len(name))
    group = Group(case)
    for _ in range(2):  # memory and flags of the first round are old in the second
        ids = make_ids(case, gen)
        want = place(ids, case.num_experts)
        x = [torch.randn(n, case.hidden, generator=gen).to(case.dtype) for n in case.tokens]
        weights = [torch.rand(n, case.top_k, generator=gen) for n in case.tokens]
        on_gpu = [[t.cuda() for t in ts] for ts in (ids, x, weights)]
        trips = make_trips(group, on_gpu[0])
        most = group.num_ranks * group.shape.max_tokens * case.top_k
        received = run_forward(group, trips, *on_gpu[1:], expand, 0 if exact else most)
        for r in range(group.num_ranks):
            check_received(group, r, want, x, weights, trips[r].plan, received[r], expand)
        check_round_trip(group, want, trips, gen)
    assert [int(f) for f in group.faults] == [0] * group.num_ranks


def check_received(group, r, want, x, weights, plan, got, expand) -> None:
    unique, rows = want.unique[r], want.rows[r]
    parts = {name: part.cpu() for name, part in group.peers[r].plan_parts(plan).items()}
    first = r * group.shape.num_local
    counts = [sum(row[0] == first + e for row in rows) for e in range(group.shape.num_local)]
    assert parts["tokens"].tolist() == counts
    assert parts["offsets"].tolist() == [sum(counts[:e]) for e in range(len(counts) + 1)]
    assert parts["totals"].tolist() == [len(rows), len(unique)]
    index = {key: u for u, key in enumerate(unique)}
    assert got.row_index[: len(rows)].tolist() == [index[source, token] for _, source, token, _ in rows]
    assert (got.row_index[len(rows) :] == -1).all()
    positions = torch.full((got.positions.shape[0], group.case.top_k), -1, dtype=torch.int32)
    for n, (_, source, token, k) in enumerate(rows):
        positions[index[source, token], k] = n
    assert torch.equal(got.positions.cpu(), positions)
    expected = [weights[source][token, k] for _, source, token, k in rows]
    assert got.row_weights[: len(rows)].tolist() == [float(w) for w in expected]
    keys = [(source, token) for _, source, token, _ in rows] if expand else unique
    if keys:
        assert torch.equal(got.rows[: len(keys)].cpu(), torch.stack([x[s][t] for s, t in keys]))


def check_round_trip(group, want, trips, gen) -> None:
    """Results home and gradients back out, against float64 sums; then the same again bit for bit."""
    case = group.case
    y = [torch.randn(trip.row_capacity, case.hidden, generator=gen).to(case.dtype) for trip in trips]
    for r, rows in enumerate(y):
        rows[len(want.rows[r]) :] = float("nan")
    d_weights = [torch.randn(rows.shape[0], generator=gen) for rows in y]
    on_gpu = [[t.cuda() for t in ts] for ts in (y, d_weights)]

    def back(r: int) -> tuple[Tensor, Tensor]:
        return group.peers[r].give_back(
            on_gpu[0][r], trips[r], add_routes=True, row_weights=on_gpu[1][r], blocks=(2, 5)
        )

    got, again = group.each(back), group.each(back)
    torch.cuda.synchronize()
    total = [torch.zeros(n, case.hidden, dtype=torch.float64) for n in case.tokens]
    size = [t.clone() for t in total]
    slots = [torch.zeros(n, case.top_k) for n in case.tokens]
    for r, rows in enumerate(want.rows):
        for n, (_, source, token, k) in enumerate(rows):
            total[source][token] += y[r][n].double()
            size[source][token] += y[r][n].double().abs()
            slots[source][token, k] = d_weights[r][n]
    for r in range(group.num_ranks):
        # each partial sum and the whole are rounded to the dtype, and float32 sums of up to K terms in between
        bound = size[r] * (2 * torch.finfo(case.dtype).eps + case.top_k * 2.0**-23)
        assert ((got[r][0].cpu().double() - total[r]).abs() <= bound).all()
        assert torch.equal(got[r][1].cpu(), slots[r])
        assert torch.equal(got[r][0], again[r][0])
    check_gradients(group, want, trips, got)


def check_gradients(group, want, trips, got) -> None:
    """dy to every place of a token's routes, and to its unique rows; unique rows home once each."""
    peers = group.peers
    dy = group.each(lambda r: peers[r].push_again(got[r][0], trips[r], expand=True, blocks=(3, 3)))
    unique = group.each(lambda r: peers[r].push_again(got[r][0], trips[r], expand=False, blocks=(1, 2)))
    home = group.each(lambda r: peers[r].give_back(unique[r], trips[r], add_routes=False, blocks=(1, 1)))
    torch.cuda.synchronize()
    for r, rows in enumerate(want.rows):
        if rows:
            assert torch.equal(dy[r][: len(rows)], torch.stack([got[s][0][t] for _, s, t, _ in rows]))
            assert torch.equal(unique[r][: len(want.unique[r])], torch.stack([got[s][0][t] for s, t in want.unique[r]]))
    for source, (rows, none) in enumerate(home):
        times = torch.zeros(rows.shape[0])
        for unique_rows in want.unique:
            for s, t in unique_rows:
                if s == source:
                    times[t] += 1
        expected = got[source][0].float().cpu() * times.unsqueeze(1)
        assert none is None
        assert ((rows.float().cpu() - expected).abs() <= expected.abs() * torch.finfo(rows.dtype).eps).all()


def test_too_many_rows_are_a_fault_and_results_stay_defined() -> None:
    case = Case(tokens=(40, 40), one_expert=True, skip=0.0)
    group = Group(case)
    gen = torch.Generator().manual_seed(0)
    ids = [t.cuda() for t in make_ids(case, gen)]
    x = [torch.randn(n, case.hidden).cuda() for n in case.tokens]
    weights = [torch.rand(n, case.top_k).cuda() for n in case.tokens]
    trips = make_trips(group, ids)
    received = run_forward(group, trips, x, weights, False, capacity=100)
    for fault in group.faults:  # 320 routes for rank 0
        assert (int(fault) >> 56, int(fault) >> 40 & 0xFFFF, int(fault) & 0xFFFFFFFF) == (7, 3, 320)
    assert group.peers[0].plan_parts(trips[0].plan)["totals"].tolist()[0] == 100
    assert int(received[0].row_index.min()) >= 0 and int(received[0].positions.max()) == 99
    y = torch.ones(100, case.hidden, device="cuda")
    back = group.each(lambda r: group.peers[r].give_back(y, trips[r], add_routes=True, blocks=(1, 2))[0])
    torch.cuda.synchronize()
    assert sum(int(b.sum() / case.hidden) for b in back) == 100


@pytest.mark.parametrize(
    ("words", "place", "code", "value"),
    [({"host_fault": (1, 0)}, 0, 1, 0), ({"no_grad": True}, 0, 8, 1), ({}, 4, 9, 1)],
    ids=["host_fault", "no_grad", "other_place"],
)
def test_what_one_rank_says_is_a_fault_of_all(words: dict, place: int, code: int, value: int) -> None:
    group = Group(CASES["two"])
    trips = make_trips(group, [t.cuda() for t in make_ids(group.case, torch.Generator().manual_seed(0))])
    trips[1].place = place
    group.each(lambda r: group.peers[r].exchange(trips[r], row_bound=NO_BOUND, **(words if r == 1 else {})))
    torch.cuda.synchronize()
    assert [(int(f) >> 56, int(f) & 0xFFFFFFFF) for f in group.faults] == [(code, value)] * 2


def test_bad_ids_and_bad_tokens_are_told() -> None:
    group = Group(CASES["two"])
    ids = make_ids(group.case, torch.Generator().manual_seed(0))
    ids[0][0, 0], ids[0][1, 1] = 8, -2
    for bad_tokens, code, value in ((None, 3, 2), (torch.tensor(5, device="cuda"), 6, 5)):
        trips = make_trips(group, [table.cuda() for table in ids])
        trips[0].bad_tokens = bad_tokens
        plans = group.each(lambda r, trips=trips: group.peers[r].exchange(trips[r], row_bound=NO_BOUND))
        torch.cuda.synchronize()
        assert [(int(f) >> 56, int(f) & 0xFFFFFFFF) for f in group.faults] == [(code, value)] * 2
        words = group.peers[1].plan_parts(plans[1])["words"].tolist()
        assert [w[:2] for w in words] == [[code, value], [0, 0]]
        for fault in group.faults:
            fault.zero_()


def test_a_rank_that_never_comes_is_a_fault_in_time() -> None:
    group = Group(CASES["two"], timeout_s=0.2)
    trips = make_trips(group, [t.cuda() for t in make_ids(group.case, torch.Generator().manual_seed(0))])
    (plan,) = group.each(lambda r: group.peers[r].exchange(trips[r], row_bound=NO_BOUND), [0])
    torch.cuda.synchronize()
    assert (int(group.faults[0]) >> 56, int(group.faults[0]) & 0xFFFFFFFF) == (LOST, 1)
    assert group.peers[0].plan_parts(plan)["words"][1].tolist()[:2] == [LOST, 1]


@pytest.mark.parametrize("expand", [False, True])
def test_a_rank_that_is_told_to_stop_leaves_and_what_follows_reads_nothing(expand: bool) -> None:
    """Rank 1 exchanges counts and sends nothing; rank 0's word is set by a copy while it waits in the push."""
    group = Group(CASES["two"], timeout_s=60)
    trips = make_trips(group, [t.cuda() for t in make_ids(group.case, torch.Generator().manual_seed(0))])
    group.each(lambda r: group.peers[r].exchange(trips[r], row_bound=NO_BOUND))
    torch.cuda.synchronize()
    trip, hidden = trips[0], group.case.hidden
    totals = group.peers[0].plan_parts(trip.plan)["totals"].tolist()
    trip.row_capacity, trip.unique_capacity = totals
    x, weights = torch.ones(50, hidden, device="cuda"), torch.ones(50, 4, device="cuda")
    at, said = group.shape.layout()[0].stop, torch.ones(1, dtype=torch.int32, pin_memory=True)
    word = group.memory[0][at : at + 4].view(torch.int32)
    copies = torch.cuda.Stream()
    torch.cuda.synchronize()
    started = time.monotonic()
    (received,) = group.each(lambda r: group.peers[r].push_first(x, weights, trip, expand=expand, blocks=(2, 8)), [0])
    time.sleep(0.2)
    assert not group.streams[0].query(), "it waits for rank 1"
    with torch.cuda.stream(copies):
        word.copy_(said, non_blocking=True)
    rows = torch.ones(totals[0], hidden, device="cuda")
    (given,) = group.each(lambda r: group.peers[r].give_back(rows, trip, add_routes=True, blocks=(2, 8)), [0])
    torch.cuda.synchronize()
    assert time.monotonic() - started < 10
    assert int(group.faults[0]) >> 56 == LOST
    assert bool((received.row_index == -1).all()) and bool((received.positions == -1).all())
    parts = group.peers[0].plan_parts(trip.plan)
    assert not parts["offsets"].any() and not parts["tokens"].any() and not parts["totals"].any()
    assert given[0].shape == x.shape

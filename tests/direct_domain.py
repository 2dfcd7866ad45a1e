"""A domain of ranks in one process, and what `direct`'s kernels must come to, from plain Python loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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


OVERFLOW = Case(tokens=(40, 40), num_experts=8, skip=0.0, hidden=8)  # about 160 rows for each rank


class Group:
    """R ends of a domain on one GPU."""

    def __init__(self, case: Case, timeout_s: float = 20.0, device: str = "cuda") -> None:
        from moe_ep.kernels.direct import Peers
        from moe_ep.kernels.direct_types import Codes, Shape

        self.case, self.device = case, torch.device(device, 0) if device == "cuda" else torch.device(device)
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
        self.streams = [torch.cuda.Stream() for _ in case.tokens] if device == "cuda" else []
        codes = Codes(bad_ids=3, non_finite=6, overflow=7, no_grad=8, place=9, lost=LOST)
        addresses = [block.data_ptr() for block in self.memory]
        self.peers = [
            Peers(self.shape, r, addresses, self.device, codes=codes, fault=self.faults[r], timeout_s=timeout_s)
            for r in range(self.num_ranks)
        ]
        self.sync()

    def sync(self) -> None:
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


def run_forward(
    group: Group, trips: list, x: list[Tensor], weights: list[Tensor], expand: bool, capacity: int, blocks=(2, 5)
):
    """Exchange and push on all ranks; capacity 0: each rank has just the rows that come, so ranks differ."""
    group.each(lambda r: group.peers[r].exchange(trips[r], row_bound=capacity or NO_BOUND))
    group.sync()
    for r, trip in enumerate(trips):
        rows, unique = group.peers[r].plan_parts(trip.plan)["totals"].tolist()
        most = group.num_ranks * group.shape.max_tokens
        trip.row_capacity, trip.unique_capacity = (capacity, min(most, capacity)) if capacity else (rows, unique)
    received = group.each(lambda r: group.peers[r].push_first(x[r], weights[r], trips[r], expand=expand, blocks=blocks))
    group.sync()
    return received


def check_case(group: Group, seed: int, expand: bool, exact: bool) -> None:
    """Two rounds of a push, of results home and of gradients; memory and flags of the first are old in the second."""
    case, gen = group.case, torch.Generator().manual_seed(seed)
    for turn in range(2):
        ids = make_ids(case, gen)
        want = place(ids, case.num_experts)
        x = [torch.randn(n, case.hidden, generator=gen).to(case.dtype) for n in case.tokens]
        weights = [torch.rand(n, case.top_k, generator=gen) for n in case.tokens]
        there = [[t.to(group.device) for t in ts] for ts in (ids, x, weights)]
        trips = make_trips(group, there[0])
        most = group.num_ranks * group.shape.max_tokens * case.top_k
        received = run_forward(group, trips, *there[1:], expand, 0 if exact else most, blocks=((2, 5), (3, 3))[turn])
        for r in range(group.num_ranks):
            check_received(group, r, want, x, weights, trips[r].plan, received[r], expand)
        check_round_trip(group, want, trips, gen)
    assert [int(f) for f in group.faults] == [0] * group.num_ranks


def check_overflow(group: Group, capacity: int, expand: bool) -> None:
    """More rows than there is room for, on every rank; what nobody wrote shows, since it is no small number."""
    case, gen = group.case, torch.Generator().manual_seed(0)
    ids = make_ids(case, gen)
    want = place(ids, case.num_experts)
    x = [torch.randn(n, case.hidden, generator=gen) for n in case.tokens]
    weights = [torch.rand(n, case.top_k, generator=gen) for n in case.tokens]
    there = [[t.to(group.device) for t in ts] for ts in (ids, x, weights)]
    trips = make_trips(group, there[0])
    torch.use_deterministic_algorithms(True, warn_only=True)  # empty tensors hold NaN and the largest integers
    try:
        received = run_forward(group, trips, *there[1:], expand, capacity)
    finally:
        torch.use_deterministic_algorithms(False)
    most = max(len(rows) for rows in want.rows)
    for fault in group.faults:
        assert (int(fault) >> 56, int(fault) >> 40 & 0xFFFF, int(fault) & 0xFFFFFFFF) == (7, 3, most)
    for r, got in enumerate(received):
        assert group.peers[r].plan_parts(trips[r].plan)["totals"].tolist()[0] == capacity
        check_cut_off(want.rows[r][:capacity], want.unique[r], x, weights, trips[r].unique_capacity, got, expand)
    y = torch.ones(capacity, case.hidden, device=group.device)
    back = group.each(lambda r: group.peers[r].give_back(y, trips[r], add_routes=True, blocks=(1, 2))[0])
    group.sync()
    found = sum(int((got.row_index >= 0).sum()) for got in received)
    assert sum(int(b.sum() / case.hidden) for b in back) == found


def check_cut_off(rows, unique, x, weights, unique_capacity, got, expand) -> None:
    """Rows up to the capacity; those of tokens that found no place among the unique rows point nowhere."""
    index = {key: u for u, key in enumerate(unique)}
    places = [index[source, token] for _, source, token, _ in rows]
    assert got.row_index.tolist() == [u if u < unique_capacity else -1 for u in places]
    positions = torch.full((unique_capacity, got.positions.shape[1]), -1, dtype=torch.int32)
    values = []
    for n, (_, source, token, k) in enumerate(rows):
        if places[n] < unique_capacity:
            positions[places[n], k] = n
        values.append(float(weights[source][token, k]) if places[n] < unique_capacity else 0.0)
    assert torch.equal(got.positions.cpu(), positions)
    assert got.row_weights.tolist() == values
    if expand:
        assert torch.equal(got.rows.cpu(), torch.stack([x[source][token] for _, source, token, _ in rows]))
    else:
        kept = torch.stack([x[source][token] for source, token in unique[:unique_capacity]])
        assert torch.equal(got.rows.cpu()[: len(kept)], kept)


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
    there = [[t.to(group.device) for t in ts] for ts in (y, d_weights)]

    def back(r: int) -> tuple[Tensor, Tensor]:
        return group.peers[r].give_back(there[0][r], trips[r], add_routes=True, row_weights=there[1][r], blocks=(2, 5))

    got, again = group.each(back), group.each(back)
    group.sync()
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
    group.sync()
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

"""`direct`'s kernels on one GPU that stands in for R: a stream and a block of memory for each rank."""

from __future__ import annotations

import time

import pytest
import torch

from tests.direct_domain import (
    CASES,
    LOST,
    NO_BOUND,
    OVERFLOW,
    Group,
    check_case,
    check_overflow,
    make_ids,
    make_trips,
)

pytestmark = pytest.mark.gpu(1)


@pytest.mark.parametrize("exact", [False, True], ids=["capacity", "exact"])
@pytest.mark.parametrize("expand", [False, True], ids=["unique", "expanded"])
@pytest.mark.parametrize("name", CASES)
def test_rows_go_where_the_routes_say(name: str, expand: bool, exact: bool) -> None:
    check_case(Group(CASES[name]), len(name), expand, exact)


@pytest.mark.parametrize("expand", [False, True], ids=["unique", "expanded"])
@pytest.mark.parametrize("capacity", [1, 7, 60, 100])
def test_too_many_rows_are_a_fault_and_results_stay_defined(capacity: int, expand: bool) -> None:
    check_overflow(Group(OVERFLOW), capacity, expand)


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
    group.sync()
    assert [(int(f) >> 56, int(f) & 0xFFFFFFFF) for f in group.faults] == [(code, value)] * 2


def test_bad_ids_and_bad_tokens_are_told() -> None:
    group = Group(CASES["two"])
    ids = make_ids(group.case, torch.Generator().manual_seed(0))
    ids[0][0, 0], ids[0][1, 1] = 8, -2
    for bad_tokens, code, value in ((None, 3, 2), (torch.tensor(5, device="cuda"), 6, 5)):
        trips = make_trips(group, [table.cuda() for table in ids])
        trips[0].bad_tokens = bad_tokens
        plans = group.each(lambda r, trips=trips: group.peers[r].exchange(trips[r], row_bound=NO_BOUND))
        group.sync()
        assert [(int(f) >> 56, int(f) & 0xFFFFFFFF) for f in group.faults] == [(code, value)] * 2
        words = group.peers[1].plan_parts(plans[1])["words"].tolist()
        assert [w[:2] for w in words] == [[code, value], [0, 0]]
        for fault in group.faults:
            fault.zero_()


def test_a_rank_that_never_comes_is_a_fault_in_time() -> None:
    group = Group(CASES["two"], timeout_s=0.2)
    trips = make_trips(group, [t.cuda() for t in make_ids(group.case, torch.Generator().manual_seed(0))])
    (plan,) = group.each(lambda r: group.peers[r].exchange(trips[r], row_bound=NO_BOUND), [0])
    group.sync()
    assert (int(group.faults[0]) >> 56, int(group.faults[0]) & 0xFFFFFFFF) == (LOST, 1)
    assert group.peers[0].plan_parts(plan)["words"][1].tolist()[:2] == [LOST, 1]


@pytest.mark.parametrize("expand", [False, True])
def test_a_rank_that_is_told_to_stop_leaves_and_what_follows_reads_nothing(expand: bool) -> None:
    """Rank 1 exchanges counts and sends nothing; rank 0's word is set by a copy while it waits in the push."""
    group = Group(CASES["two"], timeout_s=60)
    trips = make_trips(group, [t.cuda() for t in make_ids(group.case, torch.Generator().manual_seed(0))])
    group.each(lambda r: group.peers[r].exchange(trips[r], row_bound=NO_BOUND))
    group.sync()
    trip, hidden = trips[0], group.case.hidden
    totals = group.peers[0].plan_parts(trip.plan)["totals"].tolist()
    trip.row_capacity, trip.unique_capacity = totals
    x, weights = torch.ones(50, hidden, device="cuda"), torch.ones(50, 4, device="cuda")
    at, said = group.shape.layout()[0].stop, torch.ones(1, dtype=torch.int32, pin_memory=True)
    word = group.memory[0][at : at + 4].view(torch.int32)
    copies = torch.cuda.Stream()
    group.sync()
    started = time.monotonic()
    (received,) = group.each(lambda r: group.peers[r].push_first(x, weights, trip, expand=expand, blocks=(2, 8)), [0])
    time.sleep(0.2)
    assert not group.streams[0].query(), "it waits for rank 1"
    with torch.cuda.stream(copies):
        word.copy_(said, non_blocking=True)
    rows = torch.ones(totals[0], hidden, device="cuda")
    (given,) = group.each(lambda r: group.peers[r].give_back(rows, trip, add_routes=True, blocks=(2, 8)), [0])
    group.sync()
    assert time.monotonic() - started < 10
    assert int(group.faults[0]) >> 56 == LOST
    assert bool((received.row_index == -1).all()) and bool((received.positions == -1).all())
    parts = group.peers[0].plan_parts(trip.plan)
    assert not parts["offsets"].any() and not parts["tokens"].any() and not parts["totals"].any()
    assert given[0].shape == x.shape

"""How ranks end together, with threads for ranks and a store in memory: no process group, no tensor."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from torch._C._distributed_c10d import HashStore

from moe_ep.calls import Call, CallLog, counterpart
from moe_ep.settlement import Outcome, Party, Settlement, first_error


def rows(send: Sequence[int], recv: Sequence[int], row_bytes: int = 4) -> Call:
    return Call("all_to_all", "cpu", row_bytes, send, recv)


def gather(num: int) -> Call:
    return Call("all_gather", "cpu", 8, [num], [num])


def test_a_counterpart_fits_every_rank_that_has_started() -> None:
    first, third = rows([1, 3, 2], [1, 4, 6]), rows([6, 0, 5], [2, 7, 5], row_bytes=2)
    assert counterpart(1, [first, None, third]) == rows([16, 0, 14], [12, 0, 0], row_bytes=1)
    assert counterpart(1, [first, None, None]) == rows([16, 0, 0], [12, 0, 0], row_bytes=1)
    assert counterpart(0, [None, gather(5)]) == Call("all_gather", "cpu", 1, [40], [40])


def test_a_call_survives_the_store() -> None:
    for call in (rows([1, 3], [0, 2]), gather(7)):
        assert Call.from_json(call.to_json()) == call


def test_a_log_knows_its_last_calls_by_number() -> None:
    log = CallLog()
    for number in range(3000):
        log.add(gather(number))
    assert [(n, call.send[0]) for n, call in log.between(2998, 3000)] == [(2998, 2998), (2999, 2999)]
    assert log.between(0, 3000)[0][0] == 3000 - 2048, "what is too old is forgotten"
    log.skip_to(4000)
    log.add(gather(1))
    assert log.between(0, log.count) == [(4000, gather(1))]


class Rank:
    """A rank whose collectives are noted, not made; it stops when it is told to, after `later` more of them."""

    def __init__(self, rank: int, store: HashStore, calls: list[list[Call]], error: str | None = None) -> None:
        self.party = Party(rank, 3, [CallLog() for _ in calls], error=error, stopped=error is not None)
        for log, made in zip(self.party.logs, calls, strict=True):
            for call in made:
                log.add(call)
        self.made_up: list[tuple[int, Call]] = []
        self.waits_ended = 0
        self.settlement = Settlement(store, 0, self.party, self.make_up, self.end_waits)
        self.outcome: Outcome | None = None

    def make_up(self, log: int, call: Call | None) -> Rank:
        if call is not None:
            self.made_up.append((log, call))
        return self

    def end_waits(self) -> None:
        self.waits_ended += 1

    def has_ended(self) -> bool:
        return True

    def wait_on_host(self) -> None:
        raise AssertionError("nobody waits while ranks settle")

    def run(self, patience_s: float) -> None:
        self.outcome = self.settlement.run(patience_s)


def run(ranks: list[Rank], patience_s: float = 5.0) -> list[threading.Thread]:
    threads = [threading.Thread(target=rank.run, args=(patience_s,)) for rank in ranks]
    for thread in threads:
        thread.start()
    return threads


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def test_whoever_lacks_calls_makes_up_for_them_and_all_meet(store: HashStore) -> None:
    a = rows([0, 2, 1], [0, 3, 0])
    failing = Rank(1, store, [[gather(1)], []], "it broke")
    ahead = Rank(0, store, [[gather(1), gather(2), a], [gather(9)]])
    behind = Rank(2, store, [[gather(1), gather(2)], [gather(9)]])
    assert first_error(store, 0) == {}
    threads = run([failing, ahead, behind])
    ahead.party.stopped = True
    time.sleep(0.1)
    assert first_error(store, 0) == {1: "it broke"} and first_error(store, 1) == {}
    assert failing.settlement.positions() == [2, 1], "the third call awaits what rank 2 does"
    behind.party.stopped = True
    for thread in threads:
        thread.join(10)
    assert [rank.outcome for rank in (failing, ahead, behind)] == [Outcome({1: "it broke"}, True)] * 3
    assert [rank.settlement.positions() for rank in (ahead, failing, behind)] == [[3, 1]] * 3
    made = [[call for at, call in failing.made_up if at == log] for log in (0, 1)]
    with_both = [counterpart(1, [gather(num), None, gather(num)]) for num in (2, 9)]
    assert made == [[with_both[0], counterpart(1, [a, None, None])], [with_both[1]]]
    assert behind.made_up == [(0, counterpart(2, [a, None, None]))]
    assert ahead.made_up == []


def test_two_ranks_that_fail_are_both_heard(store: HashStore) -> None:
    ranks = [Rank(0, store, [[]], "one"), Rank(1, store, [[]]), Rank(2, store, [[gather(1)]], "two")]
    ranks[1].party.stopped = True
    for thread in run(ranks):
        thread.join(10)
    assert [rank.outcome for rank in ranks] == [Outcome({0: "one", 2: "two"}, True)] * 3
    assert [rank.settlement.positions() for rank in ranks] == [[1]] * 3


def test_a_rank_that_does_not_stop_ends_it_for_all(store: HashStore) -> None:
    ranks = [Rank(0, store, [[]], "it broke"), Rank(1, store, [[]]), Rank(2, store, [[]])]
    ranks[1].party.stopped = True
    started = time.monotonic()
    for thread in run(ranks, patience_s=0.3):
        thread.join(10)
    assert [rank.outcome for rank in ranks] == [Outcome({0: "it broke"}, False)] * 3
    assert 0.3 <= time.monotonic() - started < 3


def test_what_stands_in_no_log_ends_it_for_all(store: HashStore) -> None:
    ranks = [Rank(0, store, [[]], "it broke"), Rank(1, store, [[]]), Rank(2, store, [[]])]
    for rank in ranks:
        rank.party.stopped = rank.party.unlogged = True
    for thread in run(ranks):
        thread.join(10)
    assert [rank.outcome for rank in ranks] == [Outcome({0: "it broke"}, False)] * 3


def test_waits_outside_of_the_logs_are_ended_by_all_ranks_once_one_has_some(store: HashStore) -> None:
    """Rank 2 waits in a kernel that rank 0, which fails before its own, never starts: its host stops behind that."""
    ranks = [Rank(0, store, [[]], "it broke"), Rank(1, store, [[]]), Rank(2, store, [[]])]
    ranks[1].party.stopped = ranks[2].party.unlogged = True
    threads = run(ranks)
    deadline = time.monotonic() + 10
    while not all(rank.waits_ended for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
    ranks[2].party.stopped = True
    for thread in threads:
        thread.join(10)
    assert [rank.waits_ended for rank in ranks] == [1] * 3
    assert [rank.outcome for rank in ranks] == [Outcome({0: "it broke"}, False)] * 3


def test_nothing_is_ended_where_all_can_be_made_up_for(store: HashStore) -> None:
    ranks = [Rank(0, store, [[]], "it broke"), *(Rank(rank, store, [[gather(1)]]) for rank in (1, 2))]
    for rank in ranks:
        rank.party.stopped = True
    for thread in run(ranks):
        thread.join(10)
    assert [rank.waits_ended for rank in ranks] == [0] * 3
    assert [rank.outcome for rank in ranks] == [Outcome({0: "it broke"}, True)] * 3


def test_a_call_that_is_too_old_to_be_known_ends_it_for_all(store: HashStore) -> None:
    ranks = [Rank(0, store, [[]], "it broke"), *(Rank(r, store, [[gather(1)] * 2049]) for r in (1, 2))]
    for rank in ranks:
        rank.party.stopped = True
    for thread in run(ranks, patience_s=0.3):
        thread.join(10)
    assert [rank.outcome for rank in ranks] == [Outcome({0: "it broke"}, False)] * 3

"""Who waits at the end of a step, over a store in memory, and what ranks have launched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import meeting
from moe_ep.meeting import Launches, Meeting, all_equal

CPU = torch.device("cpu")
AHEAD = "rank 1 is not there"


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Meeting, Meeting]]:
    monkeypatch.setattr(meeting, "PATIENCE_S", 0.0)
    monkeypatch.setattr(meeting, "_ASK_EVERY_S", 0.0)
    store = dist.HashStore()  # type: ignore[attr-defined]
    yield Meeting(store, 0, 2), Meeting(store, 1, 2)


def digest(*launched: str) -> Tensor:
    launches = Launches()
    for what in launched:
        launches.note(what)
    return launches.digest(CPU)


def arrive(at: Meeting) -> None:
    at.number, at.waiting = at.number + 1, True


def test_digests_tell_order_number_and_kind() -> None:
    digests = [digest(), digest("a"), digest("a", "b"), digest("b", "a"), digest("a", "c")]
    assert len({tuple(each.tolist()) for each in digests}) == 5
    assert all_equal(torch.cat([digests[2], digest("a", "b"), digests[2]]))
    assert not all_equal(torch.cat([digests[2], digests[2], digests[3]]))


def test_a_step_that_begins_forgets() -> None:
    launches = Launches()
    launches.note("a")
    assert str(launches) == "1 transfers, the last one a"
    launches.begin()
    assert str(launches) == "no transfer" and torch.equal(launches.digest(CPU), digest())


def test_who_is_ahead_of_one_that_waits_says_so(two: tuple[Meeting, Meeting]) -> None:
    waits, other = two
    arrive(waits)
    look = waits.ask([5, 2], digest(), lambda: False)
    other.answer([6, 2], AHEAD)  # nobody has asked yet
    assert look() == ""
    other.answer([5, 1], AHEAD)  # on its way
    assert look() == ""
    other.answer([4, 3], AHEAD)
    assert look() == AHEAD


def test_a_rank_that_has_come_and_gone_on_is_not_ahead(two: tuple[Meeting, Meeting]) -> None:
    waits, other = two
    arrive(waits)
    look = waits.ask([5], digest(), lambda: other.number == 1)
    assert look() == ""
    arrive(other)
    assert look() is None
    other.waiting = False
    other.answer([9], AHEAD)  # in its next step, and what the first one asked is still there
    arrive(waits)
    assert waits.ask([9], digest(), lambda: False)() == ""


def test_ranks_that_all_wait_behind_what_cannot_end_compare(two: tuple[Meeting, Meeting]) -> None:
    for launched, want in ((("a", "b"), ""), (("b", "a"), "other ranks have sent something else")):
        looks = []
        for one, sent in zip(two, (("a", "b"), launched), strict=True):
            arrive(one)
            looks.append(one.ask([7], digest(*sent), lambda: False))
        looks[0]()
        assert [look() for look in reversed(looks)] == [want, want]


def test_nobody_asks_before_its_patience_ends(two: tuple[Meeting, Meeting], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "PATIENCE_S", 1e6)
    arrive(two[0])
    assert two[0].ask([5], digest(), lambda: False)() == ""
    two[1].answer([6], AHEAD)
    assert not two[0]._store.check(["ahead/1"])

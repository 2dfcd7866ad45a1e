"""The alarm of one rank and its thread, over a store in memory; the other rank is another thread's alarm."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep.alarm import Alarm
from moe_ep.calls import Call
from moe_ep.errors import PeerError
from moe_ep.settlement import Settlement


class Group:
    """What an alarm asks of a process group."""

    group_name = "7"

    def __init__(self, rank: int, store: dist.Store) -> None:
        self._rank, self._store = rank, store

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2

    def get_group_store(self) -> dist.Store:
        return self._store


class Ended:
    def has_ended(self) -> bool:
        return True

    def wait_on_host(self) -> None:
        pass


@pytest.fixture
def two() -> Iterator[tuple[Alarm, Alarm]]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    groups: Any = [Group(rank, store) for rank in range(2)]
    with mock.patch.object(dist, "get_process_group_ranks", lambda _: [4, 6]):
        alarms = [Alarm(group, lambda *_: Ended()) for group in groups]
    for alarm, group in zip(alarms, groups, strict=True):
        for _ in range(1 + group.rank()):
            alarm.watched.note(group, Call("all_gather", "cpu", 1, [1], [1]), torch.device("cpu"))
    yield alarms[0], alarms[1]
    for alarm in alarms:
        alarm.close()


def fails(alarm: Alarm, err: Exception) -> threading.Thread:
    thread = threading.Thread(target=alarm.fail, args=(err, "layer 3, micro-batch 1 (experts)"))
    thread.start()
    return thread


def told(alarm: Alarm) -> str:
    """What a rank raises that goes on until it hears of it."""
    with pytest.raises(PeerError) as caught:
        while True:
            alarm.check()
    return str(caught.value)


def test_ranks_of_the_job_are_named_and_all_stand_at_the_same_number(two: tuple[Alarm, Alarm]) -> None:
    for number in range(3):
        thread = fails(two[0], ValueError(f"bad {number}"))
        assert told(two[1]) == f"rank 4 failed in layer 3, micro-batch 1 (experts): ValueError: bad {number}"
        thread.join(10)
        assert [alarm.party.logs[0].count for alarm in two] == [2, 2]
        assert [(alarm.generation, alarm.given_up, alarm.party.stopped) for alarm in two] == [
            (1 + number, None, False)
        ] * 2


def test_an_error_is_told_once_and_not_at_any_length(two: tuple[Alarm, Alarm]) -> None:
    err = ValueError("x" * 10_000)
    thread = fails(two[1], err)
    assert 2000 < len(told(two[0])) < 2100
    thread.join(10)
    two[1].fail(err, "an outer block")
    two[0].check()
    assert two[0].generation == two[1].generation == 1


def test_a_thread_that_breaks_leaves_nobody_waiting(two: tuple[Alarm, Alarm]) -> None:
    err = ValueError("bad")
    with mock.patch.object(Settlement, "run", side_effect=dist.DistStoreError("gone")):
        two[0].fail(err, "layer 3")
    assert "serves no more, its end was not seen (DistStoreError: gone)" in err.__notes__[0]
    assert "serves no more" in told(two[0])

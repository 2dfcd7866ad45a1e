"""A host that waits for a GPU looks up now and then: the group may have been given up, and then the GPU never ends."""

from __future__ import annotations

import threading
import time
from unittest import mock

import pytest
import torch

from moe_ep.alarm import Alarm
from moe_ep.errors import PeerError
from moe_ep.in_flight import InFlight
from moe_ep.settlement import Party


def alarm() -> Alarm:
    """Without group and thread."""
    made = Alarm.__new__(Alarm)
    made.given_up, made.told, made.last = None, False, ""
    made.watched = mock.Mock(device=torch.device("cpu"))
    return made


class Event:
    def __init__(self, one: Alarm | None, queries: int) -> None:
        self.alarm, self.left, self.synchronized = one, queries, 0

    def query(self) -> bool:
        self.left -= 1
        if self.left == 0 and self.alarm is not None:
            self.alarm.given_up = "rank 1 failed in layer 3. The process group serves no more"
        return self.left < 0 and self.alarm is None

    def synchronize(self) -> None:
        self.synchronized += 1


def test_a_wait_that_ends_is_one_wait_of_cuda() -> None:
    event = Event(None, 3)
    flight = InFlight("exchange of counts of layer 3, micro-batch 0", (), [], event, ())
    flight.alarm = alarm()
    flight.wait_on_host()
    assert event.synchronized == 1 and flight.alarm.last == flight.what


def test_a_wait_that_cannot_end_is_left() -> None:
    flight = InFlight("exchange of counts of layer 3, micro-batch 0", (), [], None, ())
    flight.alarm = alarm()
    flight.alarm._lock = mock.MagicMock()
    event = flight._event = Event(flight.alarm, 3)
    with pytest.raises(PeerError, match="rank 1 failed in layer 3"):
        flight.wait_on_host()
    assert event.synchronized == 0


def test_a_wait_that_ended_without_its_peer_hears_what_that_has_to_say() -> None:
    made = alarm()
    made._lock = mock.MagicMock()
    threading.Timer(0.05, lambda: setattr(made, "given_up", "rank 1 failed in layer 3")).start()
    with pytest.raises(PeerError, match="rank 1 failed in layer 3"):
        made.hear(30)


def test_a_wait_that_ended_without_its_peer_is_not_awaited_for_ever() -> None:
    started = time.monotonic()
    alarm().hear(0.05)
    assert 0.05 <= time.monotonic() - started < 10


def test_waits_on_gpus_are_ended_by_who_is_alive_and_can() -> None:
    class Memory:
        def __init__(self, works: bool) -> None:
            self.works, self.words = works, list[int]()

        def stop(self, word: int) -> None:
            if not self.works:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            self.words.append(word)

    made, gone, broken, fine = alarm(), Memory(True), Memory(False), Memory(True)
    made._waiters, made.party = [], Party(3, 4)
    for memory in (gone, broken, fine):
        made.end_waits_with(memory.stop)
    del gone, memory
    made._end_waits()
    assert fine.words == [4]

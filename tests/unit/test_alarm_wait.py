"""A host that waits for a GPU looks up now and then: the group may have been given up, and then the GPU never ends."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from moe_ep.alarm import Alarm
from moe_ep.errors import PeerError
from moe_ep.streams import InFlight


def alarm() -> Alarm:
    """Without group and thread."""
    made = Alarm.__new__(Alarm)
    made.given_up, made.told, made.last = None, False, ""
    made._device = torch.device("cpu")
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

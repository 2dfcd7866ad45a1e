"""What a launched communication keeps, and for how long."""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch

from moe_ep import streams
from moe_ep.streams import InFlight, making


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a CUDA graph is being captured; a machine without GPUs cannot say, and has no device."""
    now = [False]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0])
    return now


def flight(event: object, keep: torch.Tensor) -> InFlight:
    return InFlight("dispatch of layer 0, micro-batch 0", (), [], event, (keep,))


def test_a_flight_that_dies_unawaited_makes_the_callers_stream_wait() -> None:
    event, sent = object(), torch.ones(1)
    with mock.patch.object(streams, "_current_stream") as stream:
        one = flight(event, sent)
        del one
        stream.return_value.wait_event.assert_called_once_with(event)


def test_a_capture_does_not_wait_for_what_happened_outside(capturing: list[bool]) -> None:
    one, capturing[0] = flight(object(), torch.ones(1)), True
    with mock.patch.object(streams, "_current_stream") as stream:
        del one
        stream.return_value.wait_event.assert_not_called()


def test_an_awaited_flight_lets_go_of_its_inputs_and_waits_once() -> None:
    event, sent = object(), torch.ones(1)
    with mock.patch.object(streams, "_current_stream") as stream:
        one = flight(event, sent)
        kept = weakref.ref(sent)
        del sent
        assert kept() is not None
        one.wait()
        assert kept() is None
        del one
        stream.return_value.wait_event.assert_called_once_with(event)


def test_a_step_without_its_wait_makes_none() -> None:
    event = mock.Mock()
    with mock.patch.object(streams, "_current_stream") as stream:
        with making(at_launch=True, at_arrival=False):
            flight(event, torch.ones(1)).wait_on_host()
        event.synchronize.assert_not_called()
        stream.return_value.wait_event.assert_not_called()
        flight(event, torch.ones(1)).wait_on_host()
        event.synchronize.assert_called_once_with()
        flight(event, torch.ones(1)).wait()
        stream.return_value.wait_event.assert_called_once_with(event)

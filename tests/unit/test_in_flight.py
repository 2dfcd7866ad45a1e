"""What a launched communication keeps, and for how long."""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch

from moe_ep import in_flight, streams
from moe_ep.in_flight import InFlight, making
from moe_ep.streams import CommStream


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
    with mock.patch.object(in_flight, "current_stream") as stream:
        one = flight(event, sent)
        del one
        stream.return_value.wait_event.assert_called_once_with(event)


def test_a_capture_does_not_wait_for_what_happened_outside(capturing: list[bool]) -> None:
    one, capturing[0] = flight(object(), torch.ones(1)), True
    with mock.patch.object(in_flight, "current_stream") as stream:
        del one
        stream.return_value.wait_event.assert_not_called()


def test_an_awaited_flight_lets_go_of_its_inputs_and_waits_once() -> None:
    event, sent = object(), torch.ones(1)
    with mock.patch.object(in_flight, "current_stream") as stream:
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
    with mock.patch.object(in_flight, "current_stream") as stream:
        with making(at_launch=True, at_arrival=False):
            flight(event, torch.ones(1)).wait_on_host()
        event.synchronize.assert_not_called()
        stream.return_value.wait_event.assert_not_called()
        flight(event, torch.ones(1)).wait_on_host()
        event.synchronize.assert_called_once_with()
        flight(event, torch.ones(1)).wait()
        stream.return_value.wait_event.assert_called_once_with(event)


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> CommStream:
    """A comm stream as on a GPU, on which nothing runs."""
    monkeypatch.setattr(torch.cuda, "Event", mock.Mock)
    monkeypatch.setattr(torch.cuda, "set_stream", mock.Mock())
    for module in (in_flight, streams):
        monkeypatch.setattr(module, "current_stream", mock.Mock())
    made = CommStream(torch.device("cpu"), None)
    made.device, made.stream, made._issued = torch.device("cuda", 0), mock.Mock(), mock.Mock()
    return made


def test_a_launch_with_a_mark_waits_for_what_was_issued_before_it(comm: CommStream) -> None:
    mark = comm.mark()
    assert mark is not None
    comm.launch("dispatch", lambda: ((), []), mark=mark)
    comm.stream.wait_event.assert_called_once_with(mark.event)
    comm._issued.record.assert_not_called()  # type: ignore[union-attr]
    comm.launch("combine", lambda: ((), []))
    comm._issued.record.assert_called_once()  # type: ignore[union-attr]
    assert comm.stream.wait_event.call_args == mock.call(comm._issued)
    assert CommStream(torch.device("cpu"), None).mark() is None


def test_a_mark_keeps_what_arrives_until_its_launch_has_its_memory(comm: CommStream) -> None:
    def arrive() -> weakref.ref[torch.Tensor]:
        (rows,) = comm.launch("combine of the layer before", lambda: ((torch.ones(1),), [])).wait()
        return weakref.ref(rows)

    assert arrive()() is None, "without a mark the block may go as soon as the caller has issued its last reader"
    mark, beside = comm.mark(), torch.ones(1)
    kept = [arrive(), arrive(), weakref.ref(beside)]
    comm.hold(beside)
    del beside
    assert all(ref() is not None for ref in kept)

    def allocate() -> tuple[tuple[torch.Tensor, ...], list[object]]:
        assert all(ref() is not None for ref in kept), "not before the launch has its own"
        return (), []

    comm.launch("dispatch", allocate, mark=mark)
    assert all(ref() is None for ref in [*kept, arrive()]), "nor longer"


def test_a_mark_that_dies_keeps_nothing(comm: CommStream) -> None:
    mark = comm.mark()
    (rows,) = comm.launch("combine", lambda: ((torch.ones(1),), [])).wait()
    ref = weakref.ref(rows)
    del rows
    assert ref() is not None
    del mark
    assert ref() is None and not comm._marks

"""What a launch does with streams and events, in which order; CUDA is played by fakes that note it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from moe_ep import in_flight, streams
from moe_ep.in_flight import making
from moe_ep.streams import CommStream, comm_stream, forget_streams


class Cuda:
    """One GPU, its streams and what happened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, str, str]] = []
        self.made: list[tuple[Any, int]] = []  # device and priority of each stream
        numbers, cuda = itertools.count(1), self

        class Stream:
            def __init__(self, device: Any = None, priority: int = 0, name: str = "comm") -> None:
                self.name = name
                cuda.made.append((device, priority))

            def wait_event(self, event: Event) -> None:
                cuda.log.append((self.name, "waits for", event.name))

        class Event:
            def __init__(self) -> None:
                self.name = f"event {next(numbers)}"

            def record(self, stream: Stream) -> None:
                cuda.log.append((stream.name, "records", self.name))

            def synchronize(self) -> None:
                cuda.log.append(("host", "waits for", self.name))

        self.current = Stream(name="caller")
        self.made.clear()
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: id(self.current), raising=False)
        monkeypatch.setattr(in_flight, "_known", {})

    def fill(self) -> tuple[tuple[torch.Tensor, ...], list[Any]]:
        """What is launched."""
        self.log.append((self.current.name, "runs", "it"))
        return (torch.zeros(1),), []


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_comm_waits_for_what_was_issued_and_the_caller_for_what_came(cuda: Cuda) -> None:
    comm = CommStream(torch.device("cuda", 0), None)
    for _ in range(2):  # the event of what was issued is used again
        cuda.log.clear()
        comm.launch("it", cuda.fill).wait()
        (_, _, issued), *_, (_, _, ended) = cuda.log
        assert cuda.log == [
            ("caller", "records", issued), ("comm", "waits for", issued), ("comm", "runs", "it"),
            ("comm", "records", ended), ("caller", "waits for", ended),
        ]  # fmt: skip
        assert issued != ended and cuda.current.name == "caller"


def test_a_host_that_has_waited_leaves_the_caller_nothing_to_wait_for(cuda: Cuda) -> None:
    flight = CommStream(torch.device("cuda", 0), None).launch("it", cuda.fill, keep=("what it reads",))
    cuda.log.clear()
    flight.wait_on_host()
    del flight
    assert [who for who, *_ in cuda.log] == ["host"]


def test_a_schedule_without_the_waits_has_none(cuda: Cuda) -> None:
    with making(at_launch=False, at_arrival=False):
        CommStream(torch.device("cuda", 0), None).launch("it", cuda.fill).wait()
    assert [what for _, what, _ in cuda.log] == ["runs", "records"]


def test_the_callers_stream_is_current_again_after_an_error(cuda: Cuda) -> None:
    def fail() -> Any:
        raise ValueError(cuda.current.name)

    with pytest.raises(ValueError, match="comm"):
        CommStream(torch.device("cuda", 0), None).launch("it", fail)
    assert cuda.current.name == "caller"


class Group:
    """All that a comm stream is found by."""

    def __init__(self, name: str) -> None:
        self.group_name = name


def test_a_device_and_a_group_have_one_stream_of_high_priority(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks issues in one order; and blocks that compute has queued do not hold up a communication."""
    monkeypatch.setattr(streams, "_streams", {})
    here, there = torch.device("cuda", 0), torch.device("cuda", 1)
    one: Any
    other: Any
    one, other = Group("one"), Group("other")
    first = comm_stream(here, one)
    assert comm_stream(torch.device("cuda"), one) is first is comm_stream(here, one), "also where no index is given"
    others = [comm_stream(there, one), comm_stream(here, other), comm_stream(here, one, early=True)]
    assert len({id(each.stream) for each in (first, *others)}) == 4
    assert cuda.made == [(here, -1), (there, -1), (here, -1), (here, -1)]
    forget_streams(one)
    assert comm_stream(here, other) is others[1] and comm_stream(here, one) is not first

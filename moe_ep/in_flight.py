"""Work in flight: a launched communication, what it keeps alive, and the waits for it that this thread makes."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .alarm import Alarm
from .errors import lost_peer
from .order import told
from .tracing import transfer_range


class _Waits(threading.local):
    """Which waits between streams this thread makes: all, but in a step of a schedule that has fewer."""

    at_launch = True
    at_arrival = True


waits_made = _Waits()


@contextlib.contextmanager
def making(*, at_launch: bool, at_arrival: bool) -> Iterator[None]:
    """What a schedule says of a step's waits.

    Args:
        at_launch: a communication waits for everything issued on the caller's stream so far.
        at_arrival: the caller's stream, or the host, waits for a communication.
    """
    before = waits_made.at_launch, waits_made.at_arrival
    waits_made.at_launch, waits_made.at_arrival = at_launch, at_arrival
    try:
        yield
    finally:
        waits_made.at_launch, waits_made.at_arrival = before


# what was current before, by device and handle: torch makes a new object at every question
_known: dict[tuple[int, int], Any] = {}


def current_stream(index: int) -> Any:
    """The stream that a device's work is issued on now, one object for each."""
    key = index, torch._C._cuda_getCurrentRawStream(index)
    stream = _known.get(key)
    if stream is None:
        stream = _known[key] = torch.cuda.current_stream(index)
    return stream


class InFlight:
    """One launched communication: its results are valid on the caller's stream only after `wait`."""

    def __init__(
        self,
        what: str,
        results: tuple[Tensor, ...],
        works: list[Any],
        event: Any,
        keep: Sequence[Any],
        group: dist.ProcessGroup | None = None,
        marks: weakref.WeakSet[Mark] | None = None,
    ) -> None:
        self.what, self.group = what, group
        self._marks = marks
        self.results = results
        self._works = works
        self._event = event
        self._keep: Sequence[Any] = keep
        self.alarm: Alarm | None = None

    def wait(self) -> tuple[Tensor, ...]:
        """Make the caller's stream (on CPU: the host) wait; returns the results and lets go of the inputs.

        Raises:
            PeerError: a collective failed or timed out, and the message says which; or another rank raised.
        """
        if waits_made.at_arrival:
            with transfer_range("wait", self.what):
                self._wait()
        if self.alarm is not None:
            self.alarm.check()
            self.alarm.last = self.what
        results, self.results, self._works, self._keep = self.results, (), [], ()
        if self._marks:
            hold(self._marks, results)
        return results

    def _wait(self) -> None:
        if self._event is not None:
            current_stream(torch.cuda.current_device()).wait_event(self._event)
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as err:
            if self.alarm is not None:
                self.alarm.explain(err)
            raise told(lost_peer(self.what, err), self.group) from err

    def wait_on_host(self) -> tuple[Tensor, ...]:
        """As `wait`, and block the host until the results can be read there."""
        if self._event is not None and waits_made.at_arrival:
            with transfer_range("wait", self.what):
                if self.alarm is not None:
                    self.alarm.watch_for(self._event.query)
                self._event.synchronize()
            self._event = None  # over: no stream needs to wait for it any more
        return self.wait()

    def has_ended(self) -> bool:
        """Whether it is over, without waiting.

        Raises:
            RuntimeError: it is over because it failed.
        """
        if self._event is not None:
            return bool(self._event.query())
        if not all(work.is_completed() for work in self._works):
            return False
        for work in self._works:
            work.wait()
        return True

    def __del__(self) -> None:
        if self._event is None or not self._keep or torch.cuda.is_current_stream_capturing():
            return  # a CUDA graph under capture must not wait for what happened outside of it
        # or the caller's pool gets the inputs back too early
        current_stream(torch.cuda.current_device()).wait_event(self._event)

    @property
    def event(self) -> Any:
        """The CUDA event of its end, None on CPU."""
        return self._event


class Mark:
    """How much the caller had issued, for a later launch that waits for no more than that.

    Attributes:
        event: the CUDA event that says so.
        kept: what arrived since and was handed to the caller: the launch must not be given its memory.
    """

    __slots__ = ("__weakref__", "event", "kept")

    def __init__(self, event: Any) -> None:
        self.event = event
        self.kept: list[object] = []


def hold(marks: weakref.WeakSet[Mark], what: object) -> None:
    """Keep what arrived until the launches of these marks have their memory."""
    for mark in marks:
        mark.kept.append(what)

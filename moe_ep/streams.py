"""Communication beside computation: comm streams, and how a communication is launched on one.

Besides this module, `in_flight`, the dispatchers and the replica transport none knows CUDA streams and events. On CPU
the same code runs without streams: a launch collects asynchronous work handles, a wait waits for them.

Memory rule. A tensor is allocated on the stream that writes it. `CommStream.launch` makes the comm stream wait for
everything issued on the caller's stream so far *before* it allocates, so a block that the comm stream's pool hands out
again cannot still be read by work that the caller issued earlier. What a launch reads is kept alive by the `InFlight`
until the caller's stream has waited for it, so the caller's pool cannot hand that block out too early either; an
`InFlight` that dies unawaited makes the caller's stream wait.
No `record_stream` is needed, and no memory waits for an event to be polled.
A launch may wait for less: for what was issued before a `Mark`. Until it has allocated, the mark keeps what arrived on
the comm stream in the meantime and was handed to the caller, whose readers the launch does not wait for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .alarm_registry import find_alarm
from .errors import lost_peer
from .in_flight import InFlight as InFlight  # dispatchers of others import it from here
from .in_flight import Mark, current_stream, hold, waits_made
from .order import order_of, told
from .peers import is_lost_peer
from .race import delays_around
from .tracing import transfer_range

Launch = Callable[[], tuple[tuple[Tensor, ...], list[Any]]]

# One comm stream per (device, group): dispatchers that share a group share its order of communication. A second one for
# what has to arrive early.
_streams: dict[tuple[torch.device, str, bool], CommStream] = {}


class CommStream:
    """Where the communication of one (device, group) is issued, in one order on all ranks."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.device, self.group = device, group
        # -1 is a high priority in CUDA's numbering; a waiting kernel then goes before compute's queued blocks
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        # of the caller, for the comm stream to wait for; used again, since launches come one after the other
        self._issued = torch.cuda.Event() if device.type == "cuda" else None
        self._marks = weakref.WeakSet[Mark]()  # of launches to come

    def mark(self) -> Mark | None:
        """What the caller has issued so far, for `launch`; None on CPU, where all of that is over."""
        if self.stream is None:
            return None
        mark = Mark(torch.cuda.Event())
        mark.event.record(current_stream(self.device.index))
        self._marks.add(mark)
        return mark

    def hold(self, what: object) -> None:
        """Keep what a launch made beside its results, and the caller now reads, as its results are kept."""
        hold(self._marks, what)

    def launch(self, what: str, fn: Launch, keep: Sequence[Any] = (), mark: Mark | None = None) -> InFlight:
        """Run `fn`, which allocates its outputs and starts collectives, beside the caller's stream.

        Args:
            what: for messages, such as "dispatch of layer 3, micro-batch 0".
            fn: returns (outputs, work handles to wait for; empty on CUDA).
            keep: what `fn` reads, kept alive until `InFlight.wait`.
            mark: of this comm stream, taken behind all that `fn` reads; used up. None: wait for everything issued.

        Raises:
            PeerError: a collective failed at once, as NCCL's do once a rank is known to be lost; another rank raised;
                under MOE_EP_DEBUG, another rank is about to launch something else.
        """
        alarm, order = find_alarm(self.group), order_of(self.group)
        if alarm is not None:
            alarm.check()
        if order is not None:
            order.enter(what, "" if self.group is None else self.group.group_desc, keep)
        if alarm is None:
            return self._launch(what, fn, keep, mark)
        noted = alarm.watched.noted
        flight = self._launch(what, fn, keep, mark)
        alarm.launched(what, self.device, since=noted)
        flight.alarm = alarm
        return flight

    def _launch(self, what: str, fn: Launch, keep: Sequence[Any], mark: Mark | None) -> InFlight:
        with transfer_range("launch", what):
            try:
                return self.issue(what, fn, keep, mark)
            except RuntimeError as err:
                if is_lost_peer(err):
                    raise told(lost_peer(what, err), self.group) from err
                raise

    def issue(self, what: str, fn: Launch, keep: Sequence[Any] = (), mark: Mark | None = None) -> InFlight:
        """As `launch`, whatever other ranks say: also what completes the communication of a rank that has raised."""
        if self.stream is None:
            results, works = fn()
            return InFlight(what, results, works, None, keep, self.group)
        # what the context managers of torch do, without asking for the current stream and device time and again
        if torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self.issue(what, fn, keep, mark)
        caller = current_stream(self.device.index)
        if waits_made.at_launch:
            event = self._issued if mark is None else mark.event
            assert event is not None, "no event"
            if mark is None:
                event.record(caller)
            self.stream.wait_event(event)
        torch.cuda.set_stream(self.stream)
        try:
            with delays_around(self.group):
                results, works = fn()
            event = torch.cuda.Event()
            event.record(self.stream)
        finally:
            torch.cuda.set_stream(caller)
            if mark is not None:  # the launch has its memory
                self._marks.discard(mark)
                mark.kept.clear()
        return InFlight(what, results, works, event, keep, self.group, self._marks)


def comm_stream(device: torch.device, group: dist.ProcessGroup | None, *, early: bool = False) -> CommStream:
    """The comm stream of (device, group), made at first use.

    Args:
        device: where the tensors lie.
        group: what the collectives are issued on.
        early: a stream beside the first, for what the host waits for; with a group of its own (see `open_twin`), or it
            would stand in line behind rows all the same.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (device, "" if group is None else group.group_name, early)
    if key not in _streams:
        _streams[key] = CommStream(device, group)
    return _streams[key]


def any_stream(device: torch.device, group: dist.ProcessGroup) -> CommStream:
    """The stream that a group's communication runs on, be it an early one."""
    early = (device, group.group_name, True) in _streams
    return comm_stream(device, group, early=early)


def forget_streams(group: dist.ProcessGroup) -> None:
    """Drop the comm streams of a group that is closed."""
    for key in [key for key in _streams if key[1] == group.group_name]:
        del _streams[key]


def is_async(device: torch.device) -> bool:
    """Whether a collective must be started with async_op=True: on CPU; a CUDA stream is asynchronous anyway."""
    return device.type != "cuda"

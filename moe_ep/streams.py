"""Communication beside computation: the comm stream, work in flight, lanes.

The only module, besides the dispatchers and the replica transport, that knows CUDA streams and events. On CPU the same
code runs without streams: a launch collects asynchronous work handles, a wait waits for them.

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

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .alarm import Alarm, find_alarm
from .debug import debug
from .errors import lost_peer
from .order import order_of, told
from .peers import is_lost_peer
from .race import delays_around
from .tracing import transfer_range

Launch = Callable[[], tuple[tuple[Tensor, ...], list[Any]]]

# One comm stream per (device, group): dispatchers that share a group share its order of communication. A second one for
# what has to arrive early.
_streams: dict[tuple[torch.device, str, bool], CommStream] = {}


class _Waits(threading.local):
    """Which waits between streams this thread makes: all, but in a step of a schedule that has fewer."""

    at_launch = True
    at_arrival = True


_waits = _Waits()


@contextlib.contextmanager
def making(*, at_launch: bool, at_arrival: bool) -> Iterator[None]:
    """What a schedule says of a step's waits.

    Args:
        at_launch: a communication waits for everything issued on the caller's stream so far.
        at_arrival: the caller's stream, or the host, waits for a communication.
    """
    before = _waits.at_launch, _waits.at_arrival
    _waits.at_launch, _waits.at_arrival = at_launch, at_arrival
    try:
        yield
    finally:
        _waits.at_launch, _waits.at_arrival = before


# what was current before, by device and handle: torch makes a new object at every question
_known: dict[tuple[int, int], Any] = {}


def _current_stream(index: int) -> Any:
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
        if _waits.at_arrival:
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
            _current_stream(torch.cuda.current_device()).wait_event(self._event)
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as err:
            if self.alarm is not None:
                self.alarm.explain(err)
            raise told(lost_peer(self.what, err), self.group) from err

    def wait_on_host(self) -> tuple[Tensor, ...]:
        """As `wait`, and block the host until the results can be read there."""
        if self._event is not None and _waits.at_arrival:
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
        _current_stream(torch.cuda.current_device()).wait_event(self._event)

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
        mark.event.record(_current_stream(self.device.index))
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
        noted = alarm.noted
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
        caller = _current_stream(self.device.index)
        if _waits.at_launch:
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


class Lane:
    """What one in-flight micro-batch needs for itself: a host buffer for counts, and the event of its last writer."""

    def __init__(self, num_ints: int, pinned: bool) -> None:
        with torch.inference_mode(
            False
        ):  # lanes outlive the micro-batch: one made in an evaluation serves training too
            self.host = torch.empty(num_ints, dtype=torch.int64, pin_memory=pinned)
        self.event: Any = None

    def idle(self) -> bool:
        """Whether nothing on the device may still write the buffer."""
        return self.event is None or self.event.query()


class Loan:
    """Returns a lane to its pool, once."""

    __slots__ = ("_free", "_lane")

    def __init__(self, free: list[Lane], lane: Lane) -> None:
        self._free = free
        self._lane: Lane | None = lane

    def __call__(self) -> None:
        """Return it."""
        lane, self._lane = self._lane, None
        if lane is not None:
            self._free.append(lane)

    __del__ = __call__


class LanePool:
    """Lanes of one dispatcher. A lane comes back when its ticket is done or dies, whatever stage that is in."""

    def __init__(self, num_ints: int) -> None:
        self._num_ints = num_ints
        self._free: list[Lane] = []
        self.num_lanes = 0

    def borrow(self, device: torch.device) -> tuple[Lane, Loan]:
        """A lane, and the loan that returns it when it is called, or when nobody holds it any more."""
        lane = next((lane for lane in self._free if lane.idle()), None)
        if lane is None:
            lane = Lane(self._num_ints, device.type == "cuda")
            self.num_lanes += 1
        else:
            self._free.remove(lane)
        if debug().race_seed is not None:
            lane.host.fill_(-1)  # what is read too early must not look right
        return lane, Loan(self._free, lane)

    @property
    def num_free(self) -> int:
        """Lanes that no ticket holds."""
        return len(self._free)

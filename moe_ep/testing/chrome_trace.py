"""A profiler's trace as torch exports it (Chrome's JSON, also gzipped), read for what tests and tools ask of it.

    with torch.profiler.profile() as profile:    # CPU and, where there is a GPU, CUDA activities
        ...
    trace = trace_of(profile)                    # or read_trace(path) of what export_chrome_trace wrote

Times are microseconds since the trace's own zero; `zero_ns` tells the zeros of several ranks apart.
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ..errors import MoEError

Thread = tuple[Any, Any]  # process and thread; of what runs on a GPU device and stream
T = TypeVar("T")


class TraceError(MoEError, ValueError):
    """A file that is no trace, or a trace that lacks what is asked of it."""


class Event(NamedTuple):
    """Something with a beginning and an end."""

    name: str
    category: str
    thread: Thread
    start: float
    end: float
    args: dict[str, Any]

    @property
    def us(self) -> float:
        """How long it lasted."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The complete events of one rank.

    Attributes:
        path: where it was read, for messages.
        rank, world_size: as torch.distributed had them; None where it did not run.
        zero_ns: time of the trace's zero on the machine's clock.
        events: by category, in the order of their beginnings.
        forward_of: (thread, start) of an operation of backward to those of its operation of forward.
    """

    path: Path
    rank: int | None
    world_size: int | None
    zero_ns: int
    events: dict[str, list[Event]]
    forward_of: dict[tuple[Thread, float], tuple[Thread, float]] = field(default_factory=dict)

    def of(self, *categories: str) -> list[Event]:
        """Events of these categories, in the order of their beginnings."""
        found = [event for category in categories for event in self.events.get(category, ())]
        return found if len(categories) == 1 else sorted(found, key=lambda event: event.start)


class Nested(Generic[T]):
    """Which of the ranges of one thread, properly nested, is the innermost one at a time."""

    def __init__(self, ranges: Iterable[tuple[float, float, T]]) -> None:
        self._times: list[float] = []
        self._values: list[T | None] = []
        open_: list[tuple[float, T]] = []
        for start, end, value in sorted(ranges, key=lambda each: (each[0], -each[1])):
            self._close(open_, start)
            open_.append((end, value))
            self._note(start, value)
        self._close(open_, float("inf"))

    def _close(self, open_: list[tuple[float, T]], until: float) -> None:
        while open_ and open_[-1][0] <= until:
            end, _ = open_.pop()
            self._note(end, open_[-1][1] if open_ else None)

    def _note(self, time: float, value: T | None) -> None:
        self._times.append(time)
        self._values.append(value)

    def at(self, time: float) -> T | None:
        """The value of the innermost range, None outside of all."""
        place = bisect_right(self._times, time) - 1
        return None if place < 0 else self._values[place]


def trace_of(profile: torch.profiler.profile) -> Trace:
    """The trace of a profiler that has stopped. Torch exports a trace once, so it cannot be exported again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return read_trace(path)


def read_trace(path: Path) -> Trace:
    """Read a .json or .json.gz file.

    Raises:
        TraceError: it cannot be read, or is no trace with events of a duration.
    """
    content = _content(path)
    listed = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise TraceError(f"{path} has no list traceEvents, so it is no profiler's trace; give what torch exported")
    try:
        events = [_event(each) for each in listed if each.get("ph") == "X"]
        links = _links(listed)
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        raise TraceError(
            f"{path} has an event that cannot be read ({type(err).__name__}: {err}); record it again"
        ) from err
    if not events:
        raise TraceError(f"{path} has no event with a duration: nothing ran while the profiler did; record it again")
    by_category: dict[str, list[Event]] = {}
    for event in sorted(events, key=lambda each: (each.start, -each.end)):
        by_category.setdefault(event.category, []).append(event)
    rank, world_size = _rank(path, content)
    zero = content.get("baseTimeNanoseconds", 0)
    return Trace(
        path=path, rank=rank, world_size=world_size, zero_ns=zero, events=by_category, forward_of=links
    )  # fmt: skip


def _content(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, zlib.error) as err:
        raise TraceError(f"{path} cannot be read ({err}); give a trace that torch exported") from err
    except ValueError as err:
        raise TraceError(f"{path} is no JSON ({err}); the run that wrote it was cut off, or it is no trace") from err


def _event(each: dict[str, Any]) -> Event:
    start = float(each["ts"])
    return Event(
        name=str(each["name"]),
        category=str(each.get("cat", "")),
        thread=(each["pid"], each["tid"]),
        start=start,
        end=start + float(each.get("dur", 0)),
        args=dict(each.get("args") or {}),
    )


def _links(listed: Sequence[dict[str, Any]]) -> dict[tuple[Thread, float], tuple[Thread, float]]:
    """Flow events that lead from forward ("s") to backward ("f")."""
    ends: dict[str, dict[Any, tuple[Thread, float]]] = {"s": {}, "f": {}}
    for each in listed:
        if each.get("cat") == "fwdbwd" and each.get("ph") in ends:
            ends[each["ph"]][each["id"]] = ((each["pid"], each["tid"]), float(each["ts"]))
    return {place: ends["s"][number] for number, place in ends["f"].items() if number in ends["s"]}


def _rank(path: Path, content: dict[str, Any]) -> tuple[int | None, int | None]:
    """Rank and number of ranks; without torch.distributed the number in the file's name, if there is one."""
    info = content.get("distributedInfo") or {}
    if isinstance(info.get("rank"), int):
        return info["rank"], info.get("world_size")
    named = re.search(r"rank[-_]?(\d+)", path.name)
    return (None if named is None else int(named[1])), None

"""Whose work something in a trace is: named ranges for what runs in them, the autograd engine's links for backward."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

from moe_ep.testing.chrome_trace import Event, Nested, Thread, Trace
from moe_ep.tracing import Place, parse_place

FORWARD, BACKWARD, RECOMPUTE = "fwd", "bwd", "recompute"
_ENGINE = "autograd::engine::evaluate_function"


class Label(NamedTuple):
    """Whose work something is. `layer` None: a dense layer. `direction`: fwd, bwd or recompute (forward once more)."""

    stage: str
    layer: int | None
    micro_batch: int
    direction: str


class Work(NamedTuple):
    """Something that ran: when the host called for it, and on which stream (CPU: thread) it ran from when to when."""

    called: float
    start: float
    end: float
    stream: Thread
    label: Label | None
    group: str = ""


@dataclass(slots=True)
class Transfer:
    """One communication: its launch range, what ran because of it, and the range in which it was awaited (if any)."""

    label: Label
    launch: Event
    works: list[Work] = field(default_factory=list)
    wait: Event | None = None


class Names:
    """Which named range, and which node of the autograd engine, a time on a host thread lies in."""

    def __init__(self, trace: Trace) -> None:
        ranges: dict[Thread, list[tuple[float, float, tuple[Place, Event]]]] = {}
        for event in trace.of("user_annotation"):
            place = parse_place(event.name)
            if place is not None:
                ranges.setdefault(event.thread, []).append((event.start, event.end, (place, event)))
        self.ranges = {thread: [each[2] for each in mine] for thread, mine in ranges.items()}
        self._named = {thread: Nested(mine) for thread, mine in ranges.items()}
        self._engine = {thread: Nested(mine) for thread, mine in self._nodes(trace).items()}

    def _nodes(self, trace: Trace) -> dict[Thread, list[tuple[float, float, tuple[Place | None]]]]:
        """The engine's calls of nodes, each with the range that its forward stood in."""
        linked: dict[Thread, list[tuple[float, Place | None]]] = {}
        for (thread, start), (forward_thread, forward_start) in trace.forward_of.items():
            named = self._named.get(forward_thread)
            found = None if named is None else named.at(forward_start)
            linked.setdefault(thread, []).append((start, None if found is None else found[0]))
        for mine in linked.values():
            mine.sort(key=lambda each: each[0])
        nodes: dict[Thread, list[tuple[float, float, tuple[Place | None]]]] = {}
        for event in trace.of("cpu_op"):
            if event.name.startswith(_ENGINE):
                mine = linked.get(event.thread, [])
                first = bisect_left(mine, event.start, key=lambda each: each[0])
                place = mine[first][1] if first < len(mine) and mine[first][0] < event.end else None
                nodes.setdefault(event.thread, []).append((event.start, event.end, (place,)))
        return nodes

    def at(self, thread: Thread, time: float) -> tuple[Label | None, Event | None]:
        """Label, and the range where one of this very thread says so."""
        node = self._node(thread, time)
        named = self._named.get(thread)
        found = None if named is None else named.at(time)
        if found is not None:
            return self.label(*found), found[1]
        if node is not None and node[0] is not None:
            return _label(node[0], BACKWARD), None
        return None, None

    def label(self, place: Place, event: Event) -> Label:
        """Of a range: a forward one that the engine runs is a recompute."""
        again = self._node(event.thread, event.start) is not None
        return _label(place, BACKWARD if place.backward else RECOMPUTE if again else FORWARD)

    def _node(self, thread: Thread, time: float) -> tuple[Place | None] | None:
        engine = self._engine.get(thread)
        return None if engine is None else engine.at(time)


def _label(place: Place, direction: str) -> Label:
    return Label(place.stage, place.layer, place.micro_batch, direction)

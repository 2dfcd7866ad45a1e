"""The steps that a schedule puts in order: where each runs, what it waits for, what it reads and writes."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import NamedTuple


class Stream(enum.StrEnum):
    """Where a step runs. A host step blocks the host: whatever is issued behind it runs after it.

    Counts are said to travel on a side stream. A back end that sends them on the comm stream adds order and takes none
    away, so what is proved here holds for it, too.
    """

    COMPUTE = "compute"
    COMM = "comm"
    SIDE = "side"
    HOST = "host"


class Kind(enum.StrEnum):
    """What a step does with its micro-batch.

    `counts` and `pack` happen inside `dispatch_preprocess`, `read` (counts on the host) at the start of `dispatch`; a
    back end without them has nothing to do there.
    """

    RESOLVE = "resolve"  # combine_postprocess of the layer before, plus residual: the layer's input
    ATTENTION = "attention"
    ROUTE = "route"  # router, order of the routes
    COUNTS = "counts"
    PACK = "pack"
    READ = "read"
    DISPATCH = "dispatch"
    EXPERTS = "experts"  # dispatch_postprocess, experts, combine_preprocess
    COMBINE = "combine"
    SHARED = "shared"  # shared experts or the MLP of a dense layer, and the residual sum


class Key(NamedTuple):
    """Names a step. `layer` counts from the layer that the schedule is for: -1 is the one before."""

    kind: Kind
    micro_batch: int
    layer: int = 0
    backward: bool = False

    def __str__(self) -> str:
        return f"{'d' if self.backward else ''}{self.kind} {self.micro_batch} of layer {self.layer}"


class Value(NamedTuple):
    """A tensor, or a group of them, that a step writes and others read; `grad_by`: that step's part of its gradient."""

    name: str
    micro_batch: int
    layer: int = 0
    grad_by: Kind | None = None


# Staging memory of a lane, used again by the same micro-batch of the next layer; everything else is memory of its own.
# `source` stands for rows received into memory of their own, which the experts keep for backward.
LANE_VALUES = ("counts", "dispatch.send", "dispatch.recv", "combine.send", "combine.recv")
INTEGERS = ("ids", "counts", "splits")  # no gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step.

    Attributes:
        key: its name.
        stream: where it runs; steps of a stream run in the order of the schedule.
        waits: steps of other streams that must have ended before this one starts.
        reads, writes: what it touches.
        holds: what came from the comm stream and is read by a step issued before this one that it does not wait for;
            it keeps that memory from being handed out again until it has its own.
    """

    key: Key
    stream: Stream
    waits: tuple[Key, ...] = ()
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    holds: tuple[Value, ...] = ()

    def moved(self, layers: int) -> Step:
        """The same step, `layers` layers further on."""
        return replace(
            self,
            key=self.key._replace(layer=self.key.layer + layers),
            waits=tuple(w._replace(layer=w.layer + layers) for w in self.waits),
            reads=tuple(v._replace(layer=v.layer + layers) for v in self.reads),
            writes=tuple(v._replace(layer=v.layer + layers) for v in self.writes),
            holds=tuple(v._replace(layer=v.layer + layers) for v in self.holds),
        )


class Link(NamedTuple):
    """A wait between streams inside one micro-batch: who waits, and for whom."""

    waits: Kind
    awaited: Kind


class _Row(NamedTuple):
    stream: Stream
    waits: str
    reads: str
    writes: str


# names in `reads` with a leading "<" belong to the layer before, as does the wait of `resolve`
_TABLE = {
    Kind.RESOLVE: _Row(Stream.COMPUTE, "<combine", "<combine.recv <base", "x"),
    Kind.ATTENTION: _Row(Stream.COMPUTE, "", "x", "h n"),
    Kind.ROUTE: _Row(Stream.COMPUTE, "", "n", "ids weights"),
    Kind.COUNTS: _Row(Stream.SIDE, "route", "ids", "counts"),
    Kind.PACK: _Row(Stream.COMPUTE, "", "n ids weights", "dispatch.send"),
    Kind.READ: _Row(Stream.HOST, "counts", "counts", "splits"),
    Kind.DISPATCH: _Row(Stream.COMM, "pack", "dispatch.send splits", "dispatch.recv source"),
    Kind.EXPERTS: _Row(Stream.COMPUTE, "dispatch", "dispatch.recv source splits", "combine.send"),
    Kind.COMBINE: _Row(Stream.COMM, "experts", "combine.send splits", "combine.recv"),
    Kind.SHARED: _Row(Stream.COMPUTE, "", "h n", "base"),
}
FROM_COMM = {name for row in _TABLE.values() if row.stream is Stream.COMM for name in row.writes.split()}


def step_of(kind: Kind, micro_batch: int) -> Step:
    """The step of this kind, with what it waits for, reads and writes."""
    stream, waits, reads, writes = _TABLE[kind]

    def place(name: str) -> tuple[str, int, int]:
        return name.removeprefix("<"), micro_batch, -1 if name.startswith("<") else 0

    named = [place(name) for name in waits.split()]
    return Step(
        key=Key(kind, micro_batch),
        stream=stream,
        waits=tuple(Key(Kind(name), i, layer) for name, i, layer in named),
        reads=tuple(Value(*place(name)) for name in reads.split()),
        writes=tuple(Value(*place(name)) for name in writes.split()),
    )

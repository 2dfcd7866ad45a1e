"""The figures of one rank's steps: what each communication took, how much of it was exposed, what waited for it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from moe_ep.testing.chrome_trace import Thread, TraceError

from .intervals import Interval, difference, total, union
from .trace_labels import Label, Transfer, Work
from .trace_parts import RankParts, Step


class Key(NamedTuple):
    """Names a communication in a step alike on all ranks: the `order`-th one with this label."""

    label: Label
    order: int


@dataclass(slots=True, kw_only=True)
class Figures:
    """Of one communication, in microseconds; None where there is nothing to tell (CPU, no wait, one rank).

    Attributes:
        comm, exposed: when it ran, and when it ran while this rank computed nothing.
        unfed: the part of `exposed` in which the compute stream was through with all that the host had issued.
        group: the ranks that took part, as the trace names them.
        start_delay, late, compute_wait, peer_wait: see `tools.overlap`.
    """

    comm: list[Interval]
    exposed: list[Interval]
    unfed: list[Interval] | None = None
    group: str = ""
    start_delay: float | None = None
    late: float | None = None
    compute_wait: float | None = None
    peer_wait: float | None = None


@dataclass(slots=True, kw_only=True)
class RankStep:
    """One step of one rank, from `start` until the host and all that it launched were done.

    Attributes:
        transfers: communications of the dispatchers.
        compute, other: computation, and communication of others.
        syncs: where the host stood still, None on CPUs.
    """

    rank: int
    number: int | None
    start: float
    end: float
    transfers: dict[Key, Figures]
    compute: list[Work]
    other: list[Work]
    syncs: list[Label | None] | None

    @property
    def us(self) -> float:
        """How long it took."""
        return self.end - self.start

    @property
    def comm(self) -> list[Interval]:
        """When communication ran."""
        return union(each for figures in self.transfers.values() for each in figures.comm)

    @property
    def exposed(self) -> list[Interval]:
        """When communication ran alone."""
        return union(each for figures in self.transfers.values() for each in figures.exposed)

    @property
    def unfed(self) -> list[Interval] | None:
        """When communication ran alone because the host was late; None on CPUs."""
        known = [figures.unfed for figures in self.transfers.values() if figures.unfed is not None]
        return union(each for intervals in known for each in intervals) if known else None

    def of_rows(self, which: Literal["comm", "exposed"]) -> list[Interval]:
        """The same without what travels ahead of the rows, such as counts, and without copies of experts."""
        rows = [figures for key, figures in self.transfers.items() if _is_of_rows(key.label.stage)]
        return union(each for figures in rows for each in getattr(figures, which))

    @property
    def peer_wait(self) -> float | None:
        """Sum of the waits for slower ranks."""
        known = [figures.peer_wait for figures in self.transfers.values() if figures.peer_wait is not None]
        return sum(known) if known else None


def _is_of_rows(stage: str) -> bool:
    return not stage.startswith("exchange of") and stage not in ("comparison of plans", "weight_sync", "grad_reduce")


def rank_steps(rank: int, parts: RankParts, chosen: tuple[int, int] | None) -> list[RankStep]:
    """All steps of a rank, or those from chosen[0] to chosen[1].

    Raises:
        TraceError: there is none of them.
    """
    steps = [s for s in parts.steps if chosen is None or (s.number is not None and chosen[0] <= s.number <= chosen[1])]
    if not steps:
        assert chosen is not None, "a trace has one step at least"
        present = ", ".join(str(step.number) for step in parts.steps if step.number is not None) or "none with a number"
        raise TraceError(f"{parts.trace.path} has no step from {chosen[0]} to {chosen[1]}; it has {present}")
    figures = _Figures(parts)
    return [_rank_step(rank, parts, step, figures) for step in steps]


def _rank_step(rank: int, parts: RankParts, step: Step, figures: _Figures) -> RankStep:
    mine = [each for each in parts.transfers if step.start <= each.launch.start < step.end]
    compute, other = (
        [work for work in works if step.start <= work.called < step.end] for works in (parts.compute, parts.other)
    )
    works = [*compute, *other, *(work for each in mine for work in each.works)]
    host = [] if step.number is None else [step.start, step.end]
    transfers: dict[Key, Figures] = {}
    seen: dict[Label, int] = {}
    for each in mine:
        seen[each.label] = seen.get(each.label, -1) + 1
        transfers[Key(each.label, seen[each.label])] = figures.of(each)
    return RankStep(
        rank=rank,
        number=step.number,
        start=min([*host, *(work.called for work in works)], default=0.0),
        end=max([*host, *(work.end for work in works)], default=0.0),
        transfers=transfers,
        compute=compute,
        other=other,
        syncs=None
        if parts.syncs is None
        else [who for call, who in parts.syncs if step.start <= call.start < step.end],
    )


class _Figures:
    """Measures the communications of one rank."""

    def __init__(self, parts: RankParts) -> None:
        self.on_gpu = parts.on_gpu
        self.busy = union((work.start, work.end) for work in parts.compute)
        by_stream = _by_stream(parts.compute).values()
        main = max(by_stream, key=lambda mine: sum(work.end - work.start for work in mine), default=[])
        self.queue = sorted(main, key=lambda work: work.called)
        self.ends = list(accumulate((work.end for work in self.queue), max))
        self.unfed = _unfed(main)
        self.comm = _by_stream(work for each in parts.transfers for work in each.works)

    def of(self, transfer: Transfer) -> Figures:
        comm = union((work.start, work.end) for work in transfer.works)
        group = next((work.group for work in transfer.works if work.group), "")
        figures = Figures(comm=comm, exposed=difference(comm, self.busy), group=group)
        if not comm:
            return figures
        first = min(transfer.works, key=lambda work: work.start)
        figures.start_delay = first.start - first.called
        if not self.on_gpu:
            figures.compute_wait = _host_wait(transfer, comm)
            return figures
        figures.unfed = difference(figures.exposed, difference(figures.exposed, self.unfed))
        figures.late = max(0.0, first.start - self._ready(transfer, first))
        figures.compute_wait = self._stream_wait(transfer, comm[-1][1])
        return figures

    def _ready(self, transfer: Transfer, first: Work) -> float:
        """When the first kernel could have started, as far as this GPU is concerned."""
        issued = bisect_right(self.queue, transfer.launch.start, key=lambda work: work.called)
        stream = self.comm[first.stream]
        before = bisect_left(stream, first.start, key=lambda work: work.start)
        return max(first.called, *self.ends[max(issued - 1, 0) : issued], *(w.end for w in stream[:before][-1:]))

    def _stream_wait(self, transfer: Transfer, end: float) -> float | None:
        """Of the compute stream, in front of the first kernel issued after the wait, until `end` of the transfer."""
        if transfer.wait is None:
            return None
        place = bisect_right(self.queue, transfer.wait.end, key=lambda work: work.called)
        if place == len(self.queue):
            return None
        following = self.queue[place]
        idle_since = max(following.called, *self.ends[max(place - 1, 0) : place])
        return max(0.0, min(following.start, end) - idle_since)


def _unfed(stream: Sequence[Work]) -> list[Interval]:
    """When a stream was through with all that had been issued to it, until the host called for the next kernel."""
    gaps = [(before.end, min(after.called, after.start)) for before, after in pairwise(stream)]
    return union(gaps)


def _host_wait(transfer: Transfer, comm: Sequence[Interval]) -> float | None:
    """On CPUs the host itself waits."""
    if transfer.wait is None:
        return None
    return total(comm) - total(difference(comm, [(transfer.wait.start, transfer.wait.end)]))


def _by_stream(works: Iterable[Work]) -> dict[Thread, list[Work]]:
    """Works of each stream in the order in which they ran."""
    streams: dict[Thread, list[Work]] = {}
    for work in sorted(works, key=lambda work: work.start):
        streams.setdefault(work.stream, []).append(work)
    return streams

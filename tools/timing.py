"""How long something takes on the slowest rank: marks on the device, a cold L2, a common start, A and B in turn.

On CUDA a mark is an event on the current stream, on CPU the host's clock. Before each region the L2 cache is flushed
(on CUDA), everything issued is waited for and all ranks meet in a barrier. The time of an iteration is that of its
slowest rank, taken before any percentile.

On CUDA the host gets a head start, as it has in training: the device sleeps for a few milliseconds and meets the other
devices before a region begins, so that what was issued meanwhile runs without a gap. What waits for the host in between
(counts that it reads) still shows, from the moment of the wait on. Regions of several layers and micro-batches get as
many times as much. One in which the host never waits counts for no less than the host takes to issue it: step after
step it is ahead of the device only as long as it is the faster one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU to date
_HEAD_START_CYCLES = 8_000_000  # about 4 ms, in which a slow host issues a layer forward and backward
BEGIN, MARK = "stopwatch begin", "stopwatch mark"


class Stopwatch:
    """Regions of one iteration. `begin` opens a region; each `mark` gives the time since it opened a name.

    Args:
        device, group: of this rank.
        layers: that a region holds, each of several micro-batches counted again.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None, *, layers: int = 1) -> None:
        self.device, self.group, self.layers = device, group, layers
        cuda = device.type == "cuda"
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device) if cuda else None
        self._token = torch.zeros(1, device=device) if cuda else None
        self._start: Any = None
        self._host_start = 0.0
        self._marks: dict[str, tuple[Any, Any]] = {}
        self._host_us: dict[str, float] = {}  # that the host took to issue the work before a mark
        self.traced = False

    def begin(self) -> None:
        """Flush, wait for the device, meet the other ranks, start; on CUDA behind the host's head start."""
        if self._flush is not None:
            self._flush.zero_()
            torch.cuda.synchronize(self.device)
        if self.group is not None:
            dist.barrier(self.group)
        if self._token is not None:
            torch.cuda.synchronize(self.device)  # NCCL's barrier only waits on the device
            torch.cuda._sleep(_HEAD_START_CYCLES * self.layers)
            if self.group is not None:
                dist.all_reduce(self._token, group=self.group)  # hosts leave a barrier apart: devices start together
        self._trace(BEGIN)
        self._start, self._host_start = self._now(), time.perf_counter()

    def mark(self, name: str, *, host_waits: bool = True) -> None:
        """Note the time since `begin` under a name that is new in this iteration.

        `host_waits`: whether the host has waited for the device since then, so that its own time says nothing.
        """
        assert self._start is not None and name not in self._marks, f"mark {name!r} without begin, or twice"
        self._marks[name] = (self._start, self._now())
        if not host_waits:
            self._host_us[name] = (time.perf_counter() - self._host_start) * 1e6
        self._trace(MARK)

    def take(self) -> dict[str, float]:
        """Microseconds by name; waits for the device and starts a new iteration."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            device_us = {name: start.elapsed_time(end) * 1e3 for name, (start, end) in self._marks.items()}
            found = {name: max(us, self._host_us.get(name, 0.0)) for name, us in device_us.items()}
        else:
            found = {name: (end - start) * 1e6 for name, (start, end) in self._marks.items()}
        self._start, self._marks, self._host_us = None, {}, {}
        return found

    def _trace(self, what: str) -> None:
        """A point in the profiler's trace, so that what happens between regions can be told apart."""
        if self.traced:
            with torch.profiler.record_function(what):
                pass

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Untimed(Stopwatch):
    """For a run whose time nobody asks for."""

    def __init__(self) -> None:
        pass

    def begin(self) -> None:
        """Nothing."""

    def mark(self, name: str, *, host_waits: bool = True) -> None:
        """Nothing."""


@dataclass(slots=True, kw_only=True)
class Series:
    """What one candidate did in the timed iterations.

    Attributes:
        us: microseconds of this rank by mark, one per iteration.
        peak_bytes: most device memory that an iteration had allocated on top of what stood before it; None on CPU.
    """

    us: dict[str, list[float]]
    peak_bytes: int | None = None


K = TypeVar("K")
Body = Callable[[int, Stopwatch], None]


def alternate(
    bodies: Mapping[K, Body],
    iterations: range,
    watch: Stopwatch,
    before_each: Callable[[K], None],
    after_last: Callable[[K], None],
) -> dict[K, Series]:
    """Run the candidates in turn (A B A B ...), each iteration once for all of them.

    Args:
        bodies: name to body(iteration, watch), the same names in the same order on every rank.
        iterations: numbers handed to the bodies.
        watch: used by all of them.
        before_each: called with each name before memory is looked at, to drop what stands from its last iteration.
        after_last: called with each name right behind its last iteration, to look at the results.
    """
    found = {name: Series(us={}) for name in bodies}
    for iteration in iterations:
        for name, body in bodies.items():
            before_each(name)
            before = _reset_peak(watch.device)
            body(iteration, watch)
            for mark, us in watch.take().items():
                found[name].us.setdefault(mark, []).append(us)
            if before is not None:
                peak = torch.cuda.max_memory_allocated(watch.device) - before
                found[name].peak_bytes = max(peak, found[name].peak_bytes or 0)
            if iteration == iterations[-1]:
                after_last(name)
    return found


def _reset_peak(device: torch.device) -> int | None:
    """Bytes allocated now, with the peak set back to them; None on CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def largest(values: Tensor, group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """Elementwise maximum over the ranks, on the host."""
    moved = values.to(device)
    if group is not None:
        dist.all_reduce(moved, op=dist.ReduceOp.MAX, group=group)
    return moved.cpu()


def slowest_rank(
    us: Mapping[str, Sequence[float]], group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, list[float]]:
    """Of each iteration the time of its slowest rank, by mark."""
    worst = largest(torch.tensor([list(times) for times in us.values()], dtype=torch.float64), group, device)
    return dict(zip(us, worst.tolist(), strict=True))


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    """The 10th, 50th and 90th, each a time that was measured (nearest rank)."""
    ordered = sorted(times)
    p10, p50, p90 = (ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.5, 0.9))
    return p10, p50, p90

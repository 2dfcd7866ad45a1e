"""One iteration under the profiler: what communication took, what of it nothing covered, how long the GEMMs took."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_ep.testing.chrome_trace import Event, Trace, read_trace

from .intervals import difference, total, union
from .timing import BEGIN, MARK, Body, Stopwatch, blocking_calls

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_GROUPED_GEMM = ("GroupProblemShape", "GemmSm")  # of CUTLASS behind torch's grouped_mm, of quack


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """Figures of one rank, None where there is no device.

    Attributes:
        comm_us: time in which anything runs on a stream that is not the computation's.
        exposed_us: the part of it in which no kernel of the computation runs.
        gemm_us: summed duration of the experts' grouped GEMMs; None where none is recognised.
        comm_blocks: thread blocks of the longest kernel of communication.
        host_syncs: blocking calls.
    """

    comm_us: float | None = None
    exposed_us: float | None = None
    gemm_us: float | None = None
    comm_blocks: int | None = None
    host_syncs: int | None = None


def trace_once(body: Body, iteration: int, watch: Stopwatch, path: Path | None) -> Traced:
    """Run an iteration under the profiler; the trace stays at `path`, if there is one."""
    cuda = watch.device.type == "cuda"
    if not cuda and path is None:
        return Traced()
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if cuda else []
    watch.traced = True
    with torch.profiler.profile(activities=activities) as profile:
        body(iteration, watch)
        watch.take()
    watch.traced = False
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "trace.json" if path is None else path
        where.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(where))
        return figures(read_trace(where)) if cuda else Traced()


def figures(trace: Trace) -> Traced:
    """Of what ran on the device for the regions between the stopwatch's marks."""
    calls = [(event.name, event.start) for event in trace.of("cuda_runtime", "cuda_driver", "user_annotation")]
    host_syncs = blocking_calls(calls)
    kernels = _launched_inside(trace)
    by_stream: dict[int, list[Event]] = {}
    for event in kernels:
        by_stream.setdefault(int(event.args["stream"]), []).append(event)
    compute = max(by_stream, key=lambda stream: len(by_stream[stream]), default=-1)  # communication is few kernels
    gemms = [event.us for event in kernels if any(name in event.name for name in _GROUPED_GEMM)]
    others = [event for stream, events in by_stream.items() if stream != compute for event in events]
    comm = union(_spans(others))
    return Traced(
        comm_us=total(comm),
        exposed_us=total(difference(comm, union(_spans(by_stream.get(compute, []))))),
        gemm_us=sum(gemms) if gemms else None,
        comm_blocks=_blocks(others),
        host_syncs=host_syncs,
    )


def _blocks(events: Iterable[Event]) -> int | None:
    kernels = [event for event in events if "grid" in event.args]
    return math.prod(max(kernels, key=lambda event: event.us).args["grid"]) if kernels else None


def _spans(events: Iterable[Event]) -> list[tuple[float, float]]:
    return [(event.start, event.end) for event in events]


def _launched_inside(trace: Trace) -> list[Event]:
    """What was launched between a begin and the last mark of its region."""
    regions: list[list[float]] = []
    for event in trace.of("user_annotation"):
        if event.name == BEGIN:
            regions.append([event.start, event.start])
        elif event.name == MARK and regions:
            regions[-1][1] = event.end
    launches = {
        event.args["correlation"]
        for event in trace.of("cuda_runtime", "cuda_driver")
        if "correlation" in event.args and any(start <= event.start <= end for start, end in regions)
    }
    return [event for event in trace.of(*_ON_DEVICE) if event.args.get("correlation") in launches]

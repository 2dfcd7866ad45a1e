"""One iteration under the profiler: what communication took, what of it nothing covered, how long the GEMMs took."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_ep.testing.chrome_trace import Event, Trace, read_trace
from moe_ep.testing.host_syncs import blocking_calls
from moe_ep.tracing import parse_place, parse_step

from .intervals import total
from .rank_steps import rank_steps
from .timing import BEGIN, MARK, Body, Stopwatch
from .trace_parts import take_apart

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_GROUPED_GEMM = ("GroupProblemShape", "GemmSm")  # of CUTLASS behind torch's grouped_mm, of quack


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """Figures of one rank, None where there is no device, or nothing of the kind ran.

    Attributes:
        comm_us: time in which rows travelled (exchanges of counts are left out, see `tools.rank_steps`).
        exposed_us: the part of it in which this rank computed nothing.
        gemm_us: summed duration of the experts' grouped GEMMs.
        comm_blocks: thread blocks of the longest kernel beside the computation's stream.
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


def trace_file(what: str, rank: int) -> str:
    """Name of a rank's trace: letters, digits, '.', '_' and '-' alone, so that any file system and tool takes it."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{what}-rank{rank}") + ".json.gz"


def figures(trace: Trace) -> Traced:
    """Of what was issued between the stopwatch's begin and its last mark; communication of a trace that has a step."""
    regions = _regions(trace)
    kernels = _launched_inside(trace, regions)
    by_stream: dict[int, list[Event]] = {}
    for event in kernels:
        by_stream.setdefault(int(event.args["stream"]), []).append(event)
    compute = max(by_stream, key=lambda stream: len(by_stream[stream]), default=-1)  # communication is few kernels
    gemms = [event.us for event in kernels if any(name in event.name for name in _GROUPED_GEMM)]
    comm_us, exposed_us = _communication(trace)
    return Traced(
        comm_us=comm_us,
        exposed_us=exposed_us,
        gemm_us=sum(gemms) if gemms else None,
        comm_blocks=_blocks(event for stream, events in by_stream.items() if stream != compute for event in events),
        host_syncs=sum(_is_inside(call, regions) for call in blocking_calls(trace)),
    )


def _communication(trace: Trace) -> tuple[float | None, float | None]:
    """(comm, exposed) of the one step of a trace, None where it has no step or sends no rows."""
    names = [event.name for event in trace.of("user_annotation")]
    launches = any((place := parse_place(name)) is not None and place.role == "launch" for name in names)
    if not launches or all(parse_step(name) is None for name in names):
        return None, None
    (step,) = rank_steps(0, take_apart(trace), None)
    comm_us, exposed_us = total(step.of_rows("comm")), total(step.of_rows("exposed"))
    return (comm_us, exposed_us) if comm_us > 0 else (None, None)


def _blocks(events: Iterable[Event]) -> int | None:
    kernels = [event for event in events if "grid" in event.args]
    return math.prod(max(kernels, key=lambda event: event.us).args["grid"]) if kernels else None


def _regions(trace: Trace) -> list[list[float]]:
    """From each begin to the last mark of its region."""
    regions: list[list[float]] = []
    for event in trace.of("user_annotation"):
        if event.name == BEGIN:
            regions.append([event.start, event.start])
        elif event.name == MARK and regions:
            regions[-1][1] = event.end
    return regions


def _is_inside(event: Event, regions: list[list[float]]) -> bool:
    return any(start <= event.start <= end for start, end in regions)


def _launched_inside(trace: Trace, regions: list[list[float]]) -> list[Event]:
    calls = [call for call in trace.of("cuda_runtime", "cuda_driver") if _is_inside(call, regions)]
    launches = {call.args.get("correlation") for call in calls} - {None}
    return [event for event in trace.of(*_ON_DEVICE) if event.args.get("correlation") in launches]

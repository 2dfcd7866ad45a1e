"""Host syncs: CUDA calls that hold the host until the device has caught up, counted in a profiler's trace.

    with torch.profiler.profile() as profile:
        with torch.profiler.record_function("layer"):
            y, _ = layer(x)
            y.backward(dy)
    calls = blocking_calls(trace_of(profile), inside="layer")
    assert len(calls) <= layer.dispatcher.host_syncs, describe(...)

A library's calls count as our own do. Not seen: a loop that polls an event or a mapped flag, and calls of the driver
interface, which the profiler does not record (it records kernel launches only).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from .chrome_trace import Event, Trace, TraceError

WAITS = frozenset({
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemcpy2D"),
    *("cudaMemcpyToSymbol", "cudaMemcpyFromSymbol", "cudaFree", "cudaFreeHost"),
    *("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize"),
})  # fmt: skip
_RUNTIME = ("cuda_runtime", "cuda_driver")


def blocking_calls(trace: Trace, inside: str | None = None) -> list[Event]:
    """Calls that block the host, on any thread, in the order of time.

    An asynchronous copy from the device to pageable memory blocks, too. torch waits for the stream right behind it: the
    two are one wait and count once.

    Args:
        trace: with CUDA activities.
        inside: name of a `record_function` range; only calls that begin while one of that name is open count.

    Raises:
        TraceError: the trace has no CUDA call at all, or no such range: a count of 0 would mean nothing.
    """
    calls = trace.of(*_RUNTIME)
    if not calls:
        raise TraceError(
            f"{trace.path} has no CUDA call; record it with ProfilerActivity.CPU and ProfilerActivity.CUDA"
        )
    found = [call for call in calls if call.name in WAITS]
    found += _pageable_copies(trace, calls)
    if inside is not None:
        ranges = [event for event in trace.of("user_annotation") if event.name == inside]
        if not ranges:
            raise TraceError(
                f"{trace.path} has no range {inside!r}; put record_function({inside!r}) around what counts"
            )
        found = [call for call in found if any(each.start <= call.start <= each.end for each in ranges)]
    return sorted(found, key=lambda call: call.start)


def _pageable_copies(trace: Trace, calls: Sequence[Event]) -> list[Event]:
    """Copies to pageable memory, except for those that the thread's next call waits for anyway."""
    pageable = {
        copy.args.get("correlation") for copy in trace.of("gpu_memcpy") if "Device -> Pageable" in copy.name
    }  # fmt: skip
    by_thread: dict[object, list[Event]] = {}
    for call in calls:
        by_thread.setdefault(call.thread, []).append(call)
    found = []
    for mine in by_thread.values():
        for call, after in zip_longest(mine, mine[1:]):
            waited = after is not None and after.name == "cudaStreamSynchronize"
            if call.name == "cudaMemcpyAsync" and call.args.get("correlation") in pageable and not waited:
                found.append(call)
    return found


def describe(trace: Trace, calls: Sequence[Event]) -> str:
    """One line a call: its name, and the ranges and operations that it happened in, outermost first."""
    around = trace.of("user_annotation", "cpu_op")
    lines = []
    for call in calls:
        names = [e.name for e in around if e.thread == call.thread and e.start <= call.start and e.end >= call.end]
        lines.append(f"{call.name} ({call.us:.0f} us) in {' > '.join(names) or 'no range'}")
    return "\n".join(lines) or "no blocking call"

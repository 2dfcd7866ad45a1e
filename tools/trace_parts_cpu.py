"""The parts of a rank that ran on CPUs: gloo's work, and the host's own operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moe_ep.testing.chrome_trace import Event, Thread, Trace, TraceError

from .intervals import difference, union
from .trace_labels import Names, Transfer, Work

# gloo runs its work on threads of its own, first come, first served: the n-th one of a kind is of the n-th call
_CALLS = {
    "gloo:all_to_all": ("c10d::alltoall_base_", "c10d::alltoall_"),
    "gloo:all_gather": ("c10d::_allgather_base_", "c10d::allgather_"),
}


def fill(trace: Trace, names: Names, transfers: Sequence[Transfer]) -> tuple[list[Work], list[Work]]:
    """Give each transfer its works; returns the computation and the communication of others.

    Raises:
        TraceError: there are CUDA calls, or nothing of gloo, or works and calls that do not belong together.
    """
    if trace.of("cuda_runtime", "cuda_driver"):
        raise TraceError(
            f"{trace.path} has CUDA calls but no kernel: the profiler could not see the GPU; record it with "
            "ProfilerActivity.CUDA and with no other profiler attached"
        )
    works = [event for event in trace.of("user_annotation", "cpu_op") if event.name.startswith("gloo:")]
    if not works:
        raise TraceError(
            f"{trace.path} has neither CUDA kernels nor work of gloo, so nothing in it is communication; record "
            "several ranks, on GPUs with ProfilerActivity.CUDA"
        )
    by_launch = {id(each.launch): each for each in transfers}
    calls = _calls(trace, works)
    other: list[Work] = []
    for event in works:
        call = calls.get(id(event), event)
        label, around = names.at(call.thread, call.start)
        transfer = by_launch.get(id(around))
        mine = other if transfer is None else transfer.works
        mine.append(Work(call.start, event.start, event.end, event.thread, label))
    ops = [event for event in trace.of("cpu_op") if not event.name.startswith("gloo:")]
    return list(_host_work(names, ops)), other


def _calls(trace: Trace, works: Sequence[Event]) -> dict[int, Event]:
    """By id of a work the operation that asked for it."""
    found: dict[int, Event] = {}
    for kind, names in _CALLS.items():
        mine = [event for event in works if event.name == kind]
        calls = [event for event in trace.of("cpu_op") if event.name in names]
        if len(mine) != len(calls):
            raise TraceError(
                f"{trace.path} has {len(mine)} works {kind} of {len(calls)} calls, so nobody can tell whose they are; "
                "let the profiler start and stop between steps"
            )
        found |= {id(event): call for event, call in zip(mine, calls, strict=True)}
    return found


def _host_work(names: Names, ops: Iterable[Event]) -> Iterable[Work]:
    """Operations on each thread outside of launches and waits."""
    by_thread: dict[Thread, list[Event]] = {}
    for op in ops:
        by_thread.setdefault(op.thread, []).append(op)
    for thread, mine in by_thread.items():
        apart = [event for place, event in names.ranges.get(thread, []) if place.role != "stage"]
        busy = union((op.start, op.end) for op in mine)
        for start, end in difference(busy, union((event.start, event.end) for event in apart)):
            yield Work(start, start, end, thread, names.at(thread, start)[0])

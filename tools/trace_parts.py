"""One rank's trace taken apart: steps, communication with its launches and waits, computation, host syncs.

On a GPU, *communication* is what ran on the device because a launch range called for it (kernels and copies), and
*computation* is every other kernel, on whatever stream, except NCCL's own for other purposes (FSDP's, the optimizer's).
On CPUs communication is what gloo's threads worked on, and computation every operation on the host's other threads
outside of launches and waits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from moe_ep.testing.chrome_trace import Event, Trace, TraceError
from moe_ep.testing.host_syncs import blocking_calls
from moe_ep.tracing import parse_step

from . import trace_parts_cpu
from .trace_labels import Label, Names, Transfer, Work


class Step(NamedTuple):
    """A step's range on the host. A trace without any is one step, which has no number."""

    number: int | None
    start: float
    end: float


@dataclass(slots=True, kw_only=True)
class RankParts:
    """See the module.

    Attributes:
        trace: without its events.
        syncs: None on CPUs.
        other: communication that no launch range called for.
    """

    trace: Trace
    on_gpu: bool
    steps: list[Step]
    transfers: list[Transfer]
    compute: list[Work]
    other: list[Work]
    syncs: list[tuple[Event, Label | None]] | None


def take_apart(trace: Trace) -> RankParts:
    """The parts of one rank's trace.

    Raises:
        TraceError: it holds no launch of a dispatcher's communication, or nothing of what those launches started.
    """
    names = Names(trace)
    transfers = _transfers(names)
    if not transfers:
        raise TraceError(
            f"{trace.path} has no range of a dispatcher's launch (moe_ep: launch ...); record it while layers of "
            "moe_ep with several ranks run, with a version of moe_ep that names them"
        )
    on_gpu = bool(trace.of("kernel"))
    compute, other = (_fill if on_gpu else trace_parts_cpu.fill)(trace, names, transfers)
    syncs = [(call, names.at(call.thread, call.start)[0]) for call in blocking_calls(trace)] if on_gpu else None
    head = replace(trace, events={}, forward_of={})  # the events of many ranks would fill the memory
    return RankParts(
        trace=head, on_gpu=on_gpu, steps=_steps(trace), transfers=transfers, compute=compute, other=other, syncs=syncs
    )


def _fill(trace: Trace, names: Names, transfers: list[Transfer]) -> tuple[list[Work], list[Work]]:
    """Give each transfer its works; returns the computation and the communication of others."""
    calls = {call.args.get("correlation"): call for call in trace.of("cuda_runtime", "cuda_driver")}
    by_launch = {id(each.launch): each for each in transfers}
    compute: list[Work] = []
    other: list[Work] = []
    for event in trace.of("kernel", "gpu_memcpy", "gpu_memset"):
        call = calls.get(event.args.get("correlation"), event)
        label, around = names.at(call.thread, call.start)
        group = str(event.args.get("Process Group Ranks", ""))
        work = Work(call.start, event.start, event.end, event.thread, label, group)
        transfer = by_launch.get(id(around))
        if transfer is not None:
            transfer.works.append(work)
        elif event.name.startswith("nccl"):
            other.append(work)
        elif event.category == "kernel":
            compute.append(work)
    return compute, other


def _transfers(names: Names) -> list[Transfer]:
    """Launches in the order of time, each with the first wait for it."""
    transfers: list[Transfer] = []
    waiting: dict[Label, Transfer] = {}
    ranges = [found for mine in names.ranges.values() for found in mine]
    for place, event in sorted(ranges, key=lambda found: found[1].start):
        label = names.label(place, event)
        if place.role == "launch":
            waiting[label] = Transfer(label, event)
            transfers.append(waiting[label])
        elif place.role == "wait" and label in waiting:
            waiting.pop(label).wait = event
    return transfers


def _steps(trace: Trace) -> list[Step]:
    steps = [
        Step(number, event.start, event.end)
        for event in trace.of("user_annotation")
        if (number := parse_step(event.name)) is not None
    ]
    numbers = [step.number for step in steps]
    twice = sorted({number for number in numbers if numbers.count(number) > 1 and number is not None})
    if twice:
        raise TraceError(f"{trace.path} has step {twice[0]} twice; give the trace of one run")
    return steps or [Step(None, float("-inf"), float("inf"))]

"""What a schedule costs: its steps on a host that issues them and streams that run them, with made-up durations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moe_ep.schedule import schedule, stack
from moe_ep.schedule_steps import Key, Kind, Step, Stream
from tests.unit.small_schedules import FAR

ISSUE_MS = 0.05
LONG_MS = {
    Kind.RESOLVE: 0.2, Kind.ATTENTION: 2.0, Kind.ROUTE: 0.3, Kind.COUNTS: 0.45, Kind.PACK: 0.2, Kind.DISPATCH: 1.6,
    Kind.EXPERTS: 2.0, Kind.COMBINE: 1.6, Kind.SHARED: 0.5,
}  # fmt: skip


def run(steps: Sequence[Step]) -> dict[Key, tuple[float, float]]:
    """Begin and end of each step in ms, on a GPU.

    A stream's step begins when it is issued, the one before it on its stream is over, and those that it waits for are.
    A step of the host holds up the host.
    """
    host, ends, times = 0.0, dict[Stream, float](), dict[Key, tuple[float, float]]()
    for step in steps:
        host += ISSUE_MS
        ready = max([host, ends.get(step.stream, 0.0), *(times[key][1] for key in step.waits)])
        times[step.key] = ready, ready + LONG_MS.get(step.key.kind, 0.0)
        ends[step.stream] = times[step.key][1]
        if step.stream is Stream.HOST:
            host = times[step.key][1]
    return times


def layers(num: int, outside: tuple[Kind, ...], host_ahead: bool) -> tuple[Step, ...]:
    return stack([schedule(num, outside=outside, host_ahead=host_ahead)] * 4)


def unfed(steps: Sequence[Step], times: dict[Key, tuple[float, float]]) -> float:
    """How long the compute stream had nothing to do because the next step had not been issued, in layers 1 to 3."""
    total, end, host = 0.0, 0.0, 0.0
    for step in steps:
        host += ISSUE_MS
        if step.stream is Stream.HOST:
            host = times[step.key][1]
        if step.stream is Stream.COMPUTE:
            total += max(0.0, host - end) if step.key.layer in (1, 2, 3) else 0.0
            end = times[step.key][1]
    return total


@pytest.mark.parametrize("num", [2, 3, 4])
@pytest.mark.parametrize("outside", [(), FAR[:1], FAR])
def test_reading_late_keeps_the_compute_stream_fed(num: int, outside: tuple[Kind, ...]) -> None:
    late, soon = layers(num, outside, True), layers(num, outside, False)
    fed, starved = run(late), run(soon)
    assert unfed(late, fed) == pytest.approx(0.0)
    assert unfed(soon, starved) > 3 * num * 0.1, "each read waits for counts with nothing issued behind"
    saved = max(end for _, end in starved.values()) - max(end for _, end in fed.values())
    assert saved >= 0 if outside == FAR else saved > 1  # there, nothing but experts is left to hide a dispatch behind


@pytest.mark.parametrize("num", [2, 3, 4])
@pytest.mark.parametrize("outside", [(), FAR[:1], FAR])
def test_a_dispatch_does_not_wait_for_what_was_issued_before_it(num: int, outside: tuple[Kind, ...]) -> None:
    """It begins with its counts, its payload or the communication before it, whichever is last, and is issued by then.

    Where attention is outside, route and pack of the next micro-batch are issued first, which takes the host as long.
    """
    steps = layers(num, outside, True)
    times = run(steps)
    comm = [step.key for step in steps if step.stream is Stream.COMM]
    for place, key in enumerate(comm):
        if key.kind is Kind.DISPATCH and key.layer > 0:
            own = [times[key._replace(kind=kind)][1] for kind in (Kind.PACK, Kind.COUNTS)]
            ready = max(*own, times[comm[place - 1]][1])
            assert times[key][0] <= ready + 4 * ISSUE_MS, key
            after = Key(Kind.ATTENTION, key.micro_batch + 1, key.layer)
            if not outside and after in times:
                assert times[key][0] < times[after][1], "beside it, not behind it"


@pytest.mark.parametrize("num", [2, 3, 4])
def test_forward_hides_at_least_what_reading_at_once_hides(num: int) -> None:
    def exposed(host_ahead: bool) -> float:
        steps = layers(num, (), host_ahead)
        times = run(steps)
        busy = [times[s.key] for s in steps if s.stream is Stream.COMPUTE and s.key.layer in (1, 2)]
        return busy[-1][1] - busy[0][0] - sum(end - begin for begin, end in busy)

    assert exposed(True) < exposed(False)

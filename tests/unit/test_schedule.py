"""The schedule as data: its order written out, its waits, and what is no schedule."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ep.errors import ProtocolError, RecipeError
from moe_ep.schedule import Schedule, schedule, stack, transpose
from moe_ep.schedule_steps import Key, Kind, Step, Stream
from tests.unit.small_schedules import FAR, both_ways, forward_of, place_of

SHORT = {
    Kind.RESOLVE: "x", Kind.ATTENTION: "A", Kind.ROUTE: "R", Kind.COUNTS: "c", Kind.PACK: "p", Kind.READ: "r",
    Kind.DISPATCH: "D", Kind.EXPERTS: "E", Kind.COMBINE: "C", Kind.SHARED: "S",
}  # fmt: skip


def text(steps: Sequence[Step], *streams: Stream) -> str:
    return " ".join(SHORT[s.key.kind] + str(s.key.micro_batch) for s in steps if not streams or s.stream in streams)


def test_the_order_of_two_micro_batches() -> None:
    layer = schedule(2)
    assert text(layer.steps) == "x0 A0 R0 c0 p0 r0 D0 x1 A1 R1 c1 p1 r1 D1 E0 C0 E1 C1 S0 S1"
    forward = stack([layer, layer])
    assert text(forward, Stream.COMM) == "D0 D1 C0 C1 D0 D1 C0 C1"
    backward = transpose(forward)
    one = "S1 S0 E1 D1 E0 D0 p1 R1 A1 x1"
    assert text(backward) == f"x1 C1 x0 C0 {one} C1 p0 R0 A0 x0 C0 {one} p0 R0 A0 x0"
    assert text(backward, Stream.COMM) == "C1 C0 D1 D0 C1 C0 D1 D0"


def test_the_order_of_one_three_and_four_micro_batches() -> None:
    assert text(schedule(1).steps) == "x0 A0 R0 c0 p0 r0 D0 E0 C0 S0"
    for num in (3, 4):
        loops = ["xARcprD", "EC", "S"]
        assert text(schedule(num).steps) == " ".join(f"{k}{i}" for loop in loops for i in range(num) for k in loop)
        descending = range(num - 1, -1, -1)
        forward = stack([schedule(num)])
        want = [["x", "C"], ["S"], ["E", "D"], ["p", "R", "A", "x"]]
        assert text(transpose(forward)) == " ".join(f"{k}{i}" for loop in want for i in descending for k in loop)


def test_the_order_where_the_host_runs_ahead() -> None:
    late = {num: text(schedule(num, host_ahead=True).steps) for num in (1, 2, 3, 4)}
    assert late == {
        1: "x0 A0 R0 c0 p0 r0 D0 E0 C0 S0",
        2: "x0 A0 R0 c0 p0 x1 A1 r0 D0 R1 c1 p1 E0 r1 D1 C0 E1 C1 S0 S1",
        3: "x0 A0 R0 c0 p0 x1 A1 r0 D0 R1 c1 p1 x2 A2 r1 D1 R2 c2 p2 E0 r2 D2 C0 E1 C1 E2 C2 S0 S1 S2",
        4: "x0 A0 R0 c0 p0 x1 A1 r0 D0 R1 c1 p1 x2 A2 r1 D1 R2 c2 p2 x3 A3 r2 D2 R3 c3 p3 "
        "E0 r3 D3 C0 E1 C1 E2 C2 E3 C3 S0 S1 S2 S3",
    }
    assert schedule(2, dense=True, host_ahead=True) == schedule(2, dense=True)
    far = text(schedule(2, outside=FAR, host_ahead=True).steps)
    assert far == "x0 A0 x1 A1 R0 c0 p0 R1 c1 p1 r0 D0 E0 r1 D1 C0 E1 C1 S0 S1"
    near = text(schedule(2, outside=FAR[:1], host_ahead=True).steps)
    assert near == "x0 x1 A0 R0 c0 p0 A1 r0 D0 R1 c1 p1 E0 r1 D1 C0 E1 C1 S0 S1"


def drawn(page: str) -> dict[str, str]:
    """Steps of the first lines that begin with the name of a stream or of a device, whose host issues them."""
    lines = (line.split() for line in page.splitlines())
    found: dict[str, str] = {}
    for name, *words in filter(None, lines):
        if name in ("compute", "comm", "side", "GPU", "CPU"):
            steps = itertools.takewhile(re.compile(r"[xARprDECSc]\d'?").fullmatch, words)
            found.setdefault(name, " ".join(step for step in steps if not step.endswith("'")))
    return found


@pytest.mark.parametrize("page", ["moe_ep/schedule.py", "docs/architecture.md"])
def test_the_pictures_of_two_micro_batches_are_the_schedule(page: str) -> None:
    """Counts are part of R and p for the host."""
    late, soon = schedule(2, host_ahead=True).steps, schedule(2).steps
    hosts = {name: [s for s in steps if s.stream is not Stream.SIDE] for name, steps in (("GPU", late), ("CPU", soon))}
    streams = {stream: text(late, stream) for stream in (Stream.COMPUTE, Stream.COMM, Stream.SIDE)}
    written = (Path(__file__).resolve().parents[2] / page).read_text()
    assert drawn(written) == {name: text(steps) for name, steps in hosts.items()} | streams


@pytest.mark.parametrize("num", [1, 2, 3, 4])
@pytest.mark.parametrize("outside", [(), FAR[:1], FAR])
def test_streams_do_the_same_wherever_the_host_is(num: int, outside: tuple[Kind, ...]) -> None:
    """The order on each stream and the backward are those of reading at once."""
    late, soon = (forward_of(num, outside, host_ahead=ahead) for ahead in (True, False))
    for stream in (Stream.COMPUTE, Stream.COMM, Stream.SIDE, Stream.HOST):
        assert text(late, stream) == text(soon, stream)
    assert transpose(late) == transpose(soon)
    assert {(s.key, s.waits) for s in late} == {(s.key, s.waits) for s in soon}


def test_micro_batches_that_are_placed_together_are_all_routed_first() -> None:
    soon, late = (text(schedule(2, joint=True, host_ahead=ahead).steps) for ahead in (False, True))
    assert soon == "x0 A0 R0 x1 A1 R1 c0 p0 r0 D0 c1 p1 r1 D1 E0 C0 E1 C1 S0 S1"
    assert late == "x0 A0 R0 x1 A1 R1 c0 p0 c1 p1 r0 D0 E0 r1 D1 C0 E1 C1 S0 S1"
    outside = schedule(2, joint=True, outside=FAR)
    assert text(outside.steps).startswith("x0 A0 x1 A1 R0 R1 c0 p0") and outside.before == 4
    assert text(schedule(1, joint=True).steps) == text(schedule(1).steps)
    assert schedule(2, joint=True, dense=True) == schedule(2, dense=True)


def test_a_dense_layer_runs_each_micro_batch_through_and_outside_steps_come_first() -> None:
    assert text(schedule(2, dense=True).steps) == "x0 A0 S0 x1 A1 S1"
    outside = schedule(2, outside=FAR)
    assert text(outside.steps).startswith("x0 A0 x1 A1 R0 c0 p0 r0 D0 R1")
    assert text(outside.steps[: outside.before]) == "x0 A0 x1 A1"
    assert text(schedule(2, outside=FAR[:1]).steps).startswith("x0 x1 A0 R0 c0 p0 r0 D0 A1")
    assert schedule(2).before == 0


def test_waits_cross_streams_and_layers() -> None:
    waits = {f"{s.key} <- {w}" for s in both_ways(2, dense=(False, False)) for w in s.waits if s.key.micro_batch == 1}
    assert waits == {
        *(f"{a} 1 of layer {n} <- {b} 1 of layer {n}" for n in (0, 1) for a, b in [
            ("counts", "route"), ("read", "counts"), ("dispatch", "pack"), ("experts", "dispatch"),
            ("combine", "experts"), ("dexperts", "dcombine"), ("ddispatch", "dexperts"), ("dpack", "ddispatch"),
        ]),
        *(f"resolve 1 of layer {n + 1} <- combine 1 of layer {n}" for n in (0, 1)),
        *(f"dcombine 1 of layer {n} <- dresolve 1 of layer {n + 1}" for n in (0, 1)),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("num", "outside", "message"),
    [
        (0, (), "num_micro_batches must be at least 1, got 0"),
        (2, (Kind.ATTENTION,), r"outside must be a leading part of \['resolve', 'attention'\], got \['attention'\]"),
    ],
)
def test_impossible_schedules_are_refused(num: int, outside: tuple[Kind, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        schedule(num, outside=outside)


def test_the_waits_of_a_micro_batch() -> None:
    pairs = {"counts route", "read counts", "dispatch pack", "experts dispatch", "combine experts", "resolve combine"}
    for num in (1, 3):
        assert [{f"{a} {b}" for a, b in links} for links in schedule(num).links] == [pairs] * num
    assert [{f"{a} {b}" for a, b in links} for links in schedule(2, dense=True).links] == [{"resolve combine"}] * 2
    steps = list(schedule(2).steps)
    place = place_of(steps, Kind.EXPERTS, 1, 0)
    steps[place] = replace(steps[place], waits=(Key(Kind.DISPATCH, 0),))
    with pytest.raises(ProtocolError, match="experts 1 of layer 0 waits for dispatch 0 of layer 0"):
        replace(schedule(2), steps=tuple(steps))


def test_a_schedule_is_data() -> None:
    assert schedule(3) is schedule(3)
    assert schedule(3) != schedule(2)
    assert isinstance(hash(schedule(2)), int)
    assert isinstance(schedule(1), Schedule)

"""The schedule as data: its order written out, the proof that it has no race, and mutants that the proof must fail."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ep.errors import ProtocolError, RecipeError
from moe_ep.schedule import Schedule, schedule, stack, transpose
from moe_ep.schedule_check import check
from moe_ep.schedule_steps import Key, Kind, Step, Stream, Value

SHORT = {
    Kind.RESOLVE: "x", Kind.ATTENTION: "A", Kind.ROUTE: "R", Kind.COUNTS: "c", Kind.PACK: "p", Kind.READ: "r",
    Kind.DISPATCH: "D", Kind.EXPERTS: "E", Kind.COMBINE: "C", Kind.SHARED: "S",
}  # fmt: skip
FAR: tuple[Kind, ...] = (Kind.RESOLVE, Kind.ATTENTION)


def text(steps: Sequence[Step], *streams: Stream) -> str:
    return " ".join(SHORT[s.key.kind] + str(s.key.micro_batch) for s in steps if not streams or s.stream in streams)


def forward_of(
    num: int,
    outside: tuple[Kind, ...] = (),
    dense: tuple[bool, ...] = (False, False, True, False),
    *,
    host_ahead: bool = False,
) -> tuple[Step, ...]:
    """A stack whose lanes are used again and whose third layer is dense."""
    return stack([schedule(num, dense=d, outside=outside, host_ahead=host_ahead) for d in dense])


def both_ways(
    num: int,
    outside: tuple[Kind, ...] = (),
    dense: tuple[bool, ...] = (False, False, True, False),
    *,
    host_ahead: bool = False,
) -> list[Step]:
    """Forward and backward of it."""
    forward = forward_of(num, outside, dense, host_ahead=host_ahead)
    return [*forward, *transpose(forward)]


def on_comm_stream(steps: Sequence[Step]) -> list[Step]:
    """The same with the counts on the comm stream."""
    return [replace(s, stream=Stream.COMM) if s.stream is Stream.SIDE else s for s in steps]


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


@pytest.mark.parametrize("num", [2, 3, 4])
@pytest.mark.parametrize("outside", [(), FAR])
@pytest.mark.parametrize("host_ahead", [False, True])
def test_placed_together_no_schedule_has_a_race(num: int, outside: tuple[Kind, ...], host_ahead: bool) -> None:
    layers = [schedule(num, dense=d, outside=outside, host_ahead=host_ahead, joint=True) for d in (False, True, False)]
    steps = [*stack(layers), *transpose(stack(layers))]
    assert check(steps, steps) == []
    assert check(on_comm_stream(steps), on_comm_stream(steps)) == []
    assert redundant(steps) == redundant(stack(layers)) == set(), "every removed wait is found, forward alone, too"


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


@pytest.mark.parametrize("num", [1, 2, 3, 4])
@pytest.mark.parametrize("outside", [(), FAR[:1], FAR])
@pytest.mark.parametrize("host_ahead", [False, True])
def test_no_schedule_has_a_race(num: int, outside: tuple[Kind, ...], host_ahead: bool) -> None:
    steps = both_ways(num, outside, host_ahead=host_ahead)
    assert check(steps, steps, steps) == []
    assert check(forward_of(num, outside, (False,) * 3, host_ahead=host_ahead)) == [], "forward alone"
    assert check(on_comm_stream(steps), on_comm_stream(steps)) == []


def redundant(steps: Sequence[Step]) -> set[str]:
    """Waits whose removal leaves the schedule free of races; every other removal is found."""
    found = set()
    for place, step in enumerate(steps):
        for wait in step.waits:
            mutant = list(steps)
            mutant[place] = replace(step, waits=tuple(w for w in step.waits if w != wait))
            if not check(mutant):
                found.add(f"{step.key} <- {wait}")
    return found


@pytest.mark.parametrize("num", [1, 2, 3, 4])
@pytest.mark.parametrize("outside", [(), FAR[:1], FAR])
@pytest.mark.parametrize("host_ahead", [False, True])
def test_every_removed_wait_is_found(num: int, outside: tuple[Kind, ...], host_ahead: bool) -> None:
    assert redundant(both_ways(num, outside, host_ahead=host_ahead)) == set()
    assert redundant(forward_of(num, outside, host_ahead=host_ahead)) == set(), "forward alone"


@pytest.mark.parametrize("num", [1, 2, 3, 4])
@pytest.mark.parametrize("outside", [(), FAR[:1], FAR])
def test_memory_that_is_not_held_is_found(num: int, outside: tuple[Kind, ...]) -> None:
    """A dispatch that does not wait for what was issued before it must not be given what that reads."""
    steps = forward_of(num, outside, host_ahead=True)
    held = 0
    for place, step in enumerate(steps):
        for value in step.holds:
            mutant = list(steps)
            mutant[place] = replace(step, holds=tuple(v for v in step.holds if v != value))
            (line,) = check(mutant)
            assert line.startswith(f"{step.key} may be handed the memory of {value.name} {value.micro_batch} of layer")
            held += 1
    rows = 2 * 3 * (num > 1)  # what the experts of micro-batch 0 read, in each layer with experts
    results = 0 if outside else num - 1  # what micro-batches but the first resolve in layer 1, of layer 0
    assert held == rows + results
    assert not any(step.holds for step in forward_of(num, outside)), "a dispatch issued at once waits for all"


ON_COMM_STREAM = {
    1: [],
    2: ["experts 0 of layer {n} <- dispatch 0 of layer {n}", "resolve 1 of layer 1 <- combine 1 of layer 0"],
    3: [
        "experts 0 of layer {n} <- dispatch 0 of layer {n}",
        "experts 1 of layer {n} <- dispatch 1 of layer {n}",
        "resolve 1 of layer 1 <- combine 1 of layer 0",
        "resolve 2 of layer 1 <- combine 2 of layer 0",
    ],
}


@pytest.mark.parametrize("num", [1, 2, 3])
def test_waits_that_counts_on_the_comm_stream_make_redundant(num: int) -> None:
    """The host reads counts that stand in line behind an earlier micro-batch's rows: it has waited for them by then."""
    want = {line.format(n=n) for line in ON_COMM_STREAM[num] for n in (0, 1, 3)}
    assert redundant(on_comm_stream(both_ways(num))) == want


def test_with_the_host_ahead_only_later_counts_make_waits_redundant() -> None:
    """Experts of micro-batch 0 are issued before the last counts are read."""
    late = {num: redundant(on_comm_stream(both_ways(num, host_ahead=True))) for num in (1, 2, 3)}
    assert late[1] == late[2] == set()
    want = [*ON_COMM_STREAM[3][:2], ON_COMM_STREAM[3][3]]
    assert late[3] == {line.format(n=n) for line in want for n in (0, 1, 3)}


def place_of(steps: Sequence[Step], kind: Kind, micro_batch: int, layer: int, backward: bool = False) -> int:
    return next(i for i, s in enumerate(steps) if s.key == (kind, micro_batch, layer, backward))


def moved_behind(steps: Sequence[Step], what: int, behind: int) -> list[Step]:
    rest = list(steps)
    step = rest.pop(what)
    rest.insert(behind if behind > what else behind + 1, step)
    return rest


@pytest.mark.parametrize("num", [1, 2, 3, 4])
@pytest.mark.parametrize("outside", [(), FAR[:1], FAR])
@pytest.mark.parametrize("host_ahead", [False, True])
def test_a_step_behind_its_consumer_is_found(num: int, outside: tuple[Kind, ...], host_ahead: bool) -> None:
    steps = both_ways(num, outside, host_ahead=host_ahead)
    i = num - 1
    for kind, consumer in [
        (Kind.ATTENTION, Kind.ROUTE), (Kind.ROUTE, Kind.PACK), (Kind.PACK, Kind.DISPATCH), (Kind.COUNTS, Kind.READ),
        (Kind.READ, Kind.DISPATCH), (Kind.DISPATCH, Kind.EXPERTS), (Kind.EXPERTS, Kind.COMBINE),
    ]:  # fmt: skip
        mutant = moved_behind(steps, place_of(steps, kind, i, 1), place_of(steps, consumer, i, 1))
        assert check(mutant), f"{kind} behind {consumer}"
        pair = (consumer, kind)
        if Kind.READ in pair or Kind.COUNTS in pair:
            continue  # no backward
        there = place_of(steps, consumer, i, 1, True), place_of(steps, kind, i, 1, True)
        assert check(moved_behind(steps, *there)), f"backward of {consumer} behind that of {kind}"


def test_an_output_resolved_too_late_is_found() -> None:
    steps = both_ways(2)
    late = moved_behind(steps, place_of(steps, Kind.RESOLVE, 1, 1), place_of(steps, Kind.ATTENTION, 1, 1))
    assert any("reads x 1 of layer 1" in line for line in check(late))


def test_two_micro_batches_in_one_lane_are_found() -> None:
    def in_lane_0(value: Value) -> Value:
        """Another value (of a layer that does not exist) in the place of micro-batch 0."""
        shared = (value.name, value.micro_batch) == ("dispatch.send", 1)
        return value._replace(micro_batch=0, layer=9) if shared else value

    mutant = [
        replace(s, reads=tuple(map(in_lane_0, s.reads)), writes=tuple(map(in_lane_0, s.writes)))
        for s in stack([schedule(2)])
    ]
    assert check(mutant) == [
        "pack 1 of layer 0 writes lane memory dispatch.send 0 of layer 9 while dispatch 0 of layer 0 may still use it"
    ]


def test_ranks_that_communicate_in_another_order_are_found() -> None:
    steps = both_ways(2)
    swapped = list(steps)
    a, b = place_of(steps, Kind.COMBINE, 0, 1), place_of(steps, Kind.COMBINE, 1, 1)
    swapped[a], swapped[b] = swapped[b], swapped[a]
    place = [s.key for s in steps if s.stream in (Stream.COMM, Stream.SIDE)].index(steps[a].key)
    assert check(steps, steps, swapped) == [
        f"communication {place} is combine 0 of layer 1 on rank 0 and combine 1 of layer 1 on rank 2"
    ]
    fewer = [s for s in steps if s.key != (Kind.COMBINE, 0, 0, True)]
    assert "communication" in check(steps, fewer)[0]
    last = max(i for i, s in enumerate(steps) if s.stream is Stream.COMM)
    assert check(steps, steps[:last])[0].startswith("rank 0 issues")


def step(kind: Kind, stream: Stream, reads: str = "", writes: str = "", waits: Sequence[Step] = ()) -> Step:
    values = [tuple(Value(name, 0) for name in names.split()) for names in (reads, writes)]
    return Step(key=Key(kind, 0), stream=stream, reads=values[0], writes=values[1], waits=tuple(w.key for w in waits))


def test_each_rule_on_a_few_steps() -> None:
    sent = step(Kind.PACK, Stream.COMPUTE, writes="rows")
    received = step(Kind.DISPATCH, Stream.COMM, "rows", "arrived", [sent])
    used = step(Kind.EXPERTS, Stream.COMPUTE, "arrived", "result", [received])
    back = step(Kind.COMBINE, Stream.COMM, "result", "home", [used])
    assert check([sent, received, used, back]) == []
    # the communication behind is handed the block whose last reader has been issued, but may not be through
    careless = step(Kind.COMBINE, Stream.COMM, "", "home")
    assert check([sent, received, used, careless]) == [
        "combine 0 of layer 0 may be handed the memory of arrived 0 of layer 0 while experts 0 of layer 0 may still "
        "use it"
    ]
    assert check([sent, used]) == [
        "experts 0 of layer 0 waits for dispatch 0 of layer 0, which was not issued before",
        "experts 0 of layer 0 reads arrived 0 of layer 0, which nobody writes",
    ]
    again = step(Kind.ROUTE, Stream.COMPUTE, writes="rows")
    assert check([sent, again]) == ["route 0 of layer 0 writes rows 0 of layer 0 a second time"]
    # a host step that waits holds up all that is issued behind it, on every stream
    read = step(Kind.READ, Stream.HOST, waits=[received])
    assert check([sent, received, read, replace(used, waits=())]) == []
    assert check([sent, received, replace(read, waits=()), replace(used, waits=())]) != []


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

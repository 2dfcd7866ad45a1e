"""The proof that a schedule has no race, and mutants that it must fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from moe_ep.schedule import schedule, stack, transpose
from moe_ep.schedule_check import check
from moe_ep.schedule_steps import Key, Kind, Step, Stream, Value
from tests.unit.small_schedules import FAR, both_ways, forward_of, on_comm_stream, place_of


@pytest.mark.parametrize("num", [2, 3, 4])
@pytest.mark.parametrize("outside", [(), FAR])
@pytest.mark.parametrize("host_ahead", [False, True])
def test_placed_together_no_schedule_has_a_race(num: int, outside: tuple[Kind, ...], host_ahead: bool) -> None:
    layers = [schedule(num, dense=d, outside=outside, host_ahead=host_ahead, joint=True) for d in (False, True, False)]
    steps = [*stack(layers), *transpose(stack(layers))]
    assert check(steps, steps) == []
    assert check(on_comm_stream(steps), on_comm_stream(steps)) == []
    assert redundant(steps) == redundant(stack(layers)) == set(), "every removed wait is found, forward alone, too"


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

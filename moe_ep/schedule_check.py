"""Proves that a schedule is free of races, from the schedule alone.

A happens before B where a chain of these leads from A to B: A was issued before B on the same stream; B waits for A; A
blocks the host and B was issued behind it. All ranks run the same program and a communication is a collective, so the
proof for one rank, with equal orders of communication, is a proof for all: a peer writes into this rank's memory only
inside a collective that this rank has entered.
"""

from __future__ import annotations

from collections.abc import Sequence

from .schedule_steps import LANE_VALUES, Key, Step, Stream, Value


def check(steps: Sequence[Step], *other_ranks: Sequence[Step]) -> list[str]:
    """What is wrong with a program (`stack`, `transpose`, or one behind the other); nothing: it is proved.

    1. A wait names a step that was issued before (an event that nobody has recorded yet holds up nothing).
    2. Every value is written once, and that happens before each of its reads.
    3. Lane memory is written again only after every access to what it held.
    4. A block that the comm stream allocated may be handed out again by its pool as soon as its last reader is issued,
       or its last holder, if that is later; that reader happens before whatever communication is issued behind it.
    5. The other ranks issue the same communication in the same order.

    Args:
        steps: one rank's steps in the order in which its host issues them.
        other_ranks: those of other ranks.
    """
    order = _Order(steps)
    found = [*order.bad_waits, *_reads(order), *_lanes(order), *_pools(order)]
    for rank, other in enumerate(other_ranks, 1):
        found += _comm_order(steps, other, rank)
    return found


class _Order:
    """Happens-before as one bit mask of predecessors a step."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.place: dict[Key, int] = {}
        self.bad_waits: list[str] = []
        self._before: list[int] = []
        last: dict[Stream, int] = {}
        for number, step in enumerate(steps):
            before = [last[s] for s in (step.stream, Stream.HOST) if s in last]
            for key in step.waits:
                if key in self.place:
                    before.append(self.place[key])
                else:
                    self.bad_waits.append(f"{step.key} waits for {key}, which was not issued before")
            mask = 0
            for earlier in before:
                mask |= self._before[earlier] | 1 << earlier
            self._before.append(mask)
            self.place[step.key] = last[step.stream] = number
        self.writer: dict[Value, int] = {}
        self.accesses: dict[Value, list[int]] = {}
        for number, step in enumerate(steps):
            for value in step.writes:
                self.writer.setdefault(value, number)
            for value in (*step.reads, *step.writes):
                self.accesses.setdefault(value, []).append(number)

    def before(self, first: int, second: int) -> bool:
        """Whether `first` happens before `second`."""
        return first == second or bool(self._before[second] >> first & 1)


def _reads(order: _Order) -> list[str]:
    found = []
    for number, step in enumerate(order.steps):
        for value in step.writes:
            if order.writer[value] != number:
                found.append(f"{step.key} writes {_name(value)} a second time")
        for value in step.reads:
            writer = order.writer.get(value)
            if writer is None:
                found.append(f"{step.key} reads {_name(value)}, which nobody writes")
            elif not order.before(writer, number):
                found.append(f"{step.key} reads {_name(value)}, which {order.steps[writer].key} may still be writing")
    return found


def _lanes(order: _Order) -> list[str]:
    """Rule 3: values that share lane memory, in the order of their writers."""
    found, held = [], dict[tuple[str, int], Value]()
    for number, step in enumerate(order.steps):
        for value in step.writes:
            if value.name not in LANE_VALUES:
                continue
            place = value.name, value.micro_batch
            old = held.get(place)
            for access in [] if old is None else order.accesses[old]:
                if not order.before(access, number):
                    user = order.steps[access].key
                    found.append(f"{step.key} writes lane memory {_name(value)} while {user} may still use it")
            held[place] = value
    return found


def _pools(order: _Order) -> list[str]:
    """Rule 4."""
    found = []
    comm = [number for number, step in enumerate(order.steps) if step.stream is Stream.COMM]
    holders = {value: number for number, step in enumerate(order.steps) for value in step.holds}
    for value, accesses in order.accesses.items():
        writer = order.writer.get(value)
        if writer is None or order.steps[writer].stream is not Stream.COMM:
            continue
        free = max(*accesses, holders.get(value, 0))
        for later in [number for number in comm if number > free][:1]:  # the next one; others follow it
            for access in accesses:
                if not order.before(access, later):
                    user, taker = order.steps[access].key, order.steps[later].key
                    found.append(f"{taker} may be handed the memory of {_name(value)} while {user} may still use it")
    return found


def _comm_order(steps: Sequence[Step], other: Sequence[Step], rank: int) -> list[str]:
    ours, theirs = ([s.key for s in program if s.stream in (Stream.COMM, Stream.SIDE)] for program in (steps, other))
    for place, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return [f"communication {place} is {a} on rank 0 and {b} on rank {rank}"]
    if len(ours) != len(theirs):
        return [f"rank 0 issues {len(ours)} communications, rank {rank} {len(theirs)}"]
    return []


def _name(value: Value) -> str:
    gradient = "" if value.grad_by is None else f"gradient (by {value.grad_by}) of "
    return f"{gradient}{value.name} {value.micro_batch} of layer {value.layer}"

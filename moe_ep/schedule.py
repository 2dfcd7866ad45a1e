"""The order in which one layer runs M micro-batches, as data: no tensor, no process group, nothing that runs.

M = 2, a layer with experts; x resolve, A attention, R route, p pack, E experts, S shared, c counts, D dispatch,
C combine, and the micro-batch behind each; C' belongs to the layer before. What runs, and when:

    compute   x0 A0 R0 p0   x1 A1 R1 p1   E0      E1      S0 S1      (the next x0 waits for C0, ...)
    comm      C1'        D0            D1      C0      C1
    side              c0            c1

    forward   D0 runs beside A1, D1 beside E0, C0 beside E1, C1 beside S0, S1 and the next layer's A0
    backward  S1 S0 E1 E0 | p1 R1 A1 x1 | p0 R0 A0 x0 on compute; transposes on comm in the order C1 C0 D1 D0

The host reads c (r) before it issues D, and while it waits it issues nothing. On a GPU it runs ahead of the streams, so
it first issues the next piece of computation, and the compute stream does not run dry; D waits for p alone, so that
piece does not hold it up. Where the host itself computes, a piece issued is a piece done, and D comes first:

    GPU       x0 A0 R0 p0   x1 A1 r0 D0 R1 p1   E0 r1 D1 C0   E1 C1   S0 S1
    CPU       x0 A0 R0 p0 r0 D0   x1 A1 R1 p1 r1 D1   E0 C0   E1 C1   S0 S1

The backward is no second table but the transpose of the forward (`transpose`): compute steps in reverse, and every
communication's transpose launched where its consumer stood and awaited where its producer stood. That is what autograd
makes of a pack and a finish node, because it runs the newest node that is ready. It is the same for both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from .errors import ProtocolError, RecipeError
from .schedule_steps import FROM_COMM, INTEGERS, LANE_VALUES, Key, Kind, Link, Step, Stream, Value, step_of

_PREPARE = (Kind.ROUTE, Kind.COUNTS, Kind.PACK)
_SEND = (Kind.READ, Kind.DISPATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The forward of one layer: what the executor walks through, step by step.

    Attributes:
        num_micro_batches: M.
        dense: a layer without experts.
        steps: in the order in which they are issued.
        before: how many of the steps lie in front of the region that activation recompute runs twice.
        links: the waits of each micro-batch, which the stages of its ticket make.
        counts_cross: counts of a micro-batch travel before those of an earlier one are read, so a rank that has none to
            send (its router has failed) is behind the others by what they launch until they hear of it.

    Raises:
        ProtocolError: a step waits for another micro-batch, which no stage can.
    """

    num_micro_batches: int
    dense: bool
    steps: tuple[Step, ...]
    before: int = 0
    links: tuple[frozenset[Link], ...] = field(init=False, compare=False, repr=False)
    counts_cross: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "links", _links_of(self.num_micro_batches, self.steps))
        object.__setattr__(self, "counts_cross", _counts_cross(self.steps))


def _counts_cross(steps: Sequence[Step]) -> bool:
    """Whether a step of kind counts stands between the counts of another micro-batch and their read."""
    on_way = set[int]()
    for kind, micro_batch in (step.key[:2] for step in steps):
        if kind is Kind.COUNTS:
            on_way.add(micro_batch)
        elif kind is Kind.READ:
            on_way.discard(micro_batch)
        if len(on_way) > 1:
            return True
    return False


def _links_of(num_micro_batches: int, steps: Sequence[Step]) -> tuple[frozenset[Link], ...]:
    found: list[set[Link]] = [set() for _ in range(num_micro_batches)]
    for step in steps:
        for wait in step.waits:
            if wait.micro_batch != step.key.micro_batch:
                raise ProtocolError(f"{step.key} waits for {wait}; a stage waits for its own micro-batch only")
            found[wait.micro_batch].add(Link(step.key.kind, wait.kind))
    return tuple(map(frozenset, found))


@functools.cache  # layers ask for it in every forward
def schedule(
    num_micro_batches: int,
    *,
    dense: bool = False,
    outside: tuple[Kind, ...] = (),
    host_ahead: bool = False,
    joint: bool = False,
) -> Schedule:
    """The steps of one layer for M micro-batches, in the order in which they are issued.

    Args:
        num_micro_batches: M >= 1; M = 1 is the plain layer.
        dense: a layer without experts. It runs each micro-batch's MLP at once: the combines of the layer before that
            are still under way hide behind it.
        outside: kinds that run for all micro-batches before anything else does, a leading part of (resolve, attention).
        host_ahead: what the host issues runs later, as on a GPU. Then counts are read, and the dispatch launched,
            behind the next piece of computation: attention of the next micro-batch, or experts of the first one. Where
            attention is outside, the next micro-batch's route and pack are that piece: they are all there is before
            the experts, which need the dispatch, and issuing them takes about as long as counts travel.
        joint: all micro-batches are routed before the first is packed, because they are placed together (replicas). D0
            then hides behind p1 alone, and what is left of it in front of E0.

    Raises:
        RecipeError: M < 1, or `outside` is no such part.
    """
    head = (Kind.RESOLVE, Kind.ATTENTION)
    if num_micro_batches < 1:
        raise RecipeError(f"num_micro_batches must be at least 1, got {num_micro_batches}")
    if outside != head[: len(outside)]:
        raise RecipeError(f"outside must be a leading part of {[*map(str, head)]}, got {[*map(str, outside)]}")
    inside, numbers = head[len(outside) :], range(num_micro_batches)
    keys = [Key(kind, i) for i in numbers for kind in outside]
    if dense:
        keys += [Key(kind, i) for i in numbers for kind in (*inside, Kind.SHARED)]
    else:
        send = _read_late if host_ahead and num_micro_batches > 1 else _read_at_once
        prepare: tuple[Kind, ...] = _PREPARE
        if joint:
            keys += [Key(kind, i) for i in numbers for kind in (*inside, Kind.ROUTE)]
            inside, prepare = (), _PREPARE[1:]
        keys += send(num_micro_batches, inside, prepare) + [Key(Kind.SHARED, i) for i in numbers]
    return Schedule(
        num_micro_batches=num_micro_batches,
        dense=dense,
        steps=_holding([step_of(*key[:2]) for key in keys]),
        before=num_micro_batches * len(outside),
    )


def _read_at_once(num: int, inside: tuple[Kind, ...], prepare: tuple[Kind, ...]) -> list[Key]:
    loops = [(*inside, *prepare, *_SEND), (Kind.EXPERTS, Kind.COMBINE)]
    return [Key(kind, i) for loop in loops for i in range(num) for kind in loop]


def _read_late(num: int, inside: tuple[Kind, ...], prepare: tuple[Kind, ...]) -> list[Key]:
    """Each micro-batch is sent behind the piece issued next.

    D of the last one goes in front of C of the first, so that the order of communication is that of `_read_at_once`.
    """
    piece, rest = (inside, prepare) if Kind.ATTENTION in inside else ((*inside, *prepare), ())
    kinds = [(kind, 0) for kind in (*piece, *rest)]
    for i in range(1, num):
        kinds += [*((kind, i) for kind in piece), *((kind, i - 1) for kind in _SEND), *((kind, i) for kind in rest)]
    kinds += [(Kind.EXPERTS, 0), *((kind, num - 1) for kind in _SEND), (Kind.COMBINE, 0)]
    kinds += [(kind, i) for i in range(1, num) for kind in (Kind.EXPERTS, Kind.COMBINE)]
    return [Key(kind, i) for kind, i in kinds]


def _holding(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Dispatches with what they hold: what was read between the pack that each waits for and itself."""
    place = {step.key: number for number, step in enumerate(steps)}
    result = list(steps)
    for number, step in enumerate(steps):
        if step.key.kind is Kind.DISPATCH:
            between = steps[place[step.waits[0]] : number]
            held = [v for other in between for v in other.reads if other.stream is Stream.COMPUTE]
            result[number] = replace(step, holds=tuple(v for v in held if v.name in FROM_COMM))
    return tuple(result)


def stack(layers: Iterable[Schedule]) -> tuple[Step, ...]:
    """The forward of a stack of layers, and the resolves behind the last one (with the layer number behind it)."""
    steps: list[Step] = []
    count, number = 1, 0
    for number, layer in enumerate(layers, 1):
        count = layer.num_micro_batches
        steps += [step.moved(number - 1) for step in layer.steps]
    steps += [step_of(Kind.RESOLVE, i).moved(number) for i in range(count)]
    keys = {step.key for step in steps}
    written = {value for step in steps for value in step.writes}
    return tuple(  # what comes before the first layer, and what a dense layer does not do, is nobody's business
        replace(
            step,
            waits=tuple(key for key in step.waits if key in keys),
            reads=tuple(value for value in step.reads if value in written),
            holds=tuple(value for value in step.holds if value in written),
        )
        for step in steps
    )


def transpose(forward: Sequence[Step]) -> tuple[Step, ...]:
    """The backward of a stack, in the order in which autograd issues it."""
    by_key = {step.key: step for step in forward}
    readers: dict[Value, list[Kind]] = {}
    for step in forward:
        for value in step.reads:
            readers.setdefault(value, []).append(step.key.kind)
    result = []
    for step in reversed(forward):
        if step.stream is not Stream.COMPUTE:
            continue
        fed = [s for s in forward if s.stream is Stream.COMM and step.key in s.waits and _has_gradient(s)]
        result.append(_transposed(step, [s.key for s in fed], readers))
        fed_by = [by_key[key] for key in step.waits if by_key[key].stream is Stream.COMM]
        result += [_transposed(comm, [step.key], readers) for comm in fed_by]
    return tuple(result)


def _has_gradient(step: Step) -> bool:
    return any(value.name not in INTEGERS for value in step.writes)


def _transposed(step: Step, waits: Sequence[Key], readers: dict[Value, list[Kind]]) -> Step:
    kept = [v for v in (*step.reads, *step.writes) if v.name not in LANE_VALUES]
    given = [v._replace(grad_by=kind) for v in step.writes for kind in readers.get(v, []) if v.name not in INTEGERS]
    return Step(
        key=step.key._replace(backward=True),
        stream=step.stream,
        waits=tuple(key._replace(backward=True) for key in waits),
        reads=(*given, *kept),
        writes=tuple(v._replace(grad_by=step.key.kind) for v in step.reads if v.name not in INTEGERS),
    )

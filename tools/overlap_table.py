"""The overlap report as lines of text: a line for each rank and step, and a table of one rank's layers and stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from .intervals import total
from .overlap import Run
from .rank_steps import Figures, RankStep
from .trace_labels import BACKWARD, FORWARD, RECOMPUTE, Label

# a layer's stages in the order in which they happen; others, of whatever back end, stand behind them
STAGES = (
    *("attention", "route", "dispatch_preprocess", "exchange of counts", "exchange of ids", "dispatch"),
    *("dispatch_postprocess", "experts", "combine_preprocess", "combine", "shared", "resolve", "combine_postprocess"),
)
_DIRECTIONS = (FORWARD, RECOMPUTE, BACKWARD)


class Group(NamedTuple):
    """A line of the table: micro-batches of a stage taken together."""

    layer: int | None
    direction: str
    stage: str


@dataclass(slots=True)
class _Sums:
    """Over the steps of a rank; times in microseconds."""

    figures: list[Figures] = field(default_factory=list)
    compute: float = 0.0
    syncs: int = 0


def report(run: Run, rank: int) -> list[str]:
    """Everything: totals of each step and rank, and layers and stages of `rank`."""
    steps = run.ranks[rank]
    numbers = [str(step.number) for step in steps if step.number is not None]
    which = f"steps {', '.join(numbers)}" if numbers else "no ranges of steps: each trace counts as one step"
    device = "GPU" if run.on_gpu else "CPU ranks over gloo, whose times are not performance"
    lines = [f"{len(run.ranks)} rank(s), {device}; {which}; rank {run.slowest} is the slowest", *missing(run), ""]
    lines += _aligned([_TOTALS, *(row for each in run.ranks.values() for row in _totals(each))])
    lines += ["", f"rank {rank}, a mean step (ms; start delay and lateness in us, median / most):"]
    lines += _aligned([_COLUMNS, *_rows(steps)])
    return lines


def missing(run: Run) -> list[str]:
    """A sentence where the run had more ranks than these."""
    worlds = {parts.trace.world_size for parts in run.parts.values()} - {None}
    world = max((size for size in worlds if size is not None), default=len(run.ranks))
    if world <= len(run.ranks):
        return []
    return [f"only {len(run.ranks)} of the run's {world} ranks: a slower one may be missing, and so may peers"]


def share_line(run: Run, rank: int) -> str:
    """The hidden share with the numbers it was made of."""
    share = run.hidden_share(rank)
    if share is None:
        return f"hidden share: none, rank {rank} communicated nothing"
    exposed, comm = _ms(run.exposed_us(rank)), _ms(run.comm_us(rank))
    return f"hidden share of rank {rank}: {_percent(share)} = 1 - exposed {exposed} ms / communication {comm} ms"


def serial_line(serial: Run, run: Run, share: float | None) -> str:
    """The hidden share from step times with the numbers it was made of."""
    before, after = serial.slowest, run.slowest
    return (
        f"hidden share by step times: {_percent(share)} = "
        f"(serial step {_ms(serial.step_us(before))} ms, rank {before} - "
        f"overlapped step {_ms(run.step_us(after))} ms, rank {after}) / communication {_ms(run.comm_us(after))} ms, "
        f"rank {after}; the serial run's communication was {_ms(serial.comm_us(before))} ms. Steps are longer under "
        "the profiler; where the host is the limit this says nothing"
    )


_TOTALS = [
    *("rank", "step", "step ms", "comm ms", "exposed ms", "hidden", "peer wait ms", "other comm ms", "host syncs"),
    "in stages",
]  # fmt: skip


def _totals(steps: Sequence[RankStep]) -> Iterable[list[str]]:
    for step in steps:
        comm, exposed = total(step.comm), total(step.exposed)
        inside = None if step.syncs is None else sum(label is not None for label in step.syncs)
        yield [
            str(step.rank), "-" if step.number is None else str(step.number), _ms(step.us), _ms(comm), _ms(exposed),
            _share(exposed, comm), _ms(step.peer_wait), _ms(sum(work.end - work.start for work in step.other)),
            "-" if step.syncs is None else str(len(step.syncs)), "-" if inside is None else str(inside),
        ]  # fmt: skip


_COLUMNS = [
    *("layer", "pass", "stage", "n", "compute", "comm", "exposed", "hidden", "peer wait", "compute wait"),
    *("start delay", "late", "host syncs"),
]  # fmt: skip


def _rows(steps: Sequence[RankStep]) -> Iterable[list[str]]:
    sums: dict[Group, _Sums] = {}
    outside = _Sums()

    def of(label: Label | None) -> _Sums:
        return outside if label is None else sums.setdefault(Group(label.layer, label.direction, label.stage), _Sums())

    for step in steps:
        for key, figures in step.transfers.items():
            of(key.label).figures.append(figures)
        for work in step.compute:
            of(work.label).compute += work.end - work.start
        for label in step.syncs or ():
            of(label).syncs += 1
    on_gpu = steps[0].syncs is not None
    for group in sorted(sums, key=_order):
        layer = "dense" if group.layer is None else str(group.layer)
        yield [layer, group.direction, group.stage, *_cells(sums[group], len(steps), on_gpu)]
    yield ["-", "-", "(no stage)", *_cells(outside, len(steps), on_gpu)]


def _order(group: Group) -> tuple[bool, int, int, int, str]:
    stage = STAGES.index(group.stage) if group.stage in STAGES else len(STAGES)
    direction = _DIRECTIONS.index(group.direction)
    # backward goes the other way
    return (
        group.layer is None,
        group.layer or 0,
        direction,
        -stage if group.direction == BACKWARD else stage,
        group.stage,
    )


def _cells(sums: _Sums, steps: int, on_gpu: bool) -> list[str]:
    compute = _ms(sums.compute / steps) if sums.compute else ""
    syncs = "-" if not on_gpu else f"{sums.syncs / steps:g}" if sums.syncs else ""
    if not sums.figures:
        return ["", compute, *[""] * 7, syncs]
    comm = sum(total(each.comm) for each in sums.figures)
    exposed = sum(total(each.exposed) for each in sums.figures)
    return [
        f"{len(sums.figures) / steps:g}", compute, _ms(comm / steps), _ms(exposed / steps), _share(exposed, comm),
        _ms(_sum([each.peer_wait for each in sums.figures], steps)),
        _ms(_sum([each.compute_wait for each in sums.figures], steps)),
        _spread([each.start_delay for each in sums.figures]), _spread([each.late for each in sums.figures]), syncs,
    ]  # fmt: skip


def _sum(values: Iterable[float | None], steps: int) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / steps if known else None


def _spread(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):.0f} / {max(known):.0f}" if known else "-"


def _share(exposed: float, comm: float) -> str:
    return _percent(None if comm == 0 else 1 - exposed / comm)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _ms(us: float | None) -> str:
    return "-" if us is None else f"{us / 1e3:.3f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if heading in ("pass", "stage") else cell.rjust(width)
            for cell, width, heading in zip(row, widths, rows[0], strict=True)
        ).rstrip()
        for row in rows
    ]

"""The overlap report as lines of text: a line for each step of each rank, and a table of one rank's stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import NamedTuple

from .intervals import total
from .overlap import Run
from .rank_steps import Figures, RankStep
from .trace_labels import BACKWARD, FORWARD, RECOMPUTE, Label

# a layer's stages in the order in which they happen; others, of whatever back end, stand behind them
STAGES = (
    *("attention", "route", "replicas", "comparison", "weight_sync", "dispatch_preprocess", "exchange", "dispatch"),
    *(
        "dispatch_postprocess",
        "experts",
        "grad_reduce",
        "combine_preprocess",
        "combine",
        "shared",
        "resolve",
        "combine_postprocess",
    ),
)
_DIRECTIONS = (FORWARD, RECOMPUTE, BACKWARD)


class Group(NamedTuple):
    """A line of the table: a stage's micro-batches taken together."""

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
    lines += ["", f"rank {rank}, a mean step (n in a step; ms; start delay and late in us, median / most):"]
    lines += _aligned([_COLUMNS, *_rows(steps)])
    return lines


def missing(run: Run) -> list[str]:
    """A sentence where the run had more ranks than these."""
    worlds = {parts.trace.world_size for parts in run.parts.values()} - {None}
    world = max((size for size in worlds if size is not None), default=len(run.ranks))
    if world <= len(run.ranks):
        return []
    return [f"only {len(run.ranks)} of the run's {world} ranks: a slower one may be missing, and so may peers"]


def share_lines(run: Run, rank: int) -> list[str]:
    """The hidden share with the numbers it was made of: of everything, and of rows without the counts ahead of them."""
    rows = [(step.of_rows("comm"), step.of_rows("exposed")) for step in run.ranks[rank]]
    comm, exposed = (mean(total(each[i]) for each in rows) for i in range(2))
    return [
        _share_line(f"hidden share of rank {rank}", run.exposed_us(rank), run.comm_us(rank)),
        _share_line("  dispatch and combine alone", exposed, comm),
    ]


def _share_line(what: str, exposed: float, comm: float) -> str:
    if comm == 0:
        return f"{what}: none, nothing was communicated"
    return f"{what}: {_share(exposed, comm)} = 1 - exposed {_ms(exposed)} ms / communication {_ms(comm)} ms"


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
    *("rank", "step", "step ms", "comm ms", "exposed ms", "unfed ms", "hidden", "peer wait ms", "other comm ms"),
    *("host syncs", "in stages"),
]  # fmt: skip


def _totals(steps: Sequence[RankStep]) -> Iterable[list[str]]:
    """A line for each step of a rank, and their mean."""
    for step in [*steps, *([None] if len(steps) > 1 else [])]:
        some = steps if step is None else [step]
        comm, exposed = mean(total(each.comm) for each in some), mean(total(each.exposed) for each in some)
        other = mean(sum(work.end - work.start for work in each.other) for each in some)
        unfed = [total(each.unfed) for each in some if each.unfed is not None]
        peers = [each.peer_wait for each in some if each.peer_wait is not None]
        syncs = [each.syncs for each in some if each.syncs is not None]
        inside = [sum(label is not None for label in each) for each in syncs]
        name = "mean" if step is None else "-" if step.number is None else str(step.number)
        yield [
            str(steps[0].rank), name, _ms(mean(each.us for each in some)), _ms(comm), _ms(exposed),
            _ms(mean(unfed) if unfed else None), _share(exposed, comm), _ms(mean(peers) if peers else None), _ms(other),
            *(f"{mean(counts):g}" if counts else "-" for counts in ([len(each) for each in syncs], inside)),
        ]  # fmt: skip


_COLUMNS = [
    *("layer", "pass", "stage", "n", "compute", "comm", "exposed", "unfed", "hidden", "peer wait", "compute wait"),
    *("start delay", "late", "host syncs"),
]  # fmt: skip


def _rows(steps: Sequence[RankStep]) -> Iterable[list[str]]:
    """All layers taken together, then each of them."""
    on_gpu = steps[0].syncs is not None
    together: dict[tuple[str, str], _Sums] = {}
    layers: dict[Group, _Sums] = {}
    outside = _Sums()

    def places(label: Label | None) -> list[_Sums]:
        if label is None:
            return [outside]
        group = Group(label.layer, label.direction, label.stage)
        return [layers.setdefault(group, _Sums()), together.setdefault(group[1:], _Sums())]

    for step in steps:
        for key, figures in step.transfers.items():
            for sums in places(key.label):
                sums.figures.append(figures)
        for work in step.compute:
            for sums in places(work.label):
                sums.compute += work.end - work.start
        for label in step.syncs or ():
            for sums in places(label):
                sums.syncs += 1
    for direction, stage in sorted(together, key=lambda pair: _order(Group(0, *pair))):
        yield ["all", direction, stage, *_cells(together[direction, stage], len(steps), on_gpu)]
    yield ["-", "-", "(no stage)", *_cells(outside, len(steps), on_gpu)]
    for group in sorted(layers, key=_order):
        layer = "dense" if group.layer is None else str(group.layer)
        yield [layer, group.direction, group.stage, *_cells(layers[group], len(steps), on_gpu)]


def _order(group: Group) -> tuple[bool, int, int, int, str]:
    first = group.stage.partition(" ")[0]  # exchange of counts, of ids, of whatever a back end sends ahead
    stage = STAGES.index(first) if first in STAGES else len(STAGES)
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
        return ["", compute, *[""] * 8, syncs]
    comm = sum(total(each.comm) for each in sums.figures)
    exposed = sum(total(each.exposed) for each in sums.figures)
    return [
        f"{len(sums.figures) / steps:g}", compute, _ms(comm / steps), _ms(exposed / steps),
        _ms(_sum([None if each.unfed is None else total(each.unfed) for each in sums.figures], steps)),
        _share(exposed, comm),
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

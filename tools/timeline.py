"""A picture of one step: for each rank the computation, the communication and what of it is exposed. Needs matplotlib.

Colour tells the stage, paler means a later micro-batch, hatching is backward (dotted: recompute).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moe_ep.testing.chrome_trace import TraceError

from .intervals import Interval
from .overlap import Run
from .rank_steps import RankStep
from .trace_labels import BACKWARD, FORWARD, RECOMPUTE, Label

_COLOURS = {
    "attention": "#2ca02c", "route": "#8c564b", "dispatch_preprocess": "#bcbd22", "exchange": "#7f7f7f",
    "dispatch": "#1f77b4", "dispatch_postprocess": "#17becf", "experts": "#d62728",
    "combine_preprocess": "#e377c2", "combine": "#ff7f0e", "shared": "#9467bd", "resolve": "#393b79",
    "combine_postprocess": "#f7b6d2",
}  # fmt: skip
_NO_STAGE, _OTHER_STAGE, _EXPOSED = "#d9d9d9", "#636363", "#e6007e"
_HATCH = {FORWARD: "", BACKWARD: "////", RECOMPUTE: "...."}
_ROW, _BAR = 1.0, 0.8
Bars = dict[Label | None, list[Interval]]


def draw(run: Run, path: Path, window: tuple[float, float] | None = None) -> None:
    """Draw one step of each rank on one clock: the last one, see `drawn`.

    Args:
        run: what was measured.
        path: where to; its ending says the format, such as .png.
        window: first and last millisecond of the step to draw; None: all of it.

    Raises:
        TraceError: matplotlib is missing, or the picture cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as err:
        raise TraceError(f"no picture: {err}; pip install 'moe-ep[plots]'") from err
    steps = drawn(run)
    offsets = {step.rank: run.parts[step.rank].trace.zero_ns / 1e3 for step in steps}
    begin = min(step.start + offsets[step.rank] for step in steps)
    figure = Figure(figsize=(18, 1.6 + 1.3 * len(steps)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    end_ms = max(step.end + offsets[step.rank] - begin for step in steps) / 1e3
    shown = (0.0, end_ms) if window is None else window
    for number, step in enumerate(steps):
        _draw_rank(axes, step, (begin - offsets[step.rank]), shown, -3.5 * _ROW * number)
    _label(axes, steps, shown)
    _legend(axes, steps)
    name = steps[0].number
    figure.suptitle("the traces as one step" if name is None else f"step {name}")
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as err:  # ValueError: an ending that matplotlib does not know
        raise TraceError(f"{path} cannot be written ({err}); give --png another path, such as timeline.png") from err


def drawn(run: Run) -> list[RankStep]:
    """Of each rank the last step of those that are looked at: the first ones of a run are longer, nothing is warm."""
    return [steps[-1] for steps in run.ranks.values()]


def bars(step: RankStep) -> tuple[Bars, Bars]:
    """When computation and communication of each label ran."""
    compute: Bars = {}
    comm: Bars = {}
    for work in step.compute:
        compute.setdefault(work.label, []).append((work.start, work.end))
    for key, figures in step.transfers.items():
        comm.setdefault(key.label, []).extend(figures.comm)
    return compute, comm


def _draw_rank(axes: Any, step: RankStep, zero: float, shown: Interval, top: float) -> None:
    """Two rows, and a thin line between them where communication is exposed. `zero`: of the picture, on its clock."""
    gap = (shown[1] - shown[0]) / 4000
    for row, labelled in enumerate(bars(step)):
        low = top - row * 1.35 * _ROW
        for label, intervals in labelled.items():
            spans = _spans(intervals, zero, shown, gap)
            colour, hatch = _look(label)
            axes.broken_barh(spans, (low, _BAR), facecolor=colour, hatch=hatch, edgecolor="#202020", linewidth=0)
    other = _spans([(work.start, work.end) for work in step.other], zero, shown, gap)
    axes.broken_barh(other, (top - 1.35 * _ROW - 0.3, 0.2), facecolor="black", linewidth=0)
    axes.broken_barh(_spans(step.exposed, zero, shown, gap), (top - 0.42, 0.22), facecolor=_EXPOSED, linewidth=0)


def _spans(intervals: Iterable[Interval], zero: float, shown: Interval, gap: float) -> list[tuple[float, float]]:
    """(begin, length) in milliseconds inside the window; neighbours that nobody can tell apart become one."""
    found: list[list[float]] = []
    for start, end in sorted(intervals):
        first, last = max((start - zero) / 1e3, shown[0]), min((end - zero) / 1e3, shown[1])
        if first > last:
            continue
        if found and first - found[-1][1] <= gap:
            found[-1][1] = max(found[-1][1], last)
        else:
            found.append([first, last])
    return [(first, last - first) for first, last in found]


def _look(label: Label | None) -> tuple[Any, str]:
    """Colour and hatching."""
    from matplotlib.colors import to_rgb

    if label is None:
        return _NO_STAGE, ""
    paler = min(0.3 * label.micro_batch, 0.75)
    mixed = tuple(part + (1 - part) * paler for part in to_rgb(_colour(label.stage)))
    return mixed, _HATCH[label.direction]


def _colour(stage: str) -> str:
    return _COLOURS.get(stage.partition(" ")[0], _OTHER_STAGE)  # exchange of counts, of ids, ...


def _label(axes: Any, steps: Sequence[RankStep], shown: Interval) -> None:
    ticks, names = [], []
    for number, step in enumerate(steps):
        top = -3.5 * _ROW * number
        ticks += [top + _BAR / 2, top - 0.31, top - 1.35 * _ROW + _BAR / 2]
        names += [f"rank {step.rank}  compute", "exposed", "communication"]
    axes.set_yticks(ticks, names)
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=shown, xlabel="ms")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _legend(axes: Any, steps: Sequence[RankStep]) -> None:
    from matplotlib.patches import Patch

    labels = {label for step in steps for labelled in bars(step) for label in labelled}
    order = list(_COLOURS.values())
    stages = sorted(
        {label.stage for label in labels if label is not None},
        key=lambda stage: (order.index(_colour(stage)) if _colour(stage) in order else len(order), stage),
    )
    patches = [Patch(facecolor=_colour(stage), label=stage) for stage in stages]
    directions = {label.direction for label in labels if label is not None}
    for direction, text in ((BACKWARD, "backward"), (RECOMPUTE, "recompute")):
        if direction in directions:
            patches.append(Patch(facecolor="white", edgecolor="#202020", hatch=_HATCH[direction], label=text))
    last = max((label.micro_batch for label in labels if label is not None), default=0)
    if last:
        patches.append(Patch(facecolor="white", label=f"paler: micro-batch 1{f' to {last}' if last > 1 else ''}"))
    patches += [Patch(facecolor=_NO_STAGE, label="no stage"), Patch(facecolor=_EXPOSED, label="exposed")]
    if any(step.other for step in steps):
        patches.append(Patch(facecolor="black", label="other communication"))
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)

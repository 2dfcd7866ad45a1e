#!/usr/bin/env python3
"""Compare ways to balance expert-parallel ranks on routing traces, in one process, for any number of ranks.

    python tools/replica_report.py runs/tiny-trace                    a trace recorded with metrics.routing_trace
    python tools/replica_report.py drifting:R=64,E=256,K=8,skew=2     a synthetic one: zipf, drifting, bursty
    python tools/replica_report.py TRACE --slots 2 --min-quota 64 --policies none,quota --every 4 --plot load.png

Every policy (see tools/replica_policies.py) gets the same micro-batches, slots and smallest quota; its tokens are
really rerouted and counted at their destinations. Columns:

    max/mean    rows of the fullest rank over the mean, mean over micro-batches; worst: the largest
    bound       of max/mean: no placement with so many slots and fixed masters gets below (1: the mean is the bound)
    replicas    copies on all ranks; sent: MiB of expert weights that the busiest rank sends for a micro-batch
    remote      share of rows computed on another rank; sends: distinct (token, other rank) pairs for a token
    plan        median milliseconds of deciding on this CPU, tokens not included; quota-joint: for all together

Exit status: 0 fine, 2 something that cannot be read or compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no installed package

from moe_ep.errors import MoEError
from moe_ep.schema import nearest, require
from recipes.routing_trace import Step, read_steps
from tools.replica_policies import POLICIES
from tools.replica_series import Report, measure
from tools.synthetic_traces import is_synthetic, parse, steps_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit status."""
    chosen = options().parse_args(arguments)
    try:
        names = [name for name in chosen.policies.split(",") if name]
        for name in names:
            require(name in POLICIES, f"--policies: {name!r} is unknown; {nearest(name, POLICIES)}")
        for name in ("every", "window", "together"):
            require(getattr(chosen, name) >= 1, f"--{name} must be at least 1, got {getattr(chosen, name)}")
        reports = [measure(name, steps, chosen, names) for name, steps in traces(chosen.traces)]
        for report in reports:
            print("\n".join(lines_of(report, chosen)))
        if chosen.plot is not None:
            draw(reports, chosen.plot)
            print(f"plot {chosen.plot}")
    except (MoEError, OSError, ImportError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    return 0


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="folder, file, or KIND:KEY=VALUE,...")
    parser.add_argument("--slots", type=int, default=2, help="replica slots of a rank (default 2)")
    parser.add_argument("--min-quota", type=int, default=1, help="fewest rows of a replica (default 1)")
    parser.add_argument("--tolerance", type=int, default=0, help="quota: thousandths above the mean that will do")
    parser.add_argument("--window", type=int, default=8, help="micro-batches that eplb-history sees (default 8)")
    parser.add_argument("--together", type=int, default=2, help="micro-batches that interleave, for quota-joint")
    parser.add_argument("--every", type=int, default=1, help="take every n-th step (default 1: all)")
    parser.add_argument("--policies", default=",".join(POLICIES), help="separated by commas (default: all)")
    parser.add_argument("--plot", type=Path, default=None, help="draw max/mean over micro-batches into this file")
    return parser


def traces(names: Iterable[str]) -> Iterator[tuple[str, Iterable[Step]]]:
    """Each trace's name and steps; files of one command line are one trace."""
    files = [name for name in names if not is_synthetic(name)]
    if files:
        yield (files[0] if len(files) == 1 else f"{files[0]} ..."), read_steps(map(Path, files))
    for name in names:
        if is_synthetic(name):
            yield name, steps_of(parse(name))


def lines_of(report: Report, chosen: argparse.Namespace) -> list[str]:
    """The table of one trace."""
    header, mib = report.header, report.header.expert_bytes / 2**20
    names = list(dict.fromkeys(name for _, name in report.series))
    width = max(map(len, names))
    count = len(next(iter(report.bounds.values())))
    lines = [
        f"{report.name}: R={header.ranks} E={header.num_experts} K={header.top_k}, {header.layers} MoE layer(s), "
        f"{count} micro-batches; {chosen.slots} slot(s) a rank, smallest quota {chosen.min_quota}, {mib:.3g} MiB an "
        f"expert",
        f"{'layer':>5}  {'policy':<{width}}  max/mean   worst   bound  replicas  sent MiB  remote   sends  plan ms",
    ]
    layers = sorted(report.bounds)
    for layer in layers if len(layers) == 1 else [*layers, None]:
        for name in names:
            lines.append(_line(report, layer, layers, name, width, mib))
    if "fixed_rows" in chosen.policies.split(",") and "fixed_rows" not in names:
        lines.append(f"fixed_rows: left out, it needs {header.num_experts // header.ranks} slots a rank")
    return lines


def _line(report: Report, layer: int | None, layers: list[int], name: str, width: int, mib: float) -> str:
    """One policy on one layer, or the mean over all layers."""
    some = [report.series[place, name] for place in (layers if layer is None else [layer])]
    bound = fmean(fmean(report.bounds[place]) for place in (layers if layer is None else [layer]))
    moves_masters = name.startswith("eplb") or name == "balanced"

    def over(values: str) -> float:
        return fmean(fmean(getattr(series, values)) for series in some)

    return (
        f"{'all' if layer is None else layer:>5}  {name:<{width}}  {over('peak'):8.4f}  "
        f"{max(max(series.peak) for series in some):6.3f}  {'-' if moves_masters else f'{bound:.4f}':>6}  "
        f"{over('replicas'):8.1f}  {over('sent') * mib:8.1f}  {100 * over('remote'):5.1f}%  {over('sends'):6.2f}  "
        f"{median(value for series in some for value in series.plan_ms):7.2f}"
    )


def draw(reports: Sequence[Report], path: Path) -> None:
    """One panel a trace: max/mean of each policy over micro-batches, mean over layers.

    Raises:
        ImportError: no matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5 * len(reports)), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(len(reports), squeeze=False)
    for axes, report in zip(panels[:, 0], reports, strict=True):
        layers = sorted(report.bounds)
        for name in dict.fromkeys(name for _, name in report.series):
            peaks = [report.series[layer, name].peak for layer in layers]
            axes.plot([fmean(values) for values in zip(*peaks, strict=True)], label=name, linewidth=1)
        axes.set(xlabel="micro-batch", ylabel="rank load, max/mean", title=report.name)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", ncols=4)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())

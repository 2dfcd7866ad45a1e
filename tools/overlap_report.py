#!/usr/bin/env python3
"""What hides behind what: communication, its exposed part, delays and host syncs, from the traces of all ranks.

    python tools/overlap_report.py runs/NAME/trace/rank*.json
    python tools/overlap_report.py m2/rank*.json --serial m1/rank*.json     and the hidden share by step times
    python tools/overlap_report.py m2/rank*.json --png timeline.png         and a picture of a step (needs matplotlib)

Traces are what torch.profiler exports (`export_chrome_trace`; .json or .json.gz) with CPU and CUDA activities, one for
each rank, as `metrics.trace_steps` of the pretraining program records them. Terms are defined in `tools/overlap.py`.
Exit status: 0 fine, 2 traces that cannot be reported on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no installed package

from moe_ep.testing.chrome_trace import TraceError, read_trace
from tools import overlap_table, timeline
from tools.overlap import measure, share_by_step_times


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit status."""
    chosen = _parser().parse_args(argv)
    try:
        lines = _lines(chosen)
    except TraceError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def _lines(chosen: argparse.Namespace) -> list[str]:
    if chosen.window is not None and chosen.png is None:
        raise TraceError("--window is a part of the picture; give --png as well")
    run = measure(map(read_trace, chosen.traces), chosen.steps)
    rank = run.slowest if chosen.rank is None else chosen.rank
    if rank not in run.ranks:
        raise TraceError(f"--rank {rank}: there are traces of the ranks {', '.join(map(str, run.ranks))}")
    lines = [*overlap_table.report(run, rank), "", *overlap_table.share_lines(run, rank)]
    if chosen.serial:
        serial = measure(map(read_trace, chosen.serial), chosen.steps)
        lines.append(overlap_table.serial_line(serial, run, share_by_step_times(serial, run)))
    if chosen.png is not None:
        timeline.draw(run, chosen.png, chosen.window)
        lines.append(f"timeline: {chosen.png}{_which(timeline.drawn(run)[0].number)}")
    return lines


def _which(step: int | None) -> str:
    return "" if step is None else f" of step {step}; --steps A,A draws step A"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Report on the overlap in profiler traces.", allow_abbrev=False)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="one of each rank, .json or .json.gz")
    parser.add_argument(
        "--serial", nargs="+", type=Path, metavar="TRACE", help="of the same work without overlap (M = 1)"
    )
    parser.add_argument("--steps", type=_pair(int), metavar="A,B", help="first and last step to look at (default: all)")
    parser.add_argument("--rank", type=int, help="whose layers and stages to show (default: the slowest)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the last of the steps; --steps A,A draws step A")
    parser.add_argument(
        "--window",
        type=_pair(float),
        metavar="A,B",
        help="first and last millisecond of the step to draw (default: all of it)",
    )
    return parser


def _pair(kind: type[int] | type[float]):  # type: ignore[no-untyped-def]
    def parse(text: str) -> tuple[float, float]:
        first, comma, last = text.partition(",")
        if not comma or not float(first) < float(last) + (kind is int):
            raise argparse.ArgumentTypeError(f"{text!r} must be A,B with A before B")
        return kind(first), kind(last)

    return parse


if __name__ == "__main__":
    sys.exit(main())

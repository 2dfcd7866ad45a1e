#!/usr/bin/env python3
"""Charts of benchmark rows: time by skew, a line for each candidate, a panel for each task. Needs matplotlib.

    python tools/bench_chart.py tools/results/H200x8                 every FILE.jsonl in a folder becomes FILE.png
    python tools/bench_chart.py tools/results/dispatch-H200x2.jsonl

Stacks are told by M instead of skew. Exit status: 0 done, 1 nothing to draw, 2 files that cannot be read or written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no installed package

from tools.rows import Row, read_rows

PANEL = ("level", "stage", "pass", "form", "shape", "R", "dtype")  # rows that agree in these share a panel
LINE = ("dispatcher", "api", "experts", "variant", "reserve_sms", "S")  # and in these a line
Lines = dict[str, list[tuple[float, float]]]


def panels(rows: Sequence[Row]) -> dict[str, Lines]:
    """Points (skew or M, milliseconds) of each line of each panel; rows without a time are left out."""
    found: dict[str, Lines] = {}
    for row in rows:
        if row["status"] != "ok":
            continue
        stacked = row["variant"] is not None
        place = float(row["M"] if stacked else row["skew"])
        lines = found.setdefault(_title(row), {})
        lines.setdefault(_label(row), []).append((place, row["us_p50"] / 1e3))
    return {title: {name: sorted(points) for name, points in lines.items()} for title, lines in found.items()}


def _title(row: Row) -> str:
    shape = ",".join(str(size) for size in row["shape"].values())
    words = [shape if name == "shape" else row[name] for name in PANEL]
    return " ".join(f"R={word}" if name == "R" else str(word) for name, word in zip(PANEL, words, strict=True) if word)


def _label(row: Row) -> str:
    values = {name: row[name] for name in LINE if row[name] not in (None, 0)}
    named = ("reserve_sms", "S")
    return " ".join(f"{name}={value}" if name in named else str(value) for name, value in values.items())


def draw(found: dict[str, Lines], path: Path) -> None:
    """One picture of all panels.

    Raises:
        ImportError: no matplotlib.
        OSError: the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    axes_of: Any = figure.subplots(len(found), squeeze=False)
    for axes, (title, lines) in zip(axes_of[:, 0], found.items(), strict=True):
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        of_stack = title.startswith(("stack", "step"))
        axes.set(title=title, xlabel="M" if of_stack else "rank load, max/mean", ylabel="ms")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw each file; returns the exit status."""
    parser = argparse.ArgumentParser(description="Draw benchmark rows.", allow_abbrev=False)
    parser.add_argument("paths", nargs="+", type=Path, help="files of rows, or folders of them")
    drawn = 0
    for given in parser.parse_args(argv).paths:
        files = sorted(given.glob("*.jsonl")) if given.is_dir() else [given]
        if not files:
            print(f"error: {given} holds no *.jsonl; give a folder that --out of a benchmark wrote", file=sys.stderr)
            return 2
        for path in files:
            try:
                found = panels(read_rows(path)[1])
                if found:
                    draw(found, path.with_suffix(".png"))
            except OSError as err:
                print(f"error: {err.filename or path}: {err.strerror}; give files of rows, or folders", file=sys.stderr)
                return 2
            except ValueError as err:  # has the path
                print(f"error: {err}", file=sys.stderr)
                return 2
            except ImportError as err:
                print(f"error: no charts: {err}; pip install 'moe-ep[plots]'", file=sys.stderr)
                return 2
            print(f"{path.with_suffix('.png')}: {len(found)} panel(s)" if found else f"{path}: no row with a time")
            drawn += bool(found)
    return int(drawn == 0)


if __name__ == "__main__":
    sys.exit(main())

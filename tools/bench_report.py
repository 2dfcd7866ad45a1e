#!/usr/bin/env python3
"""Merge benchmark files into one table of ratios, and compare runs with the first one.

    python tools/bench_report.py A.jsonl                            the ratios of one run
    python tools/bench_report.py A.jsonl B.jsonl --threshold 0.05   B against A; exit 1 where B is more than 5 % slower

A ratio is a median time over the baseline's in the *same* run, printed with its name and both raw numbers, so that
anybody can recompute it (awslabs/awsome-distributed-ai#1215 shows what happens otherwise). The baseline is all2all, in
runs of Megatron's layer Megatron's own alltoall, and in runs of a library with and without its dispatcher the bare
library. Where two runs measured the same candidate, their ratios are compared (the baseline itself by its raw time).
Runs of different machines or shapes are refused unless --force.

Exit status: 0 fine, 1 a regression, 2 files that cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no installed package

from moe_ep.bounds import NOT_NEGATIVE
from tools.domino_table import domino_lines
from tools.replica_lines import replica_lines
from tools.rows import Row, read_rows

BASELINES = (("megatron", "dispatcher=alltoall"), ("all2all", None))  # the first that a run has
MACHINE = ("gpu", "gpus", "link")  # what makes it another machine
ENVIRONMENT = ("driver", "torch", "cuda", "nccl_loaded", "python")  # what may differ: ratios are taken within a run
# rows that agree in these measured the same thing; a candidate is one of the second group
TASK = (
    *("level", "stage", "pass", "form", "shape", "R", "skew", "M", "S", "variant", "attention", "layers"),
    *("reserve_sms", "dtype"),
)
CANDIDATE = ("dispatcher", "api", "experts")
Key = tuple[Any, ...]


class Refused(ValueError):
    """Files that cannot be read or compared: one sentence why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One file: its header, its ok rows by (task, candidate), and the others."""

    path: Path
    header: Row
    rows: dict[tuple[Key, Key], Row]
    lost: list[Row]

    def baseline(self, task: Key, candidate: Key) -> Row | None:
        """The baseline's row of the same task, with the same experts."""
        bare = f"bare {str(candidate[0]).removeprefix('bare ')}", candidate[1]
        found = (self.rows.get((task, (*base, candidate[2]))) for base in (bare, *BASELINES))
        return next((row for row in found if row is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One candidate of one run, with the times that its ratio is made of (microseconds) and the baseline's name."""

    run: Run
    task: Key
    candidate: Key
    us: float
    baseline: str
    baseline_us: float | None

    @property
    def stacked(self) -> bool:
        """Whether it is one of the variants of a stack, which have a table of their own."""
        return self.task[TASK.index("variant")] is not None

    @property
    def ratio(self) -> float | None:
        """Time relative to the baseline's in the same run: below 1 is faster."""
        return None if self.baseline_us is None else self.us / self.baseline_us

    def text(self) -> str:
        """`name: 50.00 us / all2all 100.00 us = 0.500`."""
        name = _name(self.candidate)
        if self.baseline_us is None:
            return f"{name}: {self.us:.2f} us / {self.baseline} -: no ok row of {self.baseline} in this run"
        return f"{name}: {self.us:.2f} us / {self.baseline} {self.baseline_us:.2f} us = {self.ratio:.3f}"


def load(path: Path) -> Run:
    """Read a file.

    Raises:
        Refused: no such file, no result file, or a candidate that it has twice.
    """
    try:
        header, values = read_rows(path)
    except OSError as err:
        raise Refused(f"{path} cannot be read ({err.strerror or err}); give rows that --out has written") from err
    except ValueError as err:
        raise Refused(str(err)) from err
    rows: dict[tuple[Key, Key], Row] = {}
    for row in values:
        key = (_key(row, TASK), _key(row, CANDIDATE))
        if row["status"] != "ok":
            continue
        if key in rows:
            raise Refused(f"{path} has {_name(key[1])} twice for {describe(key[0])}; keep one row, or one file a run")
        rows[key] = row
    if not rows:
        raise Refused(f"{path} has no row with status ok; nothing can be compared")
    return Run(path=path, header=header, rows=rows, lost=[row for row in values if row["status"] != "ok"])


def _key(row: Row, fields: Iterable[str]) -> Key:
    return tuple(tuple(row[name].items()) if name == "shape" else row[name] for name in fields)


def _name(candidate: Key) -> str:
    return " ".join(str(part) for part in candidate if part)


def describe(task: Key) -> str:
    """A task in one line."""
    row = dict(zip(TASK, task, strict=True))
    shape = ",".join(str(size) for _, size in row["shape"])
    words = [row["level"], row["stage"], row["pass"], row["form"], row["variant"]]
    words += [f"{name}={row[name]}" for name in ("attention", "layers", "reserve_sms") if row[name] is not None]
    numbers = f"T,H,I,E,K={shape} R={row['R']} skew={row['skew']} M={row['M']} S={row['S']} {row['dtype']}"
    return " ".join([*(word for word in words if word), numbers])


def differences(first: Run, other: Run) -> list[str]:
    """Sentences on why two runs are no comparison. Empty: they are one."""
    found = [
        f"{name} is {first.header[name]!r} in {first.path} and {other.header[name]!r} in {other.path}"
        for name in MACHINE
        if first.header[name] != other.header[name]
    ]
    popular = [_argument(run.header["argv"] or [], "--hot-experts") for run in (first, other)]
    if popular[0] != popular[1]:
        found.append(f"--hot-experts is {popular[0]} in {first.path} and {popular[1]} in {other.path}")
    ours, theirs = ({describe(task) for task, _ in run.rows} for run in (first, other))
    found += [f"only {first.path} has {task}" for task in sorted(ours - theirs)]
    return found + [f"only {other.path} has {task}" for task in sorted(theirs - ours)]


def _argument(argv: Sequence[str], name: str) -> str | None:
    """What an option of the command line was given; None: nothing."""
    for word, following in zip_longest(argv, argv[1:]):
        key, equals, value = word.partition("=")
        if key == name:
            return value if equals else following
    return None


def lines_of(run: Run) -> list[Line]:
    """All ok rows of a run with their baseline."""
    found = []
    for (task, candidate), row in run.rows.items():
        base = run.baseline(task, candidate)
        base_us = None if base is None else float(base["us_p50"])
        named = _name(BASELINES[-1] if base is None else _key(base, CANDIDATE[:2]))
        us = float(row["us_p50"])
        found.append(Line(run=run, task=task, candidate=candidate, us=us, baseline=named, baseline_us=base_us))
    return found


def regressions(first: Run, other: Run, threshold: float) -> list[str]:
    """Candidates that both runs measured and the other one has slower by more than the threshold."""
    before = {(line.task, line.candidate): line for line in lines_of(first)}
    found = []
    for line in lines_of(other):
        old = before.get((line.task, line.candidate))
        if old is None:
            continue
        raw = _name(line.candidate[:2]) == line.baseline or line.ratio is None or old.ratio is None
        new_value, old_value = (line.us, old.us) if raw else (line.ratio or 0.0, old.ratio or 0.0)
        if new_value > old_value * (1 + threshold):
            growth = 100 * (new_value / old_value - 1)
            what = "raw time" if raw else "ratio"
            found.append(
                f"{describe(line.task)}: {what} grew by {growth:.1f} %: {first.path.name} {old.text()}; "
                f"{other.path.name} {line.text()}"
            )
    return found


def report(runs: Sequence[Run]) -> list[str]:
    """The merged table as lines of text."""
    text = []
    for run in runs:
        facts = ", ".join(f"{name} {run.header[name]}" for name in (*MACHINE, *ENVIRONMENT, "commit", "dirty"))
        text.append(f"{run.path.name}: {facts}")
    everything = [line for run in runs for line in lines_of(run)]
    for task in dict.fromkeys(line.task for line in everything if not line.stacked):
        text.append(describe(task))
        text += [f"    {line.text()}  [{line.run.path.name}]" for line in everything if line.task == task]
    for run in runs:
        table = domino_lines(run.rows.values())
        text += [f"stacks of {run.path.name}", *table] if table else []
        copied = replica_lines([*run.rows.values()])
        text += [f"copies of experts in {run.path.name}", *copied] if copied else []
    for run in runs:
        text += [
            f"{describe(_key(row, TASK))}: {_name(_key(row, CANDIDATE))} {row['status']}: {row['reason']}"
            f"  [{run.path.name}]"
            for row in run.lost
        ]
    if all(run.header["gpu"] is None for run in runs):
        text.append("No GPU in these runs: times of CPU/gloo are not performance.")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit status."""
    parser = argparse.ArgumentParser(description="Merge and compare benchmark files.", allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl", help="the first is the reference")
    parser.add_argument("--threshold", type=float, default=0.05, help="relative growth that counts as a regression")
    parser.add_argument("--force", action="store_true", help="compare runs of different machines or shapes")
    chosen = parser.parse_args(argv)
    try:
        if not NOT_NEGATIVE.holds(chosen.threshold):
            raise Refused(f"--threshold must be {NOT_NEGATIVE}, got {chosen.threshold}")
        runs = [load(path) for path in chosen.files]
        apart = [sentence for run in runs[1:] for sentence in differences(runs[0], run)]
        if apart and not chosen.force:
            raise Refused("these runs are no comparison; --force compares what they share:\n" + "\n".join(apart))
    except Refused as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    slower = [text for run in runs[1:] for text in regressions(runs[0], run, chosen.threshold)]
    print("\n".join([*report(runs), *(f"forced: {text}" for text in apart), *(f"REGRESSION {t}" for t in slower)]))
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())

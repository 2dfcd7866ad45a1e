#!/usr/bin/env python3
"""All that is measured on one host with R GPUs: contract suite, stages, layers, stacks, replicas, charts. One command.

    python tools/bench_suite.py --ranks 8 --out tools/results/H200x8           what is there already is not run again
    python tools/bench_suite.py --ranks 8 --out ... --only contract,stages     those steps alone
    python tools/bench_suite.py --ranks 4 --out /tmp/try --rehearsal          tiny sizes on CPUs: does it all run?

Every step is a command of its own with a limit of its own, listed with its state in OUT/suite.json; its output is in
OUT/STEP.txt and its rows in OUT/STEP.jsonl. A step that was done with the same command at the same commit is left out,
so a machine that is lent for minutes gets through it in several goes. A table of all steps is printed last of all. Exit
status: 0 all is done, 1 a step failed or was cut off, 2 arguments or a machine that cannot serve.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no installed package

from moe_ep.errors import RecipeError
from moe_ep.schema import nearest, require
from tools.rows import ROOT, git_state, read_rows
from tools.suite_steps import GROUPS, Step, steps

State = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The steps of one host, where their results go, and at which commit.

    Attributes:
        out: folder of logs, rows and the record of states.
        commit: of the sources, None where nobody knows.
    """

    out: Path
    commit: str | None

    @property
    def record(self) -> Path:
        """The file of states."""
        return self.out / "suite.json"

    def states(self) -> dict[str, State]:
        """What earlier goes left."""
        return json.loads(self.record.read_text()) if self.record.exists() else {}

    def is_done(self, step: Step) -> bool:
        """Whether an earlier go did exactly this."""
        found = self.states().get(step.name, {})
        return found.get("state") == "done" and (found["command"], found["commit"]) == (step.text, self.commit)

    def run(self, step: Step) -> State:
        """Run one step to its end or its limit, and note how it went."""
        started = time.monotonic()
        with (self.out / f"{step.name}.txt").open("w") as log:
            code = _run(step, log)
        state = "cut off" if code is None else "done" if code == 0 else f"failed ({code})"
        found: State = {"state": state, "seconds": round(time.monotonic() - started, 1), "command": step.text}
        found |= {"commit": self.commit, "rows": _rows(step.rows)}
        self.record.write_text(json.dumps(self.states() | {step.name: found}, indent=1) + "\n")
        return found


def _run(step: Step, log: Any) -> int | None:
    """Exit status, None where its time was up: then all of its processes are killed."""
    environment = os.environ | step.environment
    process = subprocess.Popen(
        step.argv, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        return process.wait(step.limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _rows(path: Path | None) -> dict[str, int]:
    """How many rows of each status a step has written."""
    counts: dict[str, int] = {}
    if path is not None and path.exists():
        with contextlib.suppress(ValueError):
            for row in read_rows(path)[1]:
                counts[row["status"]] = counts.get(row["status"], 0) + 1
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is not done yet, print the table; returns the exit status."""
    chosen = _parser().parse_args(argv)
    try:
        wanted = _wanted(chosen)
        chosen.out.mkdir(parents=True, exist_ok=True)
    except RecipeError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    except OSError as err:
        print(f"error: {chosen.out} cannot be made: {err.strerror}; choose another folder for --out", file=sys.stderr)
        return 2
    suite = Suite(out=chosen.out, commit=chosen.commit or git_state(ROOT)[0])
    until = time.monotonic() + chosen.seconds
    for step in wanted:
        if suite.is_done(step):
            continue
        if time.monotonic() + step.limit_s > until:
            print(f"{step.name}: left for another go, it may take {step.limit_s} s", flush=True)
            continue
        print(f"{step.name}: {suite.run(step)['state']}", flush=True)
    lines, all_done = table(suite, wanted)
    print("\n".join(lines))
    return int(not all_done)


def _wanted(chosen: argparse.Namespace) -> list[Step]:
    require(chosen.ranks >= 2, f"--ranks must be at least 2, got {chosen.ranks}")
    have = torch.cuda.device_count()
    require(
        chosen.rehearsal or have >= chosen.ranks,
        f"--ranks {chosen.ranks} needs as many GPUs, this machine has {have}; --rehearsal runs tiny sizes on CPUs",
    )
    for name in chosen.only:
        require(name in GROUPS, f"--only {name!r} is no group of steps; {nearest(name, GROUPS)}")
    found = steps(chosen.ranks, chosen.out, rehearsal=chosen.rehearsal, commit=chosen.commit)
    return [step for step in found if not chosen.only or step.group in chosen.only]


def table(suite: Suite, wanted: Sequence[Step]) -> tuple[list[str], bool]:
    """A line for each step, and whether all are done."""
    states, lines = suite.states(), []
    width = max(len(step.name) for step in wanted)
    for step in wanted:
        found = states.get(step.name, {"state": "not run", "seconds": 0.0, "rows": {}})
        rows = ", ".join(f"{count} {status}" for status, count in found["rows"].items())
        lines.append(f"{step.name:<{width}}  {found['state']:<12} {found['seconds']:>7.1f} s  {rows}")
    return lines, all(suite.is_done(step) for step in wanted)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Run every benchmark of one host.", allow_abbrev=False)
    add = parser.add_argument
    add("--ranks", type=int, required=True, help="GPUs of this host to use: 2, 4 or 8")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for rows, logs, charts and states")
    add("--only", type=lambda text: text.split(","), default=[], help=f"groups of steps: {', '.join(GROUPS)}")
    add("--seconds", type=float, default=float("inf"), help="start no step that might last longer than this is left")
    add("--rehearsal", action="store_true", help="tiny sizes on CPUs over gloo")
    add("--commit", help="of sources that were copied here without git, with -dirty behind it where they differ")
    return parser


if __name__ == "__main__":
    sys.exit(main())

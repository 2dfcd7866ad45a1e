"""Copies of hot experts in benchmarks on two GPUs: stacks, stages alone and exposed, copies beside push and pull."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.rows import Row, read_rows

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.gpu(2, apart=True), pytest.mark.timeout(300)]
SHAPE = "2048,1024,512,16,4"
COPIES = ("--skew", "1,1.6", "--replica-slots", "0,2", "--pass", "fwd+bwd", "--iterations", "5", "--warmup", "2")


def rows_of(folder: Path, program: str, *arguments: str) -> list[Row]:
    out = folder / "rows.jsonl"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(f"tools/{program}", *arguments, "--out", str(out)),
    ]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_rows(out)[1]


def test_layers_and_stages_with_copies(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "bench_dispatch.py", "--shape", SHAPE, "--level", "layer,stage", *COPIES)
    assert {row["status"] for row in rows} == {"ok"} and all(row["wrong"] == 0 for row in rows)
    stages = [row for row in rows if row["level"] == "stage" and row["S"] == 2]
    assert [row["stage"] for row in stages] == ["plan", "reroute", "weight_sync", "grad_reduce"] * 2
    for row in stages:
        assert row["exposed_us"] is not None and row["us_p50"] > 0
        if row["stage"] in ("weight_sync", "grad_reduce") and row["skew"] > 1:
            assert row["ratio"] is None or row["ratio"] > 1, "nothing is faster than the link"


def test_stacks_with_copies_placed_for_each_micro_batch_and_for_all(tmp_path: Path) -> None:
    arguments = ("--shape", SHAPE, "--level", "stack", "--micro-batches", "2", "--layers", "2", *COPIES)
    rows = rows_of(tmp_path, "bench_dispatch.py", *arguments)
    assert {row["status"] for row in rows} == {"ok"}
    copied = [row for row in rows if row["S"] == 2]
    assert [row["variant"] for row in copied] == ["unsplit", "split", "overlapped", "joint"] * 2
    assert all(0 <= row["exposed_us"] <= row["comm_us"] for row in copied)


def test_push_and_pull_beside_copies_of_the_same_bytes(tmp_path: Path) -> None:
    arguments = ("--slots", "1", "--blocks", "32", "--iterations", "5", "--messages")
    rows = rows_of(tmp_path, "bench_replica_sync.py", *arguments)
    assert [row["dispatcher"] for row in rows] == ["copy", "kernels, 32 blocks", "messages"] * 2
    assert [row["api"] for row in rows] == ["replica push"] * 3 + ["replica pull"] * 3
    for row in rows:
        copied = next(other for other in rows if other["api"] == row["api"])
        assert row["wrong"] == 0
        assert row["ratio"] is None if row is copied else row["ratio"] == row["us_p50"] / copied["us_p50"]

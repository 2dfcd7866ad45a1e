"""bench_dispatch on two GPUs: the figures that only a device has, of a small stack."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.rows import Row, read_rows

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.gpu(2, apart=True), pytest.mark.timeout(300)]
LAYERS, MICRO_BATCHES = 2, 2
# Computation of a layer and micro-batch, 15 TFLOP in grouped GEMMs and 5 in attention (over 30 ms at 600 TFLOP/s), is
# several times what the host needs to issue it (7 ms): a stack that waits for its host hides nothing.
SHAPE = "16384,4096,6144,8,2"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench") / "rows.jsonl"


@pytest.fixture(scope="module")
def rows(out: Path) -> list[Row]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("tools/bench_dispatch.py", "--shape", SHAPE, "--level", "stack", "--pass", "fwd+bwd"),
        *("--layers", str(LAYERS), "--micro-batches", f"1,{MICRO_BATCHES}", "--attention", "gqa"),
        *("--reserve-sms", "0,16", "--iterations", "3", "--warmup", "2", "--out", str(out)),
        *("--trace", str(out.parent / "traces")),
    ]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_rows(out)[1]


def test_every_figure_of_a_device_is_there(rows: list[Row]) -> None:
    assert [row["status"] for row in rows] == ["ok"] * 9
    for row in rows:
        real = row["variant"] not in ("compute", "communication")
        assert (row["peak_mib"] is not None and row["peak_mib"] > 0) == real
        if not real:
            continue
        assert 0 <= row["exposed_us"] <= row["comm_us"] < row["us_p50"] * 1.5, row
        assert 0 <= row["hidden_share"] <= 1 and 0 < row["sms"] <= 132
        assert 0 < row["gemm_us"] < row["us_p50"] * 1.5 and 0.2 < row["gemm_rate"] < 2


def test_only_interleaving_hides(rows: list[Row]) -> None:
    shares = {row["variant"]: row["hidden_share"] for row in rows if row["M"] == MICRO_BATCHES}
    assert shares["split"] < 0.2 < shares["overlapped"]


def test_reserved_sms_are_recorded(rows: list[Row]) -> None:
    assert [row["reserve_sms"] for row in rows if row["variant"] == "overlapped"] == [0, 16]


def test_host_syncs_are_those_that_all2all_declares(rows: list[Row]) -> None:
    for row in rows:
        if row["host_syncs"] is not None and row["variant"] != "communication":
            assert row["host_syncs"] <= LAYERS * (1 if row["variant"] == "unsplit" else row["M"]), row


def test_the_trace_shows_both_streams(rows: list[Row], out: Path) -> None:
    (path,) = (out.parent / "traces").glob("*fwd+bwd-M2-overlapped-reserve16-rank1.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    streams = {event["args"]["stream"] for event in events if event.get("cat") == "kernel"}
    assert len(streams) >= 2

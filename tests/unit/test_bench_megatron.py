"""tools/bench_megatron.py without ranks: its table, the bounds of its check, the report's baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import bench_report
from tools.bench_megatron import main, table
from tools.bench_setting import Place, Setting, make_setting
from tools.megatron_layers import differing
from tools.rows import MACHINE_FIELDS, Row, make_row
from tools.shapes import Shape, make_workload

SHAPE = Shape(T=16, H=8, I=8, E=4, K=2)


def row(dispatcher: str, us: float | None, **change: Any) -> Row:
    known = {
        "level": "layer", "pass": "fwd+bwd", "experts": "megatron:te", "shape": SHAPE._asdict(), "R": 2, "skew": 1.0,
        "skew_realised": 1.0, "M": 1, "S": 0, "dtype": "bfloat16", "status": "ok", "us_p50": us, "us_p90": us,
        "dispatcher": dispatcher,
    }  # fmt: skip
    return make_row(**(known | change))


ROWS = [
    row("megatron", 200.0, api="dispatcher=alltoall", peak_mib=3.2),
    row("all2all", 160.0),
    row("direct", 100.0, api="num_sms=8"),
    row("deepep", None, status="refused", reason="Unavailable: not installed"),
]


def test_gains_are_over_megatrons_alltoall_and_refusals_are_said() -> None:
    first, native, all2all, direct, missing = table(ROWS)
    assert first == "16,8,8,4,2 R=2 skew=1.00 bfloat16 megatron:te: forward + backward, us"
    assert native.split() == ["megatron", "dispatcher=alltoall", "200", "p90", "200", "1.00", "x", "3", "MiB"]
    assert all2all.split() == ["all2all", "160", "p90", "160", "1.25", "x", "-"]
    assert direct.split() == ["direct", "num_sms=8", "100", "p90", "100", "2.00", "x", "-"]
    assert missing.split() == ["deepep", "refused:", "Unavailable:", "not", "installed"]
    assert "-" in table(ROWS[1:])[1].split()


def test_the_report_takes_megatrons_alltoall_as_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for name, us in (("a", 100.0), ("b", 120.0)):
        header = dict.fromkeys(MACHINE_FIELDS) | {"kind": "machine", "gpu": "H200", "gpus": 2, "link": "NV18"}
        rows = [*ROWS[:2], row("direct", us)]
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(value) + "\n" for value in (header, *rows)))
    assert bench_report.main([str(files[0])]) == 0
    out = capsys.readouterr().out
    assert "all2all megatron:te: 160.00 us / megatron dispatcher=alltoall 200.00 us = 0.800" in out
    assert "direct megatron:te: 100.00 us / megatron dispatcher=alltoall 200.00 us = 0.500" in out
    assert bench_report.main(list(map(str, files))) == 1
    assert "ratio grew by 20.0 %" in capsys.readouterr().out


def setting() -> Setting:
    place = Place(device=torch.device("cpu"), group=None, rank=0, num_ranks=1)
    return make_setting(make_workload(SHAPE, 1, 1.0, 0), place, torch.float32, 1)


def test_what_is_out_of_bounds_is_named() -> None:
    native = {"y": torch.ones(4), "weight": torch.ones(4)}
    eps = torch.finfo(torch.float32).eps
    assert differing(native, native, setting()) == (0.0, "")
    error, sentence = differing({**native, "y": native["y"] * (1 + 2 * eps)}, native, setting())
    assert error == pytest.approx(2 * eps) and sentence == "", "K = 2 roundings"
    assert (
        "y differs from Megatron's own by" in differing({**native, "y": torch.full((4,), 1.001)}, native, setting())[1]
    )
    assert "weight differs" in differing({**native, "weight": torch.full((4,), 1.001)}, native, setting())[1]
    assert differing({**native, "y": torch.full((4,), float("nan"))}, native, setting())[1]
    assert differing({**native, "weight": None}, native, setting())[1] == "weight has no value"


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err

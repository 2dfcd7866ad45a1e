"""`tools/bench_deepep.py` over doubles of the library: both ways run and give the right result. Times are no matter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import close_dispatchers
from moe_ep.testing.ranks import RankPool
from moe_ep.testing.table_deepep import DTYPE, FORMS, HIDDEN
from tests.ranks import small_deepep  # registers the dispatcher over the doubles
from tools import bench_deepep, bench_report, library_bench
from tools.bench_setting import Place
from tools.rows import RowFile, machine_header
from tools.shapes import Shape

SHAPE = Shape(T=6, H=HIDDEN, I=16, E=8, K=2)
MARKS = {f"{way} {what}" for way in ("library", "bare", "ours") for what in ("dispatch", "combine")}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=60) as ranks:
        yield ranks


def measured(group: dist.ProcessGroup, rank: int, form: str) -> Any:
    config = DispatchConfig(
        name=small_deepep.DoubledDeepEP.name, num_experts=SHAPE.E, top_k=SHAPE.K, hidden_size=SHAPE.H, dtype=DTYPE,
        max_tokens=SHAPE.T, options=FORMS[form],
    )  # fmt: skip
    place = Place(group=group, rank=rank, num_ranks=2, device=torch.device("cpu"))
    times, error = library_bench.measure(config, SHAPE, place, 2, bench_deepep.Pair)
    close_dispatchers(group)
    return times, library_bench.cells(SHAPE, times), error, library_bench.rows_of(config, form, SHAPE, 2, times, error)


@pytest.mark.parametrize("form", FORMS)
def test_both_ways_run(pool: RankPool, form: str) -> None:
    for times, cells, error, rows in pool.run(measured, form):
        assert set(times) == MARKS | {"permute combine"}
        slowest = times["library combine"][2] + times["permute combine"][2]
        assert times["library combine"][0] < times["bare combine"][1] <= slowest + 1e-6, "both, of one iteration"
        assert len(cells) == len(library_bench.HEADER)
        assert 0 < error < library_bench.TOLERANCE
        found = {(row["stage"], row["dispatcher"]): row["us_p50"] for row in rows}
        for stage in ("dispatch", "combine"):
            assert found[stage, "deepep_double"] == round(times[f"ours {stage}"][1], 2)
            assert found[stage, "bare deepep_double"] == round(times[f"bare {stage}"][1], 2)


def test_a_wrong_result_has_no_time() -> None:
    config = DispatchConfig(name="deepep", num_experts=8, top_k=2, hidden_size=HIDDEN)
    times = dict.fromkeys((*MARKS, "train"), (1.0, 2.0, 3.0))
    rows = library_bench.rows_of(config, "v1", SHAPE, 2, times, 0.5)
    assert [row["stage"] for row in rows] == ["dispatch"] * 2 + ["combine"] * 2 + ["dispatch+combine"]
    assert {(row["status"], row["us_p50"]) for row in rows} == {("failed", None)}
    assert "off by 5.0e-01" in rows[0]["reason"]


def test_the_report_holds_ours_against_the_bare_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the same form; rows of two forms stand in one file."""
    config, file = DispatchConfig(name="deepep", num_experts=8, top_k=2, hidden_size=HIDDEN), tmp_path / "rows.jsonl"
    out = RowFile(file, machine_header(["tools/bench_deepep.py"]))
    for form, us in (("v1", 100.0), ("v2", 50.0)):
        times = {mark: (us, us * (1.08 if mark.startswith("ours") else 1), us) for mark in MARKS}
        out.append(library_bench.rows_of(config, form, SHAPE, 2, times, 1e-3))
    assert bench_report.main([str(file)]) == 0
    said = capsys.readouterr().out
    assert said.count("deepep v1: 108.00 us / bare deepep v1 100.00 us = 1.080") == 2
    assert said.count("deepep v2: 54.00 us / bare deepep v2 50.00 us = 1.080") == 2

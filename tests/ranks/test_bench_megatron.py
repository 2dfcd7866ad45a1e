"""tools/bench_megatron.py on two CPU ranks: complete rows that the report reads, and wrong results found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep.dispatch import Ticket, register_dispatcher
from moe_ep.dispatch.all2all import All2All
from moe_ep.testing.ranks import RankPool
from tests.ranks import megatron_cpu as cpu
from tools import bench_megatron, bench_report
from tools.bench_setting import Place
from tools.rows import read_rows

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (moe-ep[megatron])")

SHAPE = "12,16,24,8,2"


@register_dispatcher("doubling_all2all")
class Doubling(All2All):
    """Gives twice the output."""

    def _combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None:
        super()._combine_preprocess(ticket, 2 * y_NH)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120) as ranks:
        yield ranks


def measured(group: Any, rank: int, arguments: list[str]) -> int:
    place = Place(device=torch.device("cpu"), group=group, rank=rank, num_ranks=2)
    with cpu.on_cpu(), cpu.parallel(2):
        chosen = bench_megatron._parser().parse_args(arguments)
        return bench_megatron.measure(chosen, arguments, place)


def test_rows_of_all_dispatchers(pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "megatron.jsonl"
    arguments = ["--shape", SHAPE, "--iterations", "2", "--warmup", "1", "--skew", "1,1.5", "--out", str(out)]
    assert pool.run(measured, [*arguments, "--dispatchers", "agrs,direct"]) == [0, 0]
    header, rows = read_rows(out)
    assert header["argv"][0] == "tools/bench_megatron.py" and "/" not in header["argv"][-3]
    assert len(rows) == 2 * 5
    for row in rows:
        native, of_messages = row["dispatcher"] == "megatron", row["dispatcher"] in ("all2all", "agrs")
        assert (row["level"], row["pass"], row["R"]) == ("layer", "fwd+bwd", 2)
        assert row["experts"] == "megatron:sequential"
        if of_messages or row["api"] == "dispatcher=alltoall":
            assert row["status"] == "ok" and 0 < row["us_p10"] <= row["us_p50"] <= row["us_p90"]
            assert row["err"] == 0 or row["dispatcher"] == "agrs"
            assert row["err"] < 1e-6
        else:
            assert row["status"] == "refused" and (native or "direct" in row["reason"])
    assert {row["skew_realised"] == 1 for row in rows} == {True, False}
    assert bench_report.main([str(out)]) == 0
    assert "agrs megatron:sequential: " in (said := capsys.readouterr().out)
    assert " us / megatron dispatcher=alltoall " in said


def test_a_wrong_result_is_a_failed_row(pool: RankPool, tmp_path: Path) -> None:
    out = tmp_path / "wrong.jsonl"
    arguments = ["--shape", SHAPE, "--iterations", "1", "--warmup", "1", "--out", str(out)]
    assert pool.run(measured, [*arguments, "--dispatchers", "doubling_all2all"]) == [1, 1]
    (row,) = [row for row in read_rows(out)[1] if row["dispatcher"] == "doubling_all2all"]
    assert row["status"] == "failed" and "y differs from Megatron's own by 1.0e+00" in row["reason"]

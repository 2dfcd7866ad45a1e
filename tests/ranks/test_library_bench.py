"""`tools/bench_deepep.py` over doubles of the library: both ways run and give the right result. Times are no matter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import close_dispatchers
from moe_ep.testing.ranks import RankPool
from moe_ep.testing.table_deepep import DTYPE, FORMS, HIDDEN
from tests.ranks import small_deepep  # registers the dispatcher over the doubles
from tools import bench_deepep, library_bench
from tools.bench_setting import Place
from tools.shapes import Shape

SHAPE = Shape(T=6, H=HIDDEN, I=16, E=8, K=2)
MARKS = {f"{way} {what}" for way in ("library", "bare", "ours") for what in ("dispatch", "combine")} - {"bare combine"}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=60) as ranks:
        yield ranks


def measured(group: dist.ProcessGroup, rank: int, form: str) -> tuple[set[str], tuple[str, ...], float]:
    config = DispatchConfig(
        name=small_deepep.DoubledDeepEP.name, num_experts=SHAPE.E, top_k=SHAPE.K, hidden_size=SHAPE.H, dtype=DTYPE,
        max_tokens=SHAPE.T, options=FORMS[form],
    )  # fmt: skip
    place = Place(group=group, rank=rank, num_ranks=2, device=torch.device("cpu"))
    times, error = library_bench.measure(config, SHAPE, place, 2, bench_deepep.Pair)
    close_dispatchers(group)
    return set(times), library_bench.cells(SHAPE, times), error


@pytest.mark.parametrize("form", FORMS)
def test_both_ways_run(pool: RankPool, form: str) -> None:
    for marks, cells, error in pool.run(measured, form):
        assert marks == MARKS | {"permute combine"}
        assert len(cells) == len(library_bench.HEADER)
        assert 0 < error < library_bench.TOLERANCE

"""Floors: a case counted by hand, the measured links' table, and the counts that dispatchers report."""

from __future__ import annotations

import math

import pytest
import torch

from moe_ep.load import layout_stats
from tools.floors import Rates, Traffic, combine_floor, count_destinations, dispatch_floor, slowest_us, traffic_of_ids
from tools.shapes import PRESETS, make_workload

# the example of the module's docstring: two ranks of two experts
IDS = [torch.tensor([[0, 2], [2, 3], [1, -1]]), torch.tensor([[0, 1]])]


def test_the_worked_example() -> None:
    rank0, rank1 = traffic_of_ids(IDS, num_experts=4)
    assert rank0 == Traffic(tokens=3, unique=3, rows=4, sent=2, received=1)
    assert rank1 == Traffic(tokens=1, unique=2, rows=3, sent=1, received=2)
    assert (rank0.crossing, rank1.crossing) == (2, 2)


def test_bytes_and_times_by_hand() -> None:
    traffic = Traffic(tokens=3, unique=5, rows=8, sent=2, received=4)
    slow_link, slow_memory = Rates(link_gbs=1e-3, hbm_tbs=1.0), Rates(link_gbs=1e3, hbm_tbs=1e-6)
    unique = dispatch_floor(traffic, 100, "unique", slow_link)
    assert (unique.link_bytes, unique.hbm_bytes) == (4 * 100, (3 + 5 + 5) * 100)
    assert unique.us == 400  # 400 bytes at a megabyte a second
    expanded = dispatch_floor(traffic, 100, "expanded", slow_memory)
    assert expanded.hbm_bytes == (3 + 5 + 5 + 8) * 100 and expanded.us == pytest.approx(2100)
    combine = combine_floor(traffic, 100, slow_memory)
    assert (combine.link_bytes, combine.hbm_bytes) == (400, (8 + 2 + 4 + 3) * 100)
    assert combine.us == pytest.approx(1700)
    assert slowest_us([unique, combine]) == combine.us


@pytest.mark.parametrize(("name", "table_us"), [("dsv3", 154), ("qwen3", 88), ("mixtral", 69)])
def test_link_floors_of_balanced_routing_on_two_ranks(name: str, table_us: float) -> None:
    """The table's draw and ours differ by chance: each token crosses with probability p, independently or less.

    So a rank's crossing rows have a standard deviation of at most sqrt(T p (1-p)); the busier of two directions and two
    draws stay within four of them, times sqrt(2), and the table is rounded to 1 us.
    """
    shape, row_us = PRESETS[name], 2 * PRESETS[name].H / 380e3
    p = 1 - math.comb(shape.E // 2, shape.K) / math.comb(shape.E, shape.K)
    tolerance = 0.5 + 4 * math.sqrt(2 * shape.T * p * (1 - p)) * row_us
    workload = make_workload(shape, num_ranks=2, skew=1.0, seed=3)
    traffic = traffic_of_ids([workload.ids(rank, 0) for rank in range(2)], shape.E)
    link_only = Rates(link_gbs=380.0, hbm_tbs=1e9)
    got = slowest_us([dispatch_floor(t, 2 * shape.H, "unique", link_only) for t in traffic])
    assert got == pytest.approx(table_us, abs=tolerance)
    assert got == slowest_us([combine_floor(t, 2 * shape.H, link_only) for t in traffic])


def test_expanded_rows_of_dsv3_are_bound_by_memory_not_by_the_link() -> None:
    shape = PRESETS["dsv3"]
    workload = make_workload(shape, num_ranks=2, skew=1.0, seed=0)
    traffic = traffic_of_ids([workload.ids(rank, 0) for rank in range(2)], shape.E)[0]
    floor = dispatch_floor(traffic, 2 * shape.H, "expanded", Rates())
    want = (traffic.tokens + 2 * traffic.unique + traffic.rows) * 2 * shape.H / 4.2e6
    assert floor.us == pytest.approx(want) and floor.us > floor.link_bytes / 380e3


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_counts_agree_with_what_a_ticket_reports(num_ranks: int) -> None:
    ids = torch.randint(-1, 8, (50, 3), generator=torch.Generator().manual_seed(0))
    unique_R, routes_R = count_destinations(ids, 8, num_ranks)
    for rank in range(num_ranks):
        stats = layout_stats(ids, 8, num_ranks, rank, row_bytes=10)
        assert (int(routes_R.sum()), int(unique_R.sum())) == (stats.routes, stats.messages)
        assert int(routes_R.sum() - routes_R[rank]) == stats.cross_rank_routes
        assert int(unique_R.sum() - unique_R[rank]) * 10 == stats.dedup_bytes

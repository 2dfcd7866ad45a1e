"""Load statistics against counts made by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep.errors import InputError
from moe_ep.load import LayoutStats, expert_load, imbalance, layout_stats, rank_load


def as_ints(stats: LayoutStats) -> dict[str, int]:
    return {name: int(getattr(stats, name)) for name in LayoutStats.__dataclass_fields__}


def article_ids(rank: int) -> torch.Tensor:
    """4 ranks with 0, 16, 32 and 64 tokens of 2 routes each over 8 experts: all take (0, 7), one token (1, 6)."""
    ids = torch.tensor([0, 7]).repeat((0, 16, 32, 64)[rank], 1)
    if rank == 2:
        ids[5] = torch.tensor([1, 6])
    return ids


def test_the_worked_example_of_112_tokens() -> None:
    stats = [as_ints(layout_stats(article_ids(r), 8, 4, r, 4096 * 2)) for r in range(4)]
    total = {name: sum(s[name] for s in stats) for name in stats[0]}
    assert total["routes"] == total["messages"] == 224
    assert total["cross_rank_routes"] == 160
    assert total["route_bytes"] == 1.75 * 2**20
    assert total["dedup_bytes"] == 1.25 * 2**20
    assert stats[0] == dict.fromkeys(stats[0], 0)
    load = sum(expert_load(article_ids(r), 8) for r in range(4))
    assert load.tolist() == [111, 1, 0, 0, 0, 0, 1, 111]
    assert rank_load(load, 4).tolist() == [112, 0, 0, 112]


def test_two_experts_of_one_rank_are_two_routes_and_one_message() -> None:
    ids = torch.tensor([[0, 2], [2, 3], [1, -1]])
    stats = as_ints(layout_stats(ids, num_experts=4, num_ranks=2, rank=0, row_bytes=8))
    assert stats == {
        "routes": 5, "cross_rank_routes": 3, "messages": 4, "route_bytes": 40, "dedup_bytes": 16,
    }  # fmt: skip


def test_the_same_expert_twice_is_two_routes_and_one_message() -> None:
    stats = as_ints(layout_stats(torch.tensor([[3, 3]]), 4, 2, 0, 1))
    assert (stats["routes"], stats["cross_rank_routes"], stats["messages"], stats["dedup_bytes"]) == (2, 2, 1, 1)


def test_one_rank_sends_nothing_over_links() -> None:
    stats = as_ints(layout_stats(torch.tensor([[0, 1], [2, -1]]), 4, 1, 0, 4))
    assert stats == {"routes": 3, "cross_rank_routes": 0, "messages": 2, "route_bytes": 12, "dedup_bytes": 0}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_layout_stats_equal_a_walk_over_the_routes(data: st.DataObject) -> None:
    ranks, per_rank = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    experts, top_k = ranks * per_rank, data.draw(st.integers(1, 5))
    rank = data.draw(st.integers(0, ranks - 1))
    row = st.lists(st.integers(-1, experts - 1), min_size=top_k, max_size=top_k)
    rows = data.draw(st.lists(row, max_size=6))
    routes = [(t, e // per_rank) for t, row_ids in enumerate(rows) for e in row_ids if e >= 0]
    ids = torch.tensor(rows, dtype=torch.int64).view(len(rows), top_k)
    assert as_ints(layout_stats(ids, experts, ranks, rank, 10)) == {
        "routes": len(routes),
        "cross_rank_routes": sum(r != rank for _, r in routes),
        "messages": len(set(routes)),
        "route_bytes": 10 * len(routes),
        "dedup_bytes": 10 * sum(r != rank for _, r in set(routes)),
    }


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_both_integer_widths_count_alike(dtype: torch.dtype) -> None:
    """alibaba/rtp-llm#1325, vllm-project/vllm#40862: ids are int64 here and int32 there."""
    ids = torch.tensor([[299, 0], [299, -1]], dtype=dtype)
    assert expert_load(ids, 300).nonzero().flatten().tolist() == [0, 299]
    assert expert_load(ids, 300)[299] == 2
    assert as_ints(layout_stats(ids, 300, 3, 2, 1))["cross_rank_routes"] == 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int16])
def test_ids_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    """alibaba/rtp-llm#1325: a blanket cast to a narrow type would wrap ids."""
    ids = torch.zeros(2, 2, dtype=dtype)
    with pytest.raises(InputError, match=f"must be int64 or int32, got {dtype}"):
        expert_load(ids, 4)
    with pytest.raises(InputError, match=f"must be int64 or int32, got {dtype}"):
        layout_stats(ids, 4, 2, 0, 1)


def test_bad_sizes_are_refused_with_their_values() -> None:
    ids = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(InputError, match=r"num_ranks = 3 must divide num_experts = 8"):
        layout_stats(ids, 8, 3, 0, 1)
    with pytest.raises(InputError, match=r"num_ranks = 3 must divide num_experts = 8"):
        rank_load(torch.zeros(8), 3)
    with pytest.raises(InputError, match=r"rank must lie in \[0, 2\), got 2"):
        layout_stats(ids, 8, 2, 2, 1)
    with pytest.raises(InputError, match=r"must be \[T, K\], got \(2,\)"):
        layout_stats(ids[0], 8, 2, 0, 1)


def test_imbalance_at_expert_and_at_rank_grain() -> None:
    load = torch.tensor([6, 0, 2, 0])
    assert imbalance(load).item() == 3
    assert imbalance(rank_load(load, 2)).item() == 1.5
    assert imbalance(torch.tensor([5, 5, 5])).item() == 1
    assert imbalance(torch.zeros(4, dtype=torch.int64)).item() == 1


def test_opposite_imbalances_of_two_layers_do_not_cancel() -> None:
    """huggingface/transformers#28255: statistics of concatenated layers hide that each layer is imbalanced."""
    loads = torch.tensor([[8, 0], [0, 8]])
    assert imbalance(loads).mean().item() == 2
    assert imbalance(loads.sum(0)).item() == 1
    assert imbalance(torch.tensor([[8, 0], [4, 4]])).mean().item() == 1.5


def test_counts_beyond_float32_are_exact() -> None:
    load = torch.tensor([2**25 + 1, 2**25 - 1])
    assert imbalance(load).item() == (2**25 + 1) / 2**25

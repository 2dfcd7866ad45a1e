"""Two small layouts worked out by hand, on the real dispatchers.

The first has 4 ranks, 8 experts, top-2 and T = 0, 16, 32, 64. Every token goes to experts 0 and 7, but token 5 of
rank 2 goes to experts 1 and 6 with weights 1/4 and 3/4. Rank 0 owns experts 0 and 1, rank 3 owns 6 and 7. By hand:
112 tokens make 224 routes; experts 0 and 7 get 111 each, 1 and 6 one each. Ranks 0 and 3 receive 112 rows each.
Rank 3's 64 tokens have one local route each, so 224 - 64 = 160 routes cross. No token has two experts on one rank, so
there are as many messages as routes. A row of H = 4096 in bfloat16 is 8 KiB: 224 rows are 1.75 MiB, 160 are 1.25 MiB.

The second is the case that the first lacks: tokens with two experts on one rank, so that there are fewer messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import build_dispatcher, close_dispatchers
from moe_ep.routing import Routing
from moe_ep.testing.ranks import RankPool

MIB = 2**20
TOKENS = (0, 16, 32, 64)
DISPATCHERS = ("all2all", "agrs")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=60) as ranks:
        yield ranks


def one_layer(
    group: dist.ProcessGroup,
    rank: int,
    name: str,
    sizes: tuple[int, str],
    everyones_ids: Sequence[Any],
    everyones_weights: Sequence[Any],
    outputs: Sequence[float] | None = None,
) -> dict[str, Any]:
    """x is rank + 1 everywhere; experts are y = (id + 1) x, or put out a fixed number each.

    Returns:
        the numbers of LayoutStats, rows of each local expert by source rank, and y's first column.
    """
    hidden, dtype = sizes
    config = DispatchConfig(name=name, num_experts=8, top_k=2, hidden_size=hidden, dtype=dtype, max_tokens=64)
    dispatcher = build_dispatcher(config, group)
    ids = torch.tensor(everyones_ids[rank], dtype=torch.int64).reshape(-1, 2)
    weights = torch.tensor(everyones_weights[rank]).reshape(-1, 2)
    x = torch.full((ids.shape[0], hidden), rank + 1.0, dtype=getattr(torch, dtype))
    ticket = dispatcher.dispatch_preprocess(x, Routing(expert_ids=ids, weights=weights, num_experts=8))
    stats = ticket.layout_stats()
    numbers = {field: int(getattr(stats, field)) for field in stats.__slots__}
    dispatcher.dispatch(ticket)
    inp = dispatcher.dispatch_postprocess(ticket)
    low, middle, high = inp.offsets.tolist()
    rows = inp.rows()
    by_source = [count_sources(rows[low:middle]), count_sources(rows[middle:high])]
    expert = 2 * rank + (torch.arange(inp.capacity) >= middle).long()
    y = rows * (expert + 1)[:, None] if outputs is None else torch.tensor(outputs)[expert, None].expand(rows.shape)
    dispatcher.combine_preprocess(ticket, (inp.row_weights[:, None] * y).to(rows.dtype))
    dispatcher.combine(ticket)
    y_T = dispatcher.combine_postprocess(ticket)
    assert bool((y_T == y_T[:, :1]).all())
    close_dispatchers(group)
    return {"stats": numbers, "by_source": by_source, "y": y_T[:, 0].tolist()}


def count_sources(rows: Tensor) -> list[int]:
    return [int((rows[:, 0] == source + 1).sum()) for source in range(4)]


def the_layout(special: tuple[int, int] = (1, 6)) -> tuple[list[Any], list[Any]]:
    ids = [[[0, 7] for _ in range(tokens)] for tokens in TOKENS]
    weights = [[[0.5, 0.5] for _ in range(tokens)] for tokens in TOKENS]
    ids[2][5], weights[2][5] = list(special), [0.25, 0.75]
    return ids, weights


@pytest.mark.parametrize("name", DISPATCHERS)
def test_counts_routes_and_bytes(pool: RankPool, name: str) -> None:
    ranks = pool.run(one_layer, name, (4096, "bfloat16"), *the_layout())
    assert [sum(expert) for rank in ranks for expert in rank["by_source"]] == [111, 1, 0, 0, 0, 0, 1, 111]
    assert ranks[0]["by_source"] == [[0, 16, 31, 64], [0, 0, 1, 0]]
    assert ranks[3]["by_source"] == [[0, 0, 1, 0], [0, 16, 31, 64]]
    total = {key: sum(rank["stats"][key] for rank in ranks) for key in ranks[0]["stats"]}
    assert total == {
        "routes": 224,
        "cross_rank_routes": 160,
        "messages": 224,
        "route_bytes": int(1.75 * MIB),
        "dedup_bytes": int(1.25 * MIB),
    }
    assert [rank["stats"]["routes"] for rank in ranks] == [0, 32, 64, 128]
    assert [rank["stats"]["cross_rank_routes"] for rank in ranks] == [0, 32, 64, 64]


@pytest.mark.parametrize("name", DISPATCHERS)
def test_constant_experts_in_closed_form(pool: RankPool, name: str) -> None:
    ranks = pool.run(one_layer, name, (8, "bfloat16"), *the_layout())
    # (1 + 8) / 2 = 4.5 times x everywhere, (2 / 4 + 7 * 3 / 4) = 5.75 times x for the special token
    want = [[4.5 * (rank + 1)] * tokens for rank, tokens in enumerate(TOKENS)]
    want[2][5] = 5.75 * 3
    assert [rank["y"] for rank in ranks] == want


@pytest.mark.parametrize("name", DISPATCHERS)
def test_the_special_token_combines_four_and_twelve_to_ten(pool: RankPool, name: str) -> None:
    ranks = pool.run(one_layer, name, (8, "float32"), *the_layout(), [2.0, 4.0, 0.0, 0.0, 0.0, 0.0, 12.0, 6.0])
    assert ranks[2]["y"][5] == 0.25 * 4 + 0.75 * 12 == 10
    assert ranks[2]["y"][:5] + ranks[2]["y"][6:] == [4.0] * 31


@pytest.mark.parametrize("name", DISPATCHERS)
def test_a_rerouted_token_moves_two_counts(pool: RankPool, name: str) -> None:
    ranks = pool.run(one_layer, name, (8, "float32"), *the_layout((0, 7)))
    assert [sum(expert) for rank in ranks for expert in rank["by_source"]] == [112, 0, 0, 0, 0, 0, 0, 112]
    assert ranks[2]["y"][5] == (0.25 * 1 + 0.75 * 8) * 3


@pytest.mark.parametrize("name", DISPATCHERS)
def test_two_experts_of_one_rank_are_two_routes_and_one_message(pool: RankPool, name: str) -> None:
    """By hand, ranks owning experts 01 | 23 | 45 | 67, x = rank + 1, rows of 4 float32 = 16 bytes.

    rank 0: token 0 -> 2, 3 (both on rank 1: 2 routes, 1 message, crossing), token 1 -> 0, 1 (2 routes, 1 message, own)
    rank 1: token 0 -> 7, 6 (both on rank 3: 2 routes, 1 message, crossing)
    rank 2: no tokens
    rank 3: token 0 -> 4, 5 (2 routes, 1 message), token 1 -> 7, 0 (2 and 2, half of them cross),
            token 2 -> 3 and none (1 route, 1 message)
    """
    ids = [[[2, 3], [0, 1]], [[7, 6]], [], [[4, 5], [7, 0], [3, -1]]]
    weights = [[[0.25, 0.75], [1.0, 0.5]], [[0.5, 0.5]], [], [[1.0, 1.0], [0.5, 0.25], [0.125, 9.0]]]
    ranks = pool.run(one_layer, name, (4, "float32"), ids, weights)
    fields = ("routes", "cross_rank_routes", "messages", "route_bytes", "dedup_bytes")
    assert [[rank["stats"][field] for field in fields] for rank in ranks] == [
        [4, 2, 2, 64, 16],
        [2, 2, 1, 32, 16],
        [0, 0, 0, 0, 0],
        [5, 4, 4, 80, 48],
    ]
    assert [expert for rank in ranks for expert in rank["by_source"]] == [
        [1, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 1],
        [0, 0, 0, 1], [0, 0, 0, 1], [0, 1, 0, 0], [0, 1, 0, 1],
    ]  # fmt: skip
    # .25*3 + .75*4, 1*1 + .5*2; (.5*8 + .5*7) * 2; (5 + 6) * 4, (.5*8 + .25*1) * 4, .125*4 * 4
    assert [rank["y"] for rank in ranks] == [[3.75, 2.0], [15.0], [], [44.0, 17.0, 2.0]]

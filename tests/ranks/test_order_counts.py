"""MOE_EP_DEBUG: ranks that expect other counts than are sent, or hand wrong ones to the experts, say so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep import (
    DispatchConfig,
    PeerError,
    ProtocolError,
    build_dispatcher,
    moe_layers,
)  # fmt: skip
from moe_ep.dispatch.all2all import All2All
from moe_ep.dispatch.row_transfers import AllToAllRows
from moe_ep.dispatch.transfer import Flight, pack, start
from moe_ep.expert_input import ExpertInput
from moe_ep.testing.ranks import RankPool
from tests.ranks.debug_runs import checking
from tests.ranks.small_stack import small_stack

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=90) as ranks:
        yield ranks


def body_splits(group: dist.ProcessGroup, rank: int) -> str:
    with checking(group):
        dispatcher = build_dispatcher(
            DispatchConfig(name="all2all", num_experts=2, top_k=1, hidden_size=4, max_tokens=4), group
        )
        send = [1, 2] if rank == 0 else [1, 1]
        packed, payload = pack(torch.ones(sum(send), 4))
        transfer = AllToAllRows(group, send, [1, 1], sum(send), 2)
        flight = Flight(transfer, dispatcher.comm(CPU), "dispatch of layer 7", packed)
        with pytest.raises(PeerError) as err:
            start(flight, *payload)
        return str(err.value)


def test_counts_that_differ_between_ranks_are_named(pool: RankPool) -> None:
    for error in pool.run(body_splits):
        assert error.startswith("dispatch of layer 7: rank 0 sends 2 rows to rank 1, which expects 1")


def spoiled(**changes: Any) -> Any:
    """`_dispatch_postprocess`, whose answer is wrong on rank 1."""
    real = All2All._dispatch_postprocess

    def wrong(self: All2All, ticket: Any) -> ExpertInput:
        rows = real(self, ticket)
        return rows if self.rank == 0 else replace(rows, **{name: change(rows) for name, change in changes.items()})

    return wrong


SPOILED = {
    "offsets are": dict(offsets=lambda rows: rows.offsets + 1),
    "the host has counts": dict(host_counts=lambda rows: (0, *rows.host_counts[1:])),
    "row indices lie outside": dict(row_index=lambda rows: rows.row_index + 1),
    "the routings name": dict(
        tokens_per_expert=lambda rows: rows.tokens_per_expert.flip(0),
        offsets=lambda rows: torch.cat([rows.offsets[:1], rows.tokens_per_expert.flip(0).cumsum(0).int()]),
        host_counts=lambda rows: None,
    ),
}


def body_counts(group: dist.ProcessGroup, rank: int, words: str) -> str:
    with checking(group):
        (layer,) = moe_layers(small_stack(group, dense=(False,)))
        flight = layer.launch_dispatch(torch.randn(6, 16, generator=torch.Generator().manual_seed(rank)))
        with (
            mock.patch.object(All2All, "_dispatch_postprocess", spoiled(**SPOILED[words])),
            pytest.raises(ProtocolError) as err,
        ):
            layer.compute(flight)
        return str(err.value)


@pytest.mark.parametrize("words", SPOILED)
def test_wrong_counts_of_a_back_end_are_seen_on_all_ranks(pool: RankPool, words: str) -> None:
    for error in pool.run(body_counts, words):
        assert "layer 0, micro-batch 0: dispatcher 'all2all' hands over wrong counts on rank 1: " in error
        assert words in error

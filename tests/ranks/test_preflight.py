"""Ranks that differ, or that cannot reach each other, hear of it before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ep.dispatch.preflight import Place, own_place, place_problem, preflight
from moe_ep.dispatch.watchdog import group_timeout_s
from moe_ep.errors import MoEError
from moe_ep.testing.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=60) as ranks:
        yield ranks


def go(group: dist.ProcessGroup, rank: int, facts: list[dict[str, Any]], reasons: list[list[str]]) -> str:
    try:
        preflight("dispatcher 'mine'", facts[rank], reasons[rank], group)
    except MoEError as err:
        return f"{type(err).__name__}: {err}"
    return "goes on"


def test_equal_ranks_go_on(pool: RankPool) -> None:
    assert pool.run(go, [{"version": "2.1"}] * 2, [[], []]) == ["goes on"] * 2


def test_versions_that_differ_are_named_on_every_rank(pool: RankPool) -> None:
    said = pool.run(go, [{"version": "2.1"}, {"version": "1.2"}], [[], []])
    assert said[0] == said[1]
    assert "disagree about dispatcher 'mine': version is '2.1' on rank 0, '1.2' on rank 1" in said[0]


def test_a_rank_that_cannot_stops_the_others(pool: RankPool) -> None:
    own, peer = pool.run(go, [{}, {}], [["NCCL 2.28 is too old"], []])
    assert own == "Unavailable: dispatcher 'mine' cannot run here: NCCL 2.28 is too old"
    assert peer.startswith("PeerError: rank 0 cannot go on with dispatcher 'mine'") and "NCCL 2.28" in peer


def ask_timeout(group: dist.ProcessGroup, rank: int) -> float:
    return group_timeout_s(group, torch.device("cpu"))


def test_the_groups_own_timeout_is_found(pool: RankPool) -> None:
    assert pool.run(ask_timeout) == [120.0, 120.0]  # the pool's 60 s and a margin


def both_places(group: dist.ProcessGroup, rank: int) -> list[Place]:
    return preflight("a test", {}, [], group)


def test_ranks_of_one_machine_have_one_host(pool: RankPool) -> None:
    for places in pool.run(both_places):
        assert places == [own_place()] * 2


def test_places_that_do_not_suit() -> None:
    here, there = Place("a", "gpu-0", 0), Place("b", "gpu-1", 1)
    assert "they are on 2" in (place_problem([here, there], 0) or "")
    assert "ranks 0, 1 use the same GPU" in (place_problem([here, here], 0) or "")
    assert place_problem([here, Place("a", "gpu-1", 1)], 0) is None
    assert place_problem([here, here], 0, overlapping=True) is None
    assert "they are on 2" in (place_problem([here, there], 0, overlapping=True) or "")


def test_missing_peer_access_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) != (1, 0))
    places = [Place("a", "gpu-0", 0), Place("a", "gpu-1", 1)]
    assert "GPU 1 has no peer access to GPU 0" in (place_problem(places, 2) or "")

"""What `deepep` refuses at construction, over doubles of the library, and what ranks that differ hear of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from moe_ep.dispatch.deepep_library import limit_reasons
from moe_ep.testing.ranks import RankPool
from tests.ranks import deepep_double
from tests.ranks.small_deepep import config, said_at_construction


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=60) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(options=(("api", "v3"),)), "api must be 'v1' or 'v2', got 'v3'"),
        (dict(options=(("expand", 1),)), "expand must be true or false, got 1"),
        (dict(options=(("api", "v1"), ("expand", True))), "expand = true needs api = 'v2'"),
        (dict(num_sms=7), "num_sms must be even and at least 2 (half of them send, half receive), got 7"),
        (dict(hidden_size=8192), "at most 8176, got 8192; take api = 'v2'"),
        (dict(options=(("api", "v2"),), hidden_size=272), "a multiple of 256, got 272"),
        (dict(options=(("api", "v2"),), num_experts=4096), "at most 2048 experts and 256 per rank, got 4096 and 2048"),
        (dict(top_k=33, num_experts=64), "a top_k of at most 32, got 33"),
    ],
)
def test_what_the_library_cannot_do_is_refused_at_construction(
    pool: RankPool, changes: dict[str, Any], words: str
) -> None:
    for said in pool.run(said_at_construction, [changes] * 2, num_ranks=2):
        assert said.startswith("Unavailable: ") and words in said


def test_hidden_sizes_at_the_librarys_limits_are_built(pool: RankPool) -> None:
    for changes in (dict(hidden_size=272), dict(hidden_size=8176), dict(options=(("api", "v2"),), hidden_size=8192)):
        assert pool.run(said_at_construction, [changes] * 2, num_ranks=2) == ["built"] * 2, changes


def test_ranks_with_another_form_hear_of_it(pool: RankPool) -> None:
    first, second = pool.run(
        said_at_construction, [dict(options=(("api", "v1"),)), dict(options=(("api", "v2"),))], num_ranks=2
    )
    assert first == second
    assert first.startswith("PeerError: the ranks disagree about the dispatcher: options is")


@pytest.mark.parametrize(
    ("key", "value"), [("max_tokens", 7), ("top_k", 4), ("hidden_size", 512), ("num_experts", 16), ("num_sms", 8)]
)
def test_every_rank_names_a_size_that_differs_on_one(pool: RankPool, key: str, value: int) -> None:
    first, second = pool.run(said_at_construction, [{}, {key: value}], num_ranks=2)
    assert first == second
    assert f"{key} is {getattr(config(), key)!r} on rank 0, {value} on rank 1" in first


def test_a_dtype_that_one_rank_alone_cannot_have_is_told_to_the_other(pool: RankPool) -> None:
    for said in pool.run(said_at_construction, [{}, {"dtype": "float32"}], num_ranks=2):
        assert "dtype is 'bfloat16' on rank 0, 'float32' on rank 1" in said


def other_release(group: dist.ProcessGroup, rank: int) -> str:
    releases = ["tokenspeed-deepep 1.2.1", "a-fork 9.8"]
    with mock.patch("moe_ep.dispatch.deepep_library.distribution", lambda: releases[rank]):
        return said_at_construction(group, rank, [{}, {}])


def test_ranks_with_other_releases_hear_of_it_before_anything_is_allocated(pool: RankPool) -> None:
    first, second = pool.run(other_release, num_ranks=2)
    assert first == second
    assert "deep_ep is 'tokenspeed-deepep 1.2.1' on rank 0, 'a-fork 9.8' on rank 1" in first


def without_the_fix(group: dist.ProcessGroup, rank: int) -> str:
    """A release whose constructor lacks the argument that came shortly after the fix of other hidden sizes."""

    class Old(deepep_double.Buffer):
        def __init__(self, group: Any, num_nvl_bytes: int = 0, *, explicitly_destroy: bool = False) -> None: ...

    library = type("deep_ep", (), {"Buffer": Old})
    return "; ".join(limit_reasons(library, "v1", config(hidden_size=272), 2))


def test_an_older_release_serves_fewer_hidden_sizes(pool: RankPool) -> None:
    assert "a multiple of 256, got 272" in pool.run(without_the_fix, num_ranks=2)[0]

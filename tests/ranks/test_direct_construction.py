"""What `direct` refuses when it is built, on ranks that only seem to have GPUs: nothing is allocated before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from moe_ep.kernels.direct_types import MAX_RANKS

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import build_dispatcher, close_dispatchers
from moe_ep.dispatch.direct import Direct
from moe_ep.dispatch.preflight import Place
from moe_ep.errors import MoEError
from moe_ep.testing.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=60) as ranks:
        yield ranks


def config(**changes: Any) -> DispatchConfig:
    sizes = dict(name="direct", num_experts=8, top_k=2, hidden_size=64, dtype="bfloat16", max_tokens=8)
    return DispatchConfig(**(sizes | changes))  # type: ignore[arg-type]


@contextlib.contextmanager
def seeming_gpu(rank: int, place: Place | None = None, missing: str | None = None) -> Iterator[None]:
    """A rank with a GPU as far as anybody asks; memory that would be taken on it is an error."""
    with contextlib.ExitStack() as stack:
        gpu = mock.Mock(multi_processor_count=132)
        said = {"is_available": True, "current_device": rank, "device_count": 2, "get_device_properties": gpu}
        for name, value in said.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=value))
        reach = mock.patch.object(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != (1, 0))
        stack.enter_context(reach)
        if place is not None:
            stack.enter_context(mock.patch("moe_ep.dispatch.preflight.own_place", return_value=place))
        for user in ("moe_ep.dispatch.direct", "moe_ep.kernels.library"):
            stack.enter_context(mock.patch(f"{user}.missing", return_value=missing))
        stack.enter_context(mock.patch("moe_ep.dispatch.direct.PeerMemory", side_effect=AssertionError("allocated")))
        yield


def said(group: dist.ProcessGroup, rank: int, places: list[Place], changes: dict[str, Any]) -> str:
    try:
        with seeming_gpu(rank, places[rank]):
            build_dispatcher(config(**changes), group)
    except MoEError as err:
        return f"{type(err).__name__}: {err}"
    finally:
        close_dispatchers(group)
    return "built"


HERE = [Place("a", "gpu-0", 0), Place("a", "gpu-1", 1)]


@pytest.mark.parametrize(
    ("places", "changes", "words"),
    [
        ([HERE[0], Place("b", "gpu-1", 1)], {}, "its ranks must share one host, and they are on 2; take ep_size ="),
        ([HERE[0], HERE[0]], {}, "ranks 0, 1 use the same GPU; give each rank its own"),
        (HERE, {}, "GPU 1 has no peer access to GPU 0; take GPUs joined by NVLink or another dispatcher"),
        (HERE, {"hidden_size": 20}, "a hidden_size that is a multiple of 8, got 20; pad the model's hidden size or"),
        (HERE, {"max_tokens": None}, "max_tokens, which is not set"),
        (HERE, {"max_tokens": 1 << 24}, "max_tokens = 16777216 is not below 2^24; send smaller micro-batches"),
        (HERE, {"options": (("expand", 1),)}, "expand = 1 must be true or false"),
    ],
)
def test_what_cannot_run_is_refused_on_every_rank_before_memory_is_taken(
    pool: RankPool, places: list[Place], changes: dict[str, Any], words: str
) -> None:
    for text in pool.run(said, places, changes):
        assert text.startswith("Unavailable: dispatcher 'direct' cannot run here: ") and words in text, text


def test_ranks_beyond_its_kernels_and_missing_kernels_are_refused() -> None:
    many = mock.Mock(size=lambda: MAX_RANKS + 8)
    with seeming_gpu(0, missing="nvcc is not there"):
        kernels, ranks = Direct.unavailable_reasons(config(num_experts=8 * MAX_RANKS + 64), many)
    assert kernels == "its kernels are not to be had: nvcc is not there"
    assert ranks == f"it serves at most {MAX_RANKS} ranks, the group has {MAX_RANKS + 8}; take 'all2all'"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_names_another() -> None:
    assert Direct.unavailable_reasons(config(), None) == [
        "it moves rows between GPUs, and torch sees none; take 'all2all'"
    ]

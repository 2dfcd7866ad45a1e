"""What the libraries' buffers take is printed once, in MiB, before they are made."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import build_dispatcher, close_dispatchers
from moe_ep.testing.ranks import RankPool
from tests.ranks import deepep_double, nccl_ep_double, nccl_ep_variants, small_deepep

MADE = "buffers were made"
assert small_deepep.DoubledDeepEP and nccl_ep_variants.OnDouble, "registered by their import"
LIBRARIES: dict[str, tuple[str, dict[str, Any], type, str]] = {
    "deepep v1": ("deepep_double", {}, deepep_double.Buffer, r"allocates for deepep.*, (\d+) MiB on each GPU"),
    "deepep v2": (
        "deepep_double",
        {"options": (("api", "v2"),)},
        deepep_double.ElasticBuffer,
        r"allocates for deepep.*, (\d+) MiB on each GPU",
    ),
    "nccl_ep": ("double", {}, nccl_ep_double.Group, r"nccl_ep takes ([\d.]+) MiB on each GPU for its group, and"),
    "nccl_ep, low latency": (
        "double-low-latency",
        {},
        nccl_ep_double.Group,
        r"nccl_ep takes ([\d.]+) MiB on each GPU for its group, [\d.]+ MiB for the low-latency one, and [\d.]+ MiB for",
    ),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=60) as ranks:
        yield ranks


def telling(init: Callable[..., None]) -> Callable[..., None]:
    def tell(*args: Any, **keywords: Any) -> None:
        print(MADE, file=sys.stderr)
        init(*args, **keywords)

    return tell


def printed(group: dist.ProcessGroup, rank: int, library: str) -> str:
    name, changes, buffer, _ = LIBRARIES[library]
    sizes = dict(name=name, num_experts=8, top_k=2, hidden_size=256, dtype="bfloat16", max_tokens=64)
    text = io.StringIO()
    with contextlib.redirect_stderr(text), mock.patch.object(buffer, "__init__", telling(buffer.__init__)):  # type: ignore[misc]
        build_dispatcher(DispatchConfig(**(sizes | changes)), group)
    close_dispatchers(group)
    return text.getvalue()


@pytest.mark.parametrize("library", LIBRARIES)
def test_memory_is_printed_before_it_is_taken_by_one_rank(pool: RankPool, library: str) -> None:
    first, second = pool.run(printed, library)
    said = re.search(LIBRARIES[library][3], first)
    assert said is not None and float(said[1]) > 0, first
    assert said.end() < first.index(MADE), first
    assert MADE in second and "MiB" not in second

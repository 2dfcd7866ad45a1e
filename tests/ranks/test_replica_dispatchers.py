"""Copies of hot experts behind every back end that runs on CPU ranks: libraries over their doubles, others' packages.

Whole layers, forward and backward, with slots and without: the same numbers, and fuller ranks are relieved.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moe_ep.dispatch import Dispatcher, find_dispatcher, known_dispatchers
from moe_ep.testing.ranks import RankPool
from moe_ep.testing.table_deepep import FORMS
from tests.ranks import nccl_ep_variants, small_copies, small_deepep
from tests.ranks.small_copies import Done, check_equal

assert nccl_ep_variants  # imported for its names of the double

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "example_dispatcher"
FLOAT32 = ("all2all", "agrs", "equal_blocks", "double", "double-flat")
CASES: dict[str, dict[str, Any]] = {
    **{name: dict(dispatcher=name) for name in FLOAT32},
    "double-budget": dict(dispatcher="double-budget", experts="loop"),  # torch's experts want counts on the host
    **{
        f"deepep {form}": dict(dispatcher=small_deepep.DoubledDeepEP.name, dtype="bfloat16", options=options)
        for form, options in FORMS.items()
    },
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=90) as ranks:
        yield ranks


def known(name: str) -> None:
    """Makes a back end known that no installed package names here."""
    if name == "equal_blocks" and name not in known_dispatchers():
        sys.path.append(str(EXAMPLE))
        sys.modules.pop(name, None)  # imported in a process that has since forgotten its name
        importlib.import_module(name)
    assert issubclass(find_dispatcher(name), Dispatcher)


def train(group: dist.ProcessGroup, rank: int, changes: dict[str, Any], slots: int) -> Done:
    """See small_copies."""
    known(changes["dispatcher"])
    return small_copies.train(group, rank, changes, slots)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_layer_equals_itself_without_copies(pool: RankPool, name: str, num_ranks: int) -> None:
    ours, theirs = (pool.run(train, CASES[name], slots, num_ranks=num_ranks) for slots in (2, 0))
    check_equal(ours, theirs, CASES[name].get("dtype", "float32"))

"""Replicas on two GPUs over NCCL: messages bit for bit, and training with them beside training without."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

import pytest
import torch

from moe_ep.testing.ranks import RankPool
from tests.ranks.small_replicas import S, largest_difference, messages, train

pytestmark = pytest.mark.gpu(2)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=120) as ranks:
        yield ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_messages_over_nccl(pool: RankPool, dtype: torch.dtype) -> None:
    pool.run(messages, dtype, "cuda")


@pytest.mark.parametrize("name", ["all2all", "agrs"])
def test_training_with_replicas_equals_training_without(pool: RankPool, name: str) -> None:
    ours = pool.run(train, name, S, 20, "", "cuda")
    theirs = pool.run(train, name, 0, 20, "", "cuda")
    assert largest_difference(ours, theirs) < 1e-5
    assert sum(min(step.replicas) > 0 for step in ours[0]) >= 0.9 * 20
    assert fmean(value for step in ours[0] for value in step.after) < 1.1


@pytest.mark.parametrize("mutant", ["not reduced", "reduced twice", "not brought again"])
def test_what_is_left_out_shows(pool: RankPool, mutant: str) -> None:
    theirs = pool.run(train, "all2all", 0, 4, "", "cuda")
    assert largest_difference(pool.run(train, "all2all", S, 4, mutant, "cuda"), theirs) > 1e-3

"""Megatron-Core on one GPU: the layer on a dispatcher of one rank, grouped and latent experts, fp8, interleaving."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from moe_ep.testing.ranks import RankPool
from tests.gpu import megatron_runs as runs

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (moe-ep[megatron])")

pytestmark = pytest.mark.gpu(1)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before the rank's first GEMM, for deterministic ones
    with RankPool(1, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=300.0) as ranks:
        yield ranks


@pytest.mark.parametrize("changes", [{}, {"moe_latent_size": 128}], ids=["plain", "latent"])
def test_grouped_experts(pool: RankPool, changes: dict[str, int]) -> None:
    """bfloat16: K = 4 rows are added up in another order or precision, each addition rounds by 2^-9 of the largest."""
    runs.engine()
    native, ours = pool.run(runs.one_layer, None, changes), pool.run(runs.one_layer, "all2all", changes)
    for a, b in zip(native[0], ours[0], strict=True):
        assert a.abs().max() > 0 and (a - b).abs().max() <= runs.TOP_K * 2**-8 * a.abs().max()


def test_fp8_experts(pool: RankPool) -> None:
    runs.engine()
    runs.check_fp8(pool)


def test_interleaved_pieces_are_the_serial_ones(pool: RankPool) -> None:
    runs.engine()
    ((want, got, grads, got_grads),) = pool.run(runs.interleaved, "all2all")
    assert torch.equal(got, want)
    for a, b in zip(grads, got_grads, strict=True):  # two addends in bfloat16, in another order
        assert (a - b).norm() <= 2**-7 * a.norm()


def test_a_second_pass_drops_and_routes_as_the_first(pool: RankPool) -> None:
    ((plain, kept, again),) = pool.run(runs.recomputed)
    assert not all(map(torch.equal, plain, kept))
    for a, b in zip(kept, again, strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()

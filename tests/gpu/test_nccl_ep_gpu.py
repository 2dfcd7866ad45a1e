"""`nccl_ep` against the library itself: the contract suite on 2 GPUs, both layouts.

Kernels are compiled for each pair (E, K), hidden size, dtype and layout; cases that need one set of them come first
(`core_cases`).

    -k core             57 cases; one set of kernels a layout, a fixed budget and low latency; not timed alone
    -k "core or kinds"  82 cases, the short half; 31 of them with some 16 sets took 90 s on 2 H200 beside another job
    (all)               not timed
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from moe_ep.dispatch.nccl_ep_library import library_reasons
from moe_ep.testing import contract
from moe_ep.testing.ranks import RankPool
from moe_ep.testing.table_nccl_ep import LAYOUTS, NCCL_EP
from tests.gpu.core_cases import TIERS, case_named, tier_of
from tests.gpu.test_host_syncs_gpu import body_layer
from tests.ranks.small_copies import check_equal, train

UNIFORM = case_named("uniform/R2")
NAMES = dict(zip(LAYOUTS, ("nccl_ep", "nccl_ep-flat"), strict=True))
CELLS = [
    pytest.param(
        NAMES[layout],
        case,
        NCCL_EP[case.name][column],
        id=f"{tier}-{layout}-{case.name}",
        marks=pytest.mark.gpu(2),
    )
    for tier in TIERS
    for case in contract.CASES
    for column, layout in enumerate(LAYOUTS)
    if case.num_ranks == 2 and tier == tier_of(case, UNIFORM)
]
BUDGET = "uniform", "zero-tokens-on-some-ranks", "four-tickets", "recompute", "poisoned-memory-3-steps"


def missing(group: dist.ProcessGroup, rank: int) -> list[str]:
    """On a rank, so that the parent holds neither the library nor a CUDA context."""
    return library_reasons()


LOW_LATENCY = {
    *("uniform", "skewed", "zero-tokens-on-some-ranks", "no-route-slots", "17-experts-per-rank", "bfloat16", "float16"),
    *("changing-tokens-20-steps", "fault-bad-id"),
    *(case.name.split("/")[0] for case in contract.CASES if case.grads == "none"),
}


def cells(short: Collection[str]) -> list[Any]:
    """The cases of these names, those that need the same kernels first."""
    there = [case for case in contract.CASES if case.num_ranks == 2]
    tiers = {tier: [case for case in there if tier_of(case, UNIFORM, short) == tier] for tier in TIERS[:2]}
    return [pytest.param(case, id=f"{tier}-{case.name}") for tier, cases in tiers.items() for case in cases]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=120.0) as ranks:
        reasons = ranks.run(missing)[0]
        if reasons:
            pytest.skip("; ".join(reasons))
        yield ranks


def check(pool: RankPool, name: str, case: contract.Case, refusal: str = "") -> None:
    modules = ("tests.ranks.nccl_ep_variants",)
    contract.check(pool, name, case, refusal=refusal, modules=modules, timeout_s=90)


@pytest.mark.parametrize(("name", "case", "refusal"), CELLS)
def test_contract(pool: RankPool, name: str, case: contract.Case, refusal: str) -> None:
    check(pool, name, case, refusal)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", NAMES.values())
def test_fifty_steps_of_changing_lengths(pool: RankPool, name: str) -> None:
    check(pool, name, replace(case_named("changing-tokens-20-steps/R2"), argument="50"))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("case", cells(BUDGET))
def test_a_fixed_budget_keeps_the_contract(pool: RankPool, case: contract.Case) -> None:
    check(pool, "nccl_ep-budget", case)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("case", cells(LOW_LATENCY))
def test_low_latency_keeps_the_contract_under_no_grad(pool: RankPool, case: contract.Case) -> None:
    check(pool, "nccl_ep-low-latency", replace(case, grads="none"))


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("name", "syncs"), [("nccl_ep", 3), ("nccl_ep, capacity", 0)])
def test_core_host_syncs_of_a_layer(pool: RankPool, name: str, syncs: int) -> None:
    for count, text, declared in pool.run(body_layer, name, False):
        assert declared == syncs
        assert count == declared, f"{declared} declared, {count} counted\n{text}"


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_of_hot_experts(pool: RankPool, dtype: str) -> None:
    """A layer of 12 physical experts, for which kernels are compiled, against itself without copies."""
    changes = dict(dispatcher="nccl_ep", dtype=dtype)
    ours, theirs = (pool.run(train, changes, slots, "cuda", timeout_s=120) for slots in (2, 0))
    check_equal(ours, theirs, dtype)

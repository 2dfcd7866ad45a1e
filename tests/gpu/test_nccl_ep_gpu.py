"""`nccl_ep` against the library itself: the contract suite on 2 GPUs, both layouts. `-k core` takes the short half."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from moe_ep.dispatch.nccl_ep_library import library_reasons
from moe_ep.testing import contract
from moe_ep.testing.ranks import RankPool
from moe_ep.testing.table_nccl_ep import LAYOUTS, NCCL_EP
from tests.gpu.test_host_syncs_gpu import body_layer

CORE = {
    *("uniform", "skewed", "all-to-one-rank", "zero-tokens-on-some-ranks", "zero-tokens-everywhere", "no-route-slots"),
    *("no-routes-on-a-rank", "duplicates", "top-1", "17-experts-per-rank", "asymmetric-tokens", "bfloat16", "float16"),
    *("tiny-weights-bfloat16", "odd-hidden", "sliced-x", "expanded-gradient", "no-grad", "grad-on-one-rank-only"),
    *("two-tickets-crossed", "four-tickets-backward-2-0-3-1", "abandoned-tickets", "backward-twice", "recompute"),
    *("changing-tokens-20-steps", "poisoned-memory-3-steps", "fault-bad-id", "fault-wrong-hidden", "num-sms"),
    *("capacity-factor", "all-to-one-expert"),
}
NAMES = dict(zip(LAYOUTS, ("nccl_ep", "nccl_ep-flat"), strict=True))
CELLS = [
    pytest.param(
        NAMES[layout],
        case,
        NCCL_EP[case.name][column],
        id=f"{'core' if case.name.split('/')[0] in CORE else 'more'}-{layout}-{case.name}",
        marks=pytest.mark.gpu(2),
    )
    for case in contract.CASES
    for column, layout in enumerate(LAYOUTS)
    if case.num_ranks == 2
]
BUDGET = ("uniform/R2", "zero-tokens-on-some-ranks/R2", "four-tickets/R2", "poisoned-memory-3-steps/R2", "recompute/R2")


def missing(group: dist.ProcessGroup, rank: int) -> list[str]:
    """On a rank, so that the parent holds neither the library nor a CUDA context."""
    return library_reasons()


LOW_LATENCY = (
    *("uniform/R2", "skewed/R2", "zero-tokens-on-some-ranks/R2", "no-route-slots/R2", "17-experts-per-rank/R2"),
    *("bfloat16/R2", "float16/R2", "changing-tokens-20-steps/R2", "fault-bad-id/R2"),
)


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
    (case,) = [case for case in contract.CASES if case.name == "changing-tokens-20-steps/R2"]
    check(pool, name, replace(case, argument="50"))


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=f"core-{case.name}") for case in contract.CASES if case.name in BUDGET]
)
def test_a_fixed_budget_keeps_the_contract(pool: RankPool, case: contract.Case) -> None:
    check(pool, "nccl_ep-budget", case)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(replace(case, grads="none"), id=f"core-{case.name}")
        for case in contract.CASES
        if case.num_ranks == 2 and (case.grads == "none" or case.name in LOW_LATENCY)
    ],
)
def test_low_latency_keeps_the_contract_under_no_grad(pool: RankPool, case: contract.Case) -> None:
    check(pool, "nccl_ep-low-latency", case)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("name", "syncs"), [("nccl_ep", 3), ("nccl_ep, capacity", 0)])
def test_core_host_syncs_of_a_layer(pool: RankPool, name: str, syncs: int) -> None:
    for count, text, declared in pool.run(body_layer, name, False):
        assert declared == syncs
        assert count == declared, f"{declared} declared, {count} counted\n{text}"

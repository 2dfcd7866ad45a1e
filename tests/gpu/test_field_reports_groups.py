"""Field reports of two GPUs' communicators and of torch's allocator beside them. See docs/field_reports.md."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from moe_ep.order import order_of
from moe_ep.testing import contract
from moe_ep.testing.ranks import RankPool
from moe_ep.testing.table_deepep import DTYPE, FORMS, HIDDEN
from tests.gpu.core_cases import case_named
from tests.ranks.debug_runs import checking
from tests.ranks.race_runs import run_both_ways
from tests.ranks.small_stack import small_stack

pytestmark = pytest.mark.gpu(2)
NUM = 2  # micro-batches


def body_order(group: dist.ProcessGroup, rank: int, dispatcher: str) -> tuple[list[str], int]:
    """What this rank launched in three steps, of which each rank is late in one, and in how many groups."""
    device = torch.device("cuda", torch.cuda.current_device())
    with checking(group):
        model = small_stack(group, {"dispatcher": dispatcher}, dense=(False,)).to(device)
        launched: list[str] = []
        for step in range(3):
            if step == rank:
                torch.cuda._sleep(200_000_000)  # a tenth of a second that the streams stand still
                time.sleep(0.05)
            run_both_ways(model, rank, NUM, device)
            order = order_of(group)
            assert order is not None
            launched += [f"{record.what} in {record.group}" for record in order.records]
    return launched, len({line.rpartition(" in ")[2] for line in launched})


@pytest.mark.parametrize(("dispatcher", "groups"), [("all2all", 2), ("agrs", 2)])
def test_two_communicators_have_one_order_whoever_is_late(dispatcher: str, groups: int) -> None:
    """deepseek-ai/DeepEP#496, meta-pytorch/torchrec#4149: counts and rows each have an NCCL communicator."""
    with RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=120) as pool:
        (first, num_groups), (second, _) = pool.run(body_order, dispatcher)
    assert first == second and len(first) >= 3 * NUM * 4
    assert num_groups == groups


def settings(group: dist.ProcessGroup, rank: int) -> bool:
    """Whether the allocator's segments can grow, on a rank that has allocated."""
    torch.ones(1, device="cuda")
    return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])


@pytest.fixture(scope="module")
def expandable() -> Iterator[RankPool]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            patch.setenv(name, "expandable_segments:True")
        # spawned: a fork server may have been started before, with another environment
        with RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=120, start_method="spawn") as pool:
            assert pool.run(settings) == [True, True]
            yield pool


@pytest.mark.parametrize("name", ["all2all", "direct"])
@pytest.mark.parametrize("case", ["two-tickets/R2", "changing-tokens-20-steps/R2"])
def test_segments_that_grow(expandable: RankPool, name: str, case: str) -> None:
    """deepseek-ai/DeepEP#510, deepseek-ai/DeepEP#571: memory that other ranks map must not be of such a segment."""
    contract.check(expandable, name, case_named(case), refusal="", timeout_s=120)


def lacking(group: dist.ProcessGroup, rank: int) -> str:
    """Why DeepEP's first interface cannot be had."""
    from moe_ep.dispatch import deepep_library

    library, why = deepep_library.load()
    return "" if library is not None and "v1" in deepep_library.offers(library) else why or "it has no api v1"


def test_segments_that_grow_beside_deepep(expandable: RankPool) -> None:
    if why := expandable.run(lacking)[0]:
        pytest.skip(why)
    case = contract.fitted(case_named("two-tickets/R2"), DTYPE, HIDDEN, FORMS["v1"])
    contract.check(expandable, "deepep", case, refusal="", timeout_s=120)

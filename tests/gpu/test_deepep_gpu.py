"""`deepep` on GPUs over the library itself: the contract suite in each form that the installed one offers.

Each form is measured against its column of the table, with rows that it can move. One process has one `deep_ep`: the
1.x wheels offer api v1, the 2.x wheels both. Kernels of api v2 are compiled for each pair (E, K), separately for
expanded rows, so its fast tier has one pair; cases that need no further one come first (`core_cases`).

    -k "v1"                  94 s for 84 cases on 2 H200 with three other jobs on the machine; nothing is compiled
    -k "core and v2-expand"  one set of kernels and 24 cases; not timed alone yet. `-k "v2 and not expand"` did 71 cases
                             and three sets in 95 s beside one other job, so 150 s are enough for each of these
    -k "core and not expand" the same of compact rows
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from moe_ep.testing import contract
from moe_ep.testing.ranks import RankPool
from moe_ep.testing.table_deepep import DEEPEP, DTYPE, FORMS, HIDDEN
from tests.gpu.core_cases import TIERS, case_named, tier_of
from tests.ranks.small_copies import check_equal, train


def fitted(case: contract.Case, form: str) -> contract.Case:
    return contract.fitted(case, DTYPE, HIDDEN, FORMS[form])


PAIR = case_named("uniform/R2")
CELLS = [
    pytest.param(
        form,
        case,
        DEEPEP[case.name][column],
        id=f"{tier}-{form}-{case.name}",
        marks=[pytest.mark.gpu(case.num_ranks)]
        + ([pytest.mark.slow] if form != "v1" and (case.num_experts, case.top_k) != (8, 2) else []),
    )
    for tier in TIERS
    for column, form in enumerate(FORMS)
    for case in contract.CASES
    if case.num_ranks > 1 and tier == tier_of(fitted(case, form), fitted(PAIR, form))
]


def start(count: int) -> RankPool:
    return RankPool(count, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=120.0)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    """One pool for each number of GPUs; ranks start at the first case that needs them."""
    made = {count: start(count) for count in (2, 4)}
    yield made
    for pool in made.values():
        pool.close()


def offered(group: dist.ProcessGroup, rank: int) -> tuple[list[str], str]:
    """On a rank, so that the parent holds neither the library nor a CUDA context."""
    from moe_ep.dispatch import deepep_library

    library, why = deepep_library.load()
    return ([] if library is None else deepep_library.offers(library)), why


@pytest.fixture(scope="module")
def apis(pools: dict[int, RankPool]) -> tuple[list[str], str]:
    found: tuple[list[str], str] = pools[2].run(offered, timeout_s=120)[0]
    return found


@pytest.mark.parametrize(("form", "case", "refusal"), CELLS)
def test_contract(
    pools: dict[int, RankPool], apis: tuple[list[str], str], form: str, case: contract.Case, refusal: str
) -> None:
    api = dict(FORMS[form])["api"]
    if api not in apis[0]:
        pytest.skip(f"needs DeepEP's api {api}: {apis[1] or f'the installed one offers {apis[0]}'}")
    contract.check(pools[case.num_ranks], "deepep", fitted(case, form), refusal=refusal, timeout_s=120)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("form", FORMS)
def test_fifty_steps_of_changing_lengths(pools: dict[int, RankPool], apis: tuple[list[str], str], form: str) -> None:
    test_contract(pools, apis, form, replace(case_named("changing-tokens-20-steps/R2"), argument="50"), "")


def sms_before_and_after(group: dist.ProcessGroup, rank: int) -> tuple[int, int]:
    """The class's number of SMs belongs to whoever else uses the library in this process."""
    import deep_ep

    from moe_ep.config import DispatchConfig
    from moe_ep.dispatch import build_dispatcher, close_dispatchers

    before = deep_ep.Buffer.num_sms
    config = DispatchConfig(name="deepep", num_experts=8, top_k=2, hidden_size=HIDDEN, dtype=DTYPE, num_sms=8)
    build_dispatcher(config, group)
    close_dispatchers(group)
    return before, deep_ep.Buffer.num_sms


@pytest.mark.gpu(2)
def test_other_users_of_the_library_keep_their_number_of_sms(
    pools: dict[int, RankPool], apis: tuple[list[str], str]
) -> None:
    if "v1" not in apis[0]:
        pytest.skip(f"needs DeepEP's api v1: {apis[1] or 'the installed one does not offer it'}")
    for before, after in pools[2].run(sms_before_and_after, timeout_s=120):
        assert before == after


@pytest.mark.gpu(2)
@pytest.mark.parametrize("form", [pytest.param(f, marks=[] if f == "v1" else [pytest.mark.slow]) for f in FORMS])
def test_copies_of_hot_experts(pools: dict[int, RankPool], apis: tuple[list[str], str], form: str) -> None:
    """A layer of 12 physical experts, for which api v2 compiles kernels, against itself without copies."""
    api = dict(FORMS[form])["api"]
    if api not in apis[0]:
        pytest.skip(f"needs DeepEP's api {api}: {apis[1] or f'the installed one offers {apis[0]}'}")
    changes = dict(dispatcher="deepep", dtype=DTYPE, options=FORMS[form])
    ours, theirs = (pools[2].run(train, changes, slots, "cuda", timeout_s=120) for slots in (2, 0))
    check_equal(ours, theirs, DTYPE)

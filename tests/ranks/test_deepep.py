"""`deepep` over doubles of the library (see deepep_double): the contract suite, and whole layers trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from moe_ep.testing import contract
from moe_ep.testing.ranks import RankPool
from moe_ep.testing.table_deepep import DEEPEP, DTYPE, FORMS, HIDDEN
from tests.gpu.small_training import Setup, interleaved_equals_serial, train
from tests.ranks import small_deepep

# what api v2 does differently; the rest of its cases, and four ranks, are left to the slow tier
OWN_OF_V2 = {
    *("uniform", "bfloat16", "no-route-slots", "duplicates", "zero-tokens-on-some-ranks", "zero-tokens-everywhere"),
    *("top-1", "transposed-x", "expanded-gradient", "no-grad", "two-tickets-crossed", "four-tickets", "recompute"),
    *("recompute-with-an-empty-rank", "tensors-are-freed", "backward-twice", "poisoned-memory-3-steps"),
    *("fault-bad-id", "fault-too-many-tokens", "512-experts", "max-tokens-unset", "abandoned-tickets"),
}


# of these the cases in which no row is counted or moved in another way run expanded alone; the others in both forms
SAME_EXPANDED = {
    *("no-grad", "four-tickets", "recompute-with-an-empty-rank", "backward-twice", "fault-bad-id", "transposed-x"),
    *("fault-too-many-tokens", "max-tokens-unset", "abandoned-tickets"),
}


# of a router that another dispatcher needs: routings like others here
GROUPED = "grouped-static-rows-"
LONG = "one-expert-per-rank-30-steps"


def in_fast_tier(form: str, case: contract.Case) -> bool:
    kind = case.name.split("/")[0]
    if case.num_ranks != 2 or kind.startswith(GROUPED) or kind == LONG:
        return False
    return form == "v1" or (kind in OWN_OF_V2 and not (form == "v2" and kind in SAME_EXPANDED))


CELLS = [
    pytest.param(
        form,
        case,
        DEEPEP[case.name][column],
        id=f"{form}-{case.name}",
        marks=[] if in_fast_tier(form, case) else [pytest.mark.slow],
    )
    for column, form in enumerate(FORMS)
    for case in contract.CASES
    if case.num_ranks == 2 or (form == "v1" and case.num_ranks == 4 and case.driver in ("repeat", "fault"))
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=60) as ranks:
        yield ranks


def fit(case: contract.Case, form: str) -> contract.Case:
    return contract.fitted(case, DTYPE, HIDDEN, FORMS[form])


@pytest.mark.parametrize(("form", "case", "refusal"), CELLS)
def test_contract(pool: RankPool, form: str, case: contract.Case, refusal: str) -> None:
    contract.check(pool, "deepep_double", fit(case, form), refusal=refusal, modules=(small_deepep.__name__,))


def test_the_table_has_a_row_for_every_case_and_no_other() -> None:
    assert list(DEEPEP) == [case.name for case in contract.CASES]
    assert all(len(row) == len(FORMS) for row in DEEPEP.values())


FEW = Setup(dispatcher="agrs", steps=4, tokens=24, device="cpu")


@pytest.fixture(scope="module")
def curve(pool: RankPool) -> list[float]:
    found: list[float] = pool.run(train, FEW, num_ranks=2)[0]
    return found


def trained(group: dist.ProcessGroup, rank: int, setup: Setup) -> tuple[list[float], list[str]]:
    return train(group, rank, setup), interleaved_equals_serial(group, rank, setup)


@pytest.mark.parametrize("form", FORMS)
def test_training_and_interleaving(pool: RankPool, curve: list[float], form: str) -> None:
    """Whole layers, two interleaved micro-batches, some steps: the bits of agrs, which rounds the same partial sums."""
    setup = replace(FEW, dispatcher="deepep_double", options=FORMS[form])
    assert pool.run(trained, setup, num_ranks=2) == [(curve, [])] * 2

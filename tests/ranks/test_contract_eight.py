"""The contract suite on eight gloo ranks: the cases of four ranks, widened (on GPUs: tests/gpu/test_many_gpus.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_ep.testing import contract
from moe_ep.testing.ranks import RankPool
from moe_ep.testing.table import COLUMNS, TABLE

CELLS = [
    pytest.param(name, case, TABLE[case.name.replace("/R8", "/R4")][column], id=f"{name}-{case.name}")
    for column, name in enumerate(COLUMNS)
    for case in contract.EIGHT
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(8, timeout_s=120) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case", "refusal"), CELLS)
def test_contract(pool: RankPool, name: str, case: contract.Case, refusal: str) -> None:
    contract.check(pool, name, case, refusal=refusal, timeout_s=120)


def test_every_case_of_four_ranks_is_there_but_for_what_a_configuration_refuses() -> None:
    four = {case.name for case in contract.CASES if case.num_ranks == 4}
    eight = {case.name.replace("/R8", "/R4") for case in contract.EIGHT}
    assert four - eight == {"experts-not-divisible/R4", "max-tokens-unset/R4"}
    for case in contract.EIGHT:
        assert case.num_experts % 8 == 0 and len(case.tokens) == case.num_ranks == 8 and case.top_k <= case.num_experts
        assert case.routing != "grouped" or case.top_k == 8

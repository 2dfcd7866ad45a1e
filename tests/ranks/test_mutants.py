"""Every known mistake turns the contract suite red, in bounded time, and for the reason that it is one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from moe_ep.testing import contract
from moe_ep.testing.ranks import RankError, RankPool
from tests.ranks.mutants import HANGS, MUTANTS

CASES = {case.name: case for case in contract.CASES}
HANG_TIMEOUT_S = 4.0


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=60) as ranks:
        yield ranks


@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_finds(pool: RankPool, name: str) -> None:
    case, words = MUTANTS[name]
    timeout_s = HANG_TIMEOUT_S if words == HANGS else contract.CASE_TIMEOUT_S
    start = time.monotonic()
    try:
        problems = contract.find_problems(
            pool, name, CASES[case], modules=("tests.ranks.mutants",), timeout_s=timeout_s
        )
        said = "\n".join(problems)
    except RankError as err:
        said = str(err)
    assert said, f"{name} passed {case}"
    assert words in said
    assert time.monotonic() - start < timeout_s + 30


def test_the_mutants_are_the_only_reason(pool: RankPool) -> None:
    """The cases that find the mutants are green for all2all itself."""
    for case in sorted({case for case, _ in MUTANTS.values()}):
        assert contract.find_problems(pool, "all2all", CASES[case]) == []

"""The contract suite on GPUs: the same cases through the same functions, ranks on one GPU each, NCCL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_ep.testing import contract
from moe_ep.testing.ranks import RankPool
from moe_ep.testing.table import COLUMNS, ON_GPUS, TABLE

CELLS = [
    pytest.param(
        name,
        case,
        ON_GPUS.get((name, case.name), TABLE[case.name][column]),
        id=f"{name}-{case.name}",
        marks=pytest.mark.gpu(case.num_ranks),
    )
    for column, name in enumerate(COLUMNS)
    for case in contract.CASES
]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    """One pool for each number of GPUs; ranks start at the first case that needs them."""
    options = {"backend": "cpu:gloo,cuda:nccl", "device": "cuda", "timeout_s": 120.0}
    made = {count: RankPool(count, **options) for count in (1, 2, 4)}  # type: ignore[arg-type]
    yield made
    for pool in made.values():
        pool.close()


@pytest.mark.parametrize(("name", "case", "refusal"), CELLS)
def test_contract(pools: dict[int, RankPool], name: str, case: contract.Case, refusal: str) -> None:
    contract.check(pools[case.num_ranks], name, case, refusal=refusal, timeout_s=120)

"""`deepep` over doubles of the library (see deepep_double): the contract suite, and what it does beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from moe_ep.dispatch import Capabilities, register_dispatcher
from moe_ep.dispatch.deepep import DeepEP
from moe_ep.testing import contract
from moe_ep.testing.ranks import RankPool
from moe_ep.testing.table_deepep import DEEPEP, DTYPE, FORMS, HIDDEN
from tests.ranks import deepep_double


@register_dispatcher("deepep_double")
class DoubledDeepEP(DeepEP):
    """The adapter as it is, over the doubles and on the CPU."""

    name: ClassVar[str] = "deepep_double"
    capabilities: ClassVar[Capabilities] = dataclasses.replace(DeepEP.capabilities, devices=("cpu",))
    library: ClassVar[Any] = None

    @classmethod
    def load_library(cls) -> tuple[Any, str]:
        both = {**vars(deepep_double.V1), **vars(deepep_double.V2)}
        return type("deep_ep", (), both), ""

    @classmethod
    def machine_reasons(cls, api: str, num_sms: int) -> list[str]:
        return []

    @classmethod
    def _own_device(cls) -> torch.device:
        return torch.device("cpu")


CELLS = [
    pytest.param(form, case, DEEPEP[case.name][column], id=f"{form}-{case.name}")
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
    contract.check(pool, "deepep_double", fit(case, form), refusal=refusal, modules=(__name__,))


def test_the_table_has_a_row_for_every_case_and_no_other() -> None:
    assert list(DEEPEP) == [case.name for case in contract.CASES]
    assert all(len(row) == len(FORMS) for row in DEEPEP.values())

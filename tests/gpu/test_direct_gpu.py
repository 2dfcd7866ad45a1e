"""`direct` on the GPUs of one host: the contract suite with counts read by the host, without, and with expert rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moe_ep.testing import contract
from moe_ep.testing.ranks import RankPool

PADS = "it pads to max_tokens, which is not set; set it to the most tokens"
FLOAT64 = "it moves float32, bfloat16, float16, dtype is float64"
NO_OPTION = "knows no option 'no_such_key'; it knows expand"
REFUSED = {
    "max-tokens-unset/R1": PADS,
    "max-tokens-unset/R2": PADS,
    "max-tokens-unset/R4": PADS,
    "float64/R1": FLOAT64,
    "float64/R2": FLOAT64,
    "float64/R4": FLOAT64,
    "odd-hidden/R1": "it needs a hidden_size that is a multiple of 8, got 7",
    "odd-hidden/R2": "it needs a hidden_size that is a multiple of 8, got 7",
    "odd-hidden/R4": "it needs a hidden_size that is a multiple of 8, got 7",
    "odd-hidden-bfloat16/R2": "it needs a hidden_size that is a multiple of 8, got 5",
    "hidden-1/R2": "it needs a hidden_size that is a multiple of 8, got 1",
    "experts-not-divisible/R4": "num_experts = 6 is not divisible by the 4 ranks of the group",
    "top-k-above-experts/R1": "top_k = 3 is larger than num_experts = 2; lower it",
    "top-k-above-experts/R2": "top_k = 3 is larger than num_experts = 2; lower it",
    "unknown-option/R1": NO_OPTION,
    "unknown-option/R2": NO_OPTION,
}
FORMS = {"unique": {}, "expanded": {"options": (("expand", True),)}}


def with_form(case: contract.Case, form: str) -> contract.Case:
    """The case with the form's keys added to its configuration."""
    given = dict(case.config)
    options = (*given.get("options", ()), *FORMS[form].get("options", ()))
    return replace(case, config=tuple({**given, **FORMS[form], "options": tuple(sorted(options))}.items()))


CELLS = [
    pytest.param(form, case, id=f"{form}-{case.name}", marks=pytest.mark.gpu(case.num_ranks))
    for form in FORMS
    for case in contract.CASES
]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    """One pool for each number of GPUs; ranks start at the first case that needs them."""
    made = {n: RankPool(n, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=120.0) for n in (1, 2, 4)}
    yield made
    for pool in made.values():
        pool.close()


@pytest.mark.parametrize(("form", "case"), CELLS)
def test_contract(pools: dict[int, RankPool], form: str, case: contract.Case) -> None:
    pool, refusal = pools[case.num_ranks], REFUSED.get(case.name, "")
    contract.check(pool, "direct", with_form(case, form), refusal=refusal, timeout_s=120)

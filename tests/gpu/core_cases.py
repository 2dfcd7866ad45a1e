"""The short half of the contract, for libraries that compile their kernels at first use, for each (E, K) and dtype.

Cells are named `core`, `kinds` or `more` and run in that order: `core` needs one set of kernels, `kinds` is the rest of
the short half, which needs several, and `more` is what is left.
"""

from __future__ import annotations

from collections.abc import Collection

from moe_ep.testing import contract

SHORT = {
    *("uniform", "skewed", "all-to-one-rank", "zero-tokens-on-some-ranks", "zero-tokens-everywhere", "no-route-slots"),
    *("no-routes-on-a-rank", "duplicates", "top-1", "17-experts-per-rank", "asymmetric-tokens", "bfloat16", "float16"),
    *("tiny-weights-bfloat16", "odd-hidden", "sliced-x", "expanded-gradient", "no-grad", "grad-on-one-rank-only"),
    *("two-tickets-crossed", "four-tickets-backward-2-0-3-1", "abandoned-tickets", "backward-twice", "recompute"),
    *("two-tickets", "four-tickets-woven", "changing-tokens-20-steps", "poisoned-memory-3-steps", "fault-bad-id"),
    *("fault-wrong-hidden", "num-sms", "capacity-factor", "all-to-one-expert"),
}
TIERS = "core", "kinds", "more"


def tier_of(case: contract.Case, likeness: contract.Case, short: Collection[str] = SHORT) -> str:
    """Of a case as it will run; `likeness` is one that the kernels of `core` are compiled for."""
    if case.name.split("/")[0] not in short:
        return "more"
    return "core" if kernels_of(case) == kernels_of(likeness) else "kinds"


def kernels_of(case: contract.Case) -> tuple[object, ...]:
    """What kernels are compiled for, as far as cases differ in it."""
    return case.num_ranks, case.num_experts, case.top_k, case.hidden, case.dtype


def case_named(name: str) -> contract.Case:
    """One case of the contract."""
    (case,) = [case for case in contract.CASES if case.name == name]
    return case

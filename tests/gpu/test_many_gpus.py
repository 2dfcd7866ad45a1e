"""The contract suite on hosts with four and eight GPUs, for every dispatcher that is to be had there.

    -k "R8 and direct"       one dispatcher; kernels of deepep's api v2 and of nccl_ep are compiled for each (E, K)

What runs on two or four ranks elsewhere in this folder is not repeated: here are `nccl_ep` on four, and all on eight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from moe_ep.testing import contract
from moe_ep.testing.ranks import RankPool
from moe_ep.testing.table import COLUMNS, ON_GPUS, TABLE
from moe_ep.testing.table_deepep import DEEPEP, DTYPE, FORMS, HIDDEN
from moe_ep.testing.table_nccl_ep import LAYOUTS, NCCL_EP
from tests.gpu.test_direct_gpu import FORMS as DIRECT_FORMS
from tests.gpu.test_direct_gpu import REFUSED, with_form

FOUR = tuple(case for case in contract.CASES if case.num_ranks == 4)
NCCL_NAMES = dict(zip(LAYOUTS, ("nccl_ep", "nccl_ep-flat"), strict=True))


def on_four(case: contract.Case) -> str:
    """The name under which the tables know it."""
    return case.name.replace("/R8", "/R4")


def cell(name: str, form: str, case: contract.Case, refusal: str) -> Any:
    return pytest.param(
        name, case, refusal, id=f"{name}-{form}-{case.name}", marks=pytest.mark.gpu(case.num_ranks)
    )  # fmt: skip


def cells() -> Iterator[Any]:
    for case in contract.EIGHT:
        known = on_four(case)
        for column, name in enumerate(COLUMNS):
            yield cell(name, "plain", case, ON_GPUS.get((name, known), TABLE[known][column]))
        for form in DIRECT_FORMS:
            yield cell("direct", form, with_form(case, form), REFUSED.get(known, ""))
        for column, form in enumerate(FORMS):
            fitted = contract.fitted(case, DTYPE, HIDDEN, FORMS[form])
            yield cell("deepep", form, fitted, DEEPEP[known][column])
    for case in (*FOUR, *contract.EIGHT):
        for column, layout in enumerate(LAYOUTS):
            yield cell(NCCL_NAMES[layout], layout, case, NCCL_EP[on_four(case)][column])


def missing(group: dist.ProcessGroup, rank: int) -> dict[str, str]:
    """Why a dispatcher cannot be had, asked on a rank: the parent holds neither a library nor a CUDA context."""
    from moe_ep.dispatch import deepep_library, nccl_ep_library

    library, why = deepep_library.load()
    apis = [] if library is None else deepep_library.offers(library)
    found = {api: why or f"the installed DeepEP offers {apis}, not {api}" for api in {"v1", "v2"} - set(apis)}
    reasons = nccl_ep_library.library_reasons()
    return found | ({"nccl_ep": "; ".join(reasons)} if reasons else {})


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], tuple[RankPool, dict[str, str]]]]:
    """A pool for each number of GPUs, started when a case first needs it, and what its ranks cannot have."""
    made: dict[int, tuple[RankPool, dict[str, str]]] = {}

    def pool(count: int) -> tuple[RankPool, dict[str, str]]:
        if count not in made:
            ranks = RankPool(count, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=120.0)
            made[count] = ranks, ranks.run(missing, timeout_s=120)[0]
        return made[count]

    yield pool
    for ranks, _ in made.values():
        ranks.close()


@pytest.mark.parametrize(("name", "case", "refusal"), list(cells()))
def test_contract(
    pools: Callable[[int], tuple[RankPool, dict[str, str]]], name: str, case: contract.Case, refusal: str
) -> None:
    pool, lacking = pools(case.num_ranks)
    needs = str(dict(dict(case.config).get("options", ())).get("api", "")) or name.partition("-")[0]  # type: ignore[call-overload]
    if needs in lacking:
        pytest.skip(f"{name} is not to be had: {lacking[needs]}")
    modules = ("tests.ranks.nccl_ep_variants",) if name.startswith("nccl_ep") else ()
    contract.check(pool, name, case, refusal=refusal, modules=modules, timeout_s=120)

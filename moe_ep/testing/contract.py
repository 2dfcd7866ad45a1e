"""The contract that every dispatcher keeps, as a suite that runs by name on gloo (CPU) and on GPUs alike.

    from moe_ep.testing import contract
    from moe_ep.testing.ranks import RankPool

    @pytest.fixture(scope="module")
    def pool():
        with RankPool(4) as ranks:                                   # ranks start once per test file
            yield ranks

    @pytest.mark.parametrize("case", contract.CASES, ids=lambda case: case.name)
    def test_contract(pool, case):
        contract.check(pool, "mine", case, refusal=REFUSED.get(case.name, ""), modules=("my_package.dispatcher",))

    REFUSED = {                                                      # what it cannot run, and a piece of its words
        "num-sms/R2": "num_sms = 8 would have no effect",
        "experts-not-divisible/R4": "num_experts = 6 is not divisible by the 4 ranks",
    }

`refusal` is a piece of the text with which your dispatcher refuses a case, at construction or (where it depends on
values) with the first micro-batch, "" where it must run; for the dispatchers of this package `table.TABLE`,
`table_deepep.DEEPEP` and `table_nccl_ep.NCCL_EP` hold it. `fitted` makes cases for a back end of one dtype and few
hidden sizes. `modules` are imported on every rank: they register the name.

What is held in every case: results and all gradients against a float64 oracle within derived bounds; the rows that the
experts see, bit for bit and in order, their counts, offsets and weights; LayoutStats; the same bits again in poisoned
memory, unless the back end says that it is not deterministic. Which further things happen (several tickets, misuse,
faults, recompute, ...) is in the case's driver.
"""

from __future__ import annotations

from collections.abc import Sequence

from .bench import Report
from .case_list import CASES, EIGHT
from .cases import Case, fitted
from .drivers import run_case
from .judge import judge
from .ranks import RankPool

__all__ = ["CASES", "EIGHT", "Case", "check", "find_problems", "fitted"]

CASE_TIMEOUT_S = 60.0


def check(
    pool: RankPool,
    dispatcher: str,
    case: Case,
    *,
    refusal: str = "",
    modules: Sequence[str] = (),
    timeout_s: float = CASE_TIMEOUT_S,
) -> None:
    """Run one case and raise AssertionError with everything that is wrong.

    Args:
        pool: at least `case.num_ranks` ranks; its device is where tensors live.
        dispatcher: a registered name.
        case: one of CASES.
        refusal: a piece of the expected refusal, "" where the dispatcher must run.
        modules: imported on every rank first.
        timeout_s: time for the case.

    Raises:
        AssertionError: the contract is broken; the message lists rank, micro-batch and value.
        RankError: a rank raised or did not finish in time.
    """
    problems = find_problems(pool, dispatcher, case, refusal=refusal, modules=modules, timeout_s=timeout_s)
    if problems:
        raise AssertionError(f"{dispatcher} breaks the contract in {case.name}:\n  " + "\n  ".join(problems))


def find_problems(
    pool: RankPool,
    dispatcher: str,
    case: Case,
    *,
    refusal: str = "",
    modules: Sequence[str] = (),
    timeout_s: float = CASE_TIMEOUT_S,
) -> list[str]:
    """As `check`, but returns the sentences."""
    reports: list[Report] = pool.run(
        run_case, dispatcher, case, pool.device, tuple(modules), num_ranks=case.num_ranks, timeout_s=timeout_s
    )
    if refusal:
        return [
            f"rank {rank}: the refusal is {report.refusal!r}, expected {refusal!r} in it"
            for rank, report in enumerate(reports)
            if refusal not in (report.refusal or "")
        ]
    refused = [f"rank {rank}: {report.refusal}" for rank, report in enumerate(reports) if report.refusal]
    return refused or judge(case, reports)

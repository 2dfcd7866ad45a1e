"""`nccl_ep` over a stand-in for its library (see nccl_ep_double): the contract suite, and what the adapter owes it."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import build_dispatcher, close_dispatchers
from moe_ep.errors import CapacityError, MoEError, ProtocolError
from moe_ep.routing import Routing
from moe_ep.testing import contract
from moe_ep.testing.ranks import RankError, RankPool
from moe_ep.testing.table_nccl_ep import LAYOUTS, NCCL_EP
from tests.gpu.small_training import Setup, interleaved_equals_serial, train
from tests.ranks import nccl_ep_double as double
from tests.ranks import nccl_ep_variants

MODULES = (nccl_ep_variants.__name__,)
NAMES = dict(zip(LAYOUTS, ("double", "double-flat"), strict=True))
FLAT_TOO = {"four-tickets/R2", "two-tickets-crossed/R2", "fault-bad-id/R2"}


def in_fast_tier(layout: str, case: contract.Case) -> bool:
    """Of two ranks all but orders of stages and faults of the second layout, which know no layout; three show it."""
    same = layout == "flat" and case.driver in ("schedule", "fault") and case.name not in FLAT_TOO
    return case.num_ranks == 2 and not same


CELLS = [
    pytest.param(
        NAMES[layout],
        case,
        NCCL_EP[case.name][column],
        id=f"{layout}-{case.name}",
        marks=[] if in_fast_tier(layout, case) else [pytest.mark.slow],
    )
    for case in contract.CASES
    for column, layout in enumerate(LAYOUTS)
    if case.num_ranks == 2 or (case.num_ranks == 4 and case.driver in ("repeat", "fault"))
]
QUICK = {"uniform/R2", "zero-tokens-on-some-ranks/R2", "no-route-slots/R2", "four-tickets/R2", "recompute/R2"}
SYNC_FREE = {"repeat", "steps", "schedule", "source", "recompute", "memory", "backward twice"}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=60) as ranks:
        yield ranks


@pytest.mark.parametrize(("name", "case", "refusal"), CELLS)
def test_contract(pool: RankPool, name: str, case: contract.Case, refusal: str) -> None:
    contract.check(pool, name, case, refusal=refusal, modules=MODULES)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name in QUICK else [pytest.mark.slow])
        for case in contract.CASES
        if case.num_ranks == 2 and case.driver in SYNC_FREE and NCCL_EP[case.name][0] == "" and not case.config
    ],
)
def test_a_fixed_budget_keeps_the_contract(pool: RankPool, case: contract.Case) -> None:
    contract.check(pool, "double-budget", case, modules=MODULES)


LOW_LATENCY = [
    pytest.param(
        case if case.grads == "none" else replace(case, grads="none"),
        NCCL_EP[case.name][0],
        id=case.name,
        marks=[] if case.name in QUICK or case.grads == "none" else [pytest.mark.slow],
    )
    for case in contract.CASES
    if case.num_ranks == 2 and (case.grads == "none" or case.driver in ("repeat", "steps", "fault"))
]


@pytest.mark.parametrize(("case", "refusal"), LOW_LATENCY)
def test_low_latency_keeps_the_contract_under_no_grad(pool: RankPool, case: contract.Case, refusal: str) -> None:
    contract.check(pool, "double-low-latency", case, refusal=refusal, modules=MODULES)


def train_and_evaluate(group: dist.ProcessGroup, rank: int) -> list[float]:
    """A training micro-batch under way while another is evaluated, then one evaluation left half-way."""
    dispatcher = make(group, "double-low-latency")
    x = torch.full((3, 8), rank + 1.0, requires_grad=True)
    weights = torch.ones(3, 2)
    ticket = dispatcher.dispatch_preprocess(x, Routing(expert_ids=IDS, weights=weights, num_experts=8))
    dispatcher.dispatch(ticket)
    with torch.no_grad():
        evaluated = forward(dispatcher, IDS, x, micro_batch=1)
        left = dispatcher.dispatch_preprocess(x, Routing(expert_ids=IDS, weights=weights, num_experts=8), micro_batch=2)
        dispatcher.dispatch(left)
        del left
        again = forward(dispatcher, IDS, x, micro_batch=3)
    rows = dispatcher.dispatch_postprocess(ticket)
    dispatcher.combine_preprocess(ticket, rows.rows())
    dispatcher.combine(ticket)
    y = dispatcher.combine_postprocess(ticket)
    y.sum().backward()
    assert x.grad is not None
    free = dispatcher.low_latency.num_handles - dispatcher.low_latency.num_free
    values = [evaluated[0, 0].item(), again[2, 7].item(), y[1, 1].item(), x.grad[0, 0].item(), float(free)]
    close_dispatchers(group)
    return values


def test_evaluation_beside_training(pool: RankPool) -> None:
    assert pool.run(train_and_evaluate, num_ranks=2) == [[2 * r, 2 * r, 2 * r, 2.0, 0.0] for r in (1.0, 2.0)]


def test_the_table_has_a_row_for_every_case_and_no_other() -> None:
    assert list(NCCL_EP) == [case.name for case in contract.CASES]


def make(group: dist.ProcessGroup, name: str = "double", **fields: Any) -> Any:
    sizes: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden_size": 8, "max_tokens": 6}
    return build_dispatcher(DispatchConfig(name=name, **(sizes | fields)), group)


def forward(dispatcher: Any, ids: torch.Tensor, x: torch.Tensor, micro_batch: int = 0) -> torch.Tensor:
    weights = torch.ones(ids.shape)
    ticket = dispatcher.dispatch_preprocess(
        x, Routing(expert_ids=ids, weights=weights, num_experts=dispatcher.config.num_experts), micro_batch=micro_batch
    )
    dispatcher.dispatch(ticket)
    rows = dispatcher.dispatch_postprocess(ticket)
    dispatcher.combine_preprocess(ticket, rows.rows())
    dispatcher.combine(ticket)
    return dispatcher.combine_postprocess(ticket)


IDS = torch.tensor([[0, 7], [3, 4], [5, 1]])


def count_handles(group: dist.ProcessGroup, rank: int) -> list[tuple[int, int]]:
    """(made, free) after steps one by one, with three graphs alive, and when they are gone."""
    dispatcher, seen = make(group), []
    for _ in range(5):
        forward(dispatcher, IDS, torch.ones(3, 8, requires_grad=True)).sum().backward()
    seen.append((dispatcher.engine.num_handles, dispatcher.engine.num_free))
    graphs = [forward(dispatcher, IDS, torch.ones(3, 8, requires_grad=True)) for _ in range(3)]
    seen.append((dispatcher.engine.num_handles, dispatcher.engine.num_free))
    torch.stack(graphs).sum().backward()
    del graphs
    seen.append((dispatcher.engine.num_handles, dispatcher.engine.num_free))
    with torch.no_grad():
        for _ in range(4):
            forward(dispatcher, IDS, torch.ones(3, 8))
    seen.append((dispatcher.engine.num_handles, dispatcher.engine.num_free))
    close_dispatchers(group)
    return seen


def test_a_handle_is_held_until_its_graph_is_gone_and_then_used_again(pool: RankPool) -> None:
    for seen in pool.run(count_handles, num_ranks=2):
        assert seen == [(1, 1), (3, 0), (3, 3), (3, 3)]


def ranks_hold_different_numbers(group: dist.ProcessGroup, rank: int) -> tuple[int, float]:
    """Rank 0 keeps graphs that rank 1 has let go of: one makes handles where the other takes old ones."""
    dispatcher, kept = make(group), []
    for step in range(4):
        y = forward(dispatcher, IDS, torch.full((3, 8), float(step + 1), requires_grad=True))
        if rank == 0:
            kept.append(y)
    y.sum().backward()
    handles, value = dispatcher.engine.num_handles, y[0, 0].item()
    del kept, y
    close_dispatchers(group)
    return handles, value


def test_ranks_need_not_hold_equally_many_handles(pool: RankPool) -> None:
    assert pool.run(ranks_hold_different_numbers, num_ranks=2) == [(4, 8.0), (2, 8.0)]


def run_overflow(dispatcher: Any, group: dist.ProcessGroup) -> tuple[str, bool]:
    x = torch.ones(20, 8, requires_grad=True)
    y = forward(dispatcher, torch.tensor([[4, 5]] * 20), x)
    y.sum().backward()
    assert x.grad is not None
    defined = bool(y.isfinite().all() and x.grad.isfinite().all())
    try:
        dispatcher.raise_if_faulted()
    except CapacityError as err:
        return str(err), defined
    finally:
        close_dispatchers(group)
    return "nothing was raised", defined


def overflow(group: dist.ProcessGroup, rank: int) -> tuple[str, bool]:
    dispatcher = make(group, max_tokens=20, options=(("budget_rows", 40),))
    return run_overflow(dispatcher, group)


def test_rows_beyond_the_budget_are_a_fault_on_every_rank(pool: RankPool) -> None:
    for said, defined in pool.run(overflow, num_ranks=2):
        assert said.startswith("layer 0, micro-batch 0: 80 expert rows are more than a rank has room for")
        assert defined


def close_early(group: dist.ProcessGroup, rank: int) -> tuple[str, dict[str, int], dict[str, int]]:
    before = dict(double.alive)
    dispatcher = make(group)
    y = forward(dispatcher, IDS, torch.ones(3, 8, requires_grad=True))
    dispatcher.close()
    dispatcher.close()
    said = ""
    try:
        y.sum().backward()
    except MoEError as err:
        said = f"{type(err).__name__}: {err}"
    close_dispatchers(group)
    return said, before, dict(double.alive)


def test_close_frees_everything_in_order_and_backward_behind_it_is_refused(pool: RankPool) -> None:
    for said, before, after in pool.run(close_early, num_ranks=2):
        assert said.startswith(
            f"{ProtocolError.__name__}: backward of combine of layer 0, micro-batch 0 came after close"
        )
        assert after == before


def odd_sizes(group: dist.ProcessGroup, rank: int) -> list[Any]:
    """5 experts a rank, 3 tokens at most, rows of 14 bytes, and an x at an odd address."""
    dispatcher = make(group, num_experts=10, max_tokens=3, hidden_size=7, dtype="bfloat16")
    x = torch.arange(22, dtype=torch.bfloat16)[1:].view(3, 7)
    with torch.no_grad():
        y = forward(dispatcher, torch.tensor([[0, 9], [4, 5], [6, -1]]), x)
    sizes = dispatcher.sizes
    close_dispatchers(group)
    return [
        sizes.num_experts,
        sizes.max_tokens,
        sizes.row_bytes,
        torch.equal(y[:2], 2 * x[:2]),
        torch.equal(y[2], x[2]),
    ]


def test_sizes_that_the_library_does_not_take_are_padded(pool: RankPool) -> None:
    assert pool.run(odd_sizes, num_ranks=2) == [[12, 16, 32, True, True]] * 2


def other_versions(group: dist.ProcessGroup, rank: int) -> str:
    with mock.patch.object(nccl_ep_variants.OnDouble, "versions", lambda self: {"double": str(rank)}):
        try:
            make(group, max_tokens=7)
        except MoEError as err:
            return f"{type(err).__name__}: {err}"
    return "nothing was raised"


def test_ranks_with_other_versions_hear_of_it_before_anything_is_made(pool: RankPool) -> None:
    said = pool.run(other_versions, num_ranks=2)
    assert said[0] == said[1]
    assert said[0].startswith("PeerError: the ranks disagree about dispatcher 'nccl_ep': double is '0' on rank 0")


def said_at_construction(group: dist.ProcessGroup, rank: int, key: str, value: Any) -> str:
    """Rank 1 alone is given another value."""
    try:
        make(group, **({key: value} if rank == 1 else {}))
    except MoEError as err:
        return f"{type(err).__name__}: {err}"
    finally:
        close_dispatchers(group)
    return "built"


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_tokens", 5), ("top_k", 4), ("hidden_size", 16), ("num_experts", 16), ("dtype", "bfloat16"),
     ("options", (("budget_rows", 64),))],
)  # fmt: skip
def test_every_rank_names_what_differs_on_one(pool: RankPool, key: str, value: Any) -> None:
    first, second = pool.run(said_at_construction, key, value, num_ranks=2)
    assert first == second
    assert first.startswith("PeerError: the ranks disagree about the dispatcher: ")
    assert f"{key} is " in first and f"{value!r} on rank 1" in first


def out_of_order(group: dist.ProcessGroup, rank: int) -> None:
    """Two micro-batches, dispatched in another order on rank 1: the library would mix them up or hang."""
    dispatcher = make(group)
    routing = Routing(expert_ids=IDS, weights=torch.ones(3, 2), num_experts=8)
    tickets = [dispatcher.dispatch_preprocess(torch.ones(3, 8), routing, micro_batch=i) for i in range(2)]
    dispatcher.dispatch(tickets[0])
    if rank == 1:
        dispatcher.dispatch(tickets[1])
    else:
        dispatcher.dispatch_postprocess(tickets[0])
        dispatcher.combine_preprocess(tickets[0], torch.ones(tickets[0].num_rows, 8))
        dispatcher.combine(tickets[0])


def test_ranks_at_different_calls_are_found(pool: RankPool) -> None:
    with pytest.raises(RankError, match="contract 1: the ranks are at different calls"):
        pool.run(out_of_order, num_ranks=2)


def come_late(group: dist.ProcessGroup, rank: int) -> list[str]:
    """Rank 1 is late for the first micro-batch, rank 0 for the second: what each one's watchdog prints."""
    dispatcher, printed = make(group), io.StringIO()
    dispatcher.watchdog.overdue_s = 0.1
    with contextlib.redirect_stderr(printed), torch.no_grad():
        for micro_batch, late in ((1, 1), (2, 0)):
            time.sleep(1.0 if rank == late else 0.0)
            forward(dispatcher, IDS, torch.ones(3, 8), micro_batch)
    close_dispatchers(group)
    return [line for line in printed.getvalue().splitlines() if "has not ended" in line]


def test_ranks_that_wait_say_for_what_and_a_late_one_says_nothing(pool: RankPool) -> None:
    said = pool.run(come_late, num_ranks=2)
    for rank, (number, micro_batch) in enumerate([(1, 1), (4, 2)]):
        (line,) = said[rank]
        assert f"rank {rank} of 2, double" in line
        assert f"communication {number}: exchange of routes of layer 0, micro-batch {micro_batch} was issued" in line


FEW = Setup(dispatcher="agrs", steps=3, tokens=24, device="cpu")


def trained(group: dist.ProcessGroup, rank: int, setup: Setup) -> tuple[list[float], list[str]]:
    return train(group, rank, setup), interleaved_equals_serial(group, rank, setup)


@pytest.mark.parametrize("name", NAMES.values())
def test_training_and_interleaving(pool: RankPool, name: str) -> None:
    """Whole layers, two interleaved micro-batches, some steps: the loss of agrs, which rounds partial sums alike."""
    wanted: list[float] = pool.run(train, FEW, num_ranks=2)[0]
    for curve, problems in pool.run(trained, replace(FEW, dispatcher=name), num_ranks=2):
        assert curve == pytest.approx(wanted, rel=1e-3)
        assert problems == []

"""bench_dispatch's stacks and steps on gloo ranks: every variant measured, halves that are halves, defects found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.dispatch import Ticket, collectives, register_dispatcher
from moe_ep.dispatch.all2all import All2All
from moe_ep.expert_input import ExpertInput
from moe_ep.replica.messages import GroupTransport
from moe_ep.replica.transport import InFlight as Arrived
from moe_ep.routing import Routing
from moe_ep.testing.ranks import RankPool
from tools.bench_candidates import Candidate
from tools.bench_domino import StackCase
from tools.bench_options import Options
from tools.bench_run import WrongWork, run
from tools.bench_setting import Place, make_setting
from tools.bench_stack import BenchStack
from tools.bench_variants import Plan
from tools.domino_table import domino_lines
from tools.replica_lines import speed_lines
from tools.rows import ROW_FIELDS, Row
from tools.shapes import Shape, make_workload
from tools.timing import Untimed

SMALL = Shape(T=16, H=8, I=8, E=4, K=2)
STACK = Options(
    dispatchers=(), shapes=(SMALL,), levels=("stack",), passes=("fwd+bwd",), micro_batches=(2,), layers=2,
    iterations=1, warmup=1,
)  # fmt: skip


@register_dispatcher("second_ticket_first")
class SecondTicketFirst(All2All):
    """Serially right; where two micro-batches are under way, one gets the other's rows."""

    last: Tensor | None = None

    def _combine_postprocess(self, ticket: Ticket) -> Tensor:
        y = super()._combine_postprocess(ticket)
        y = self.last if ticket.micro_batch == 1 and self.last is not None else y
        self.last = y
        return y


@register_dispatcher("second_gradient_lost")
class SecondGradientLost(All2All):
    """Forward right; backward of the second micro-batch gives x nothing but the router's part."""

    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        detached = x_TH.detach() + 0 * x_TH if ticket.micro_batch == 1 else x_TH
        super()._dispatch_preprocess(ticket, detached, routing)


@register_dispatcher("rows_of_others")
class RowsOfOthers(All2All):
    """Sends one expert's rows to its neighbour, in one layer."""

    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        ids = routing.expert_ids
        ids = torch.where(ids == 0, 1, ids) if ticket.layer == 1 else ids
        changed = Routing(expert_ids=ids, weights=routing.weights, num_experts=routing.num_experts)
        super()._dispatch_preprocess(ticket, x_TH, changed)


@register_dispatcher("leaves_places")
class LeavesPlaces(All2All):
    """As back ends with kernels of their own: its transfers stand in no log, and leave integers beside the rows."""

    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        flown = ticket.state.flight._forward
        assert flown.alarm is not None, "no places"  # what stands in for a transfer has none
        flown.alarm.party.unlogged = True
        return super()._dispatch_postprocess(ticket)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=60) as ranks:
        yield ranks


def measure(group: dist.ProcessGroup | None, rank: int, options: Options) -> tuple[list[Row], str]:
    """(rows, text of the abort or "")."""
    rows: list[Row] = []
    place = Place(device=torch.device("cpu"), group=group, rank=rank, num_ranks=1 if group is None else group.size())
    try:
        run(options, place, rows.extend)
    except WrongWork as err:
        return rows, str(err)
    return rows, ""


@pytest.mark.parametrize("level", ["stack", "step"])
def test_every_variant_has_a_row(pool: RankPool, level: str) -> None:
    options = replace(
        STACK, dispatchers=("agrs",), levels=(level,), passes=("fwd", "fwd+bwd"), micro_batches=(1, 2),
        attention="gqa:2,1,4,8",
    )  # fmt: skip
    (rows, abort), (other_rows, _) = pool.run(measure, options)
    assert abort == "" and rows == other_rows
    variants = [
        *((1, "unsplit"), (1, "compute"), (1, "communication"), (2, "unsplit"), (2, "split"), (2, "overlapped")),
        *((2, "compute"), (2, "communication")),
    ]
    assert [(row["M"], row["variant"]) for row in rows] == variants * 4
    for row in rows:
        assert tuple(row) == ROW_FIELDS and row["status"] == "ok" and row["us_p50"] > 0
        assert (row["attention"], row["layers"], row["reserve_sms"], row["level"]) == ("gqa:2,1,4,8", 2, 0, level)
        real = row["variant"] not in ("compute", "communication")
        assert row["wrong"] == (0 if real else None) and (not real or 0 <= row["err"] < 1e-5)
        of_gpus = ("hidden_share", "hidden_share_steps", "comm_us", "exposed_us", "gemm_us", "gemm_rate", "peak_mib")
        assert all(row[name] is None for name in (*of_gpus, "host_syncs", "sms", "algbw"))
        assert (row["ratio"] is not None) == real
    for row in rows:
        alike = [r for r in rows if all(r[name] == row[name] for name in ("M", "pass", "dispatcher"))]
        alone = {r["variant"]: r["us_p50"] for r in alike if r["variant"] in ("compute", "communication")}
        if row["ratio"] is not None:
            assert row["floor_us"] == max(alone.values())
            assert row["ratio"] == pytest.approx(row["us_p50"] / row["floor_us"], abs=1e-3)
    text = "\n".join(domino_lines(rows))
    assert text.count("M  unsplit") == 4 and f"{level} T,H,I,E,K=16,8,8,4,2 R=2" in text


REPLICAS = replace(STACK, skews=(1.0, 1.6), replica_slots=(0, 2))


@pytest.mark.parametrize("level", ["stack", pytest.param("step", marks=pytest.mark.slow)])
def test_copies_of_hot_experts_placed_for_each_micro_batch_and_for_all(pool: RankPool, level: str) -> None:
    """Both in one run, right, their gradients held to those without copies, and a line on which one is faster."""
    options = replace(REPLICAS, dispatchers=("agrs",), levels=(level,), micro_batches=(1, 2))
    (rows, abort), (other_rows, _) = pool.run(measure, options)
    assert abort == "" and rows == other_rows
    assert {row["status"] for row in rows} == {"ok"}
    with_copies = [row for row in rows if row["S"] == 2]
    variants = [(1, "unsplit"), (2, "unsplit"), (2, "split"), (2, "overlapped"), (2, "joint")]
    assert [(row["M"], row["variant"]) for row in with_copies] == variants * 4
    assert "joint" not in {row["variant"] for row in rows if row["S"] == 0}
    assert all(row["wrong"] == 0 and row["err"] < 1e-5 and row["floor_us"] is None for row in with_copies)
    lines = speed_lines(rows)
    assert sum("with a placement for each micro-batch" in line for line in lines) == 4
    assert sum("of its speed" in line for line in lines) == len(with_copies)
    joint, each = (
        next(row for row in with_copies if row["variant"] == name and row["skew"] == 1.6)
        for name in ("joint", "overlapped")
    )
    ratio = f"{joint['us_p50'] / each['us_p50']:.3f} times the {each['us_p50']:.0f} us with a placement"
    assert sum(f"{level} fwd+bwd all2all" in line and ratio in line for line in lines) == 1
    text = "\n".join(domino_lines(rows))
    assert "skew=1.6 S=2 float32 agrs torch fwd+bwd none 2\n  M  unsplit" in text
    assert f"{joint['us_p50'] / 1e3:.3f}" in text and f"{each['us_p50'] / 1e3:.3f}" in text


def without_gradients_of_copies(group: dist.ProcessGroup, rank: int, options: Options) -> tuple[list[Row], str]:
    with mock.patch.object(GroupTransport, "_pull", lambda *_: Arrived(lambda: None)):
        return measure(group, rank, options)


def test_gradients_of_copies_that_stay_away_are_found(pool: RankPool) -> None:
    rows, abort = pool.run(without_gradients_of_copies, replace(REPLICAS, skews=(1.6,)))[0]
    assert abort == ""
    wrong = {(row["S"], row["variant"]) for row in rows if row["status"] == "failed"}
    assert wrong == {(2, name) for name in ("unsplit", "split", "overlapped", "joint")}


def test_a_back_end_whose_transfers_leave_more_than_rows_is_measured_without_its_halves(pool: RankPool) -> None:
    """And its group serves on: all2all is measured behind it."""
    rows, abort = pool.run(measure, replace(STACK, dispatchers=("leaves_places",)))[0]
    assert abort == "" and len(rows) == 10
    for row in rows:
        half = row["variant"] in ("compute", "communication")
        refused = half and row["dispatcher"] == "leaves_places"
        assert row["status"] == ("refused" if refused else "ok")
        if refused:
            assert "leave more than rows (places, counts or a handle) that nothing can stand in for" in row["reason"]
        assert (row["floor_us"] is None) == (half or row["dispatcher"] == "leaves_places")
    assert "leaves_places" in "\n".join(domino_lines(rows))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("second_ticket_first", {"overlapped"}),
        ("second_gradient_lost", {"overlapped"}),
    ],
)
def test_what_only_interleaving_breaks_has_no_time(pool: RankPool, name: str, wrong: set[str]) -> None:
    rows, abort = pool.run(measure, replace(STACK, dispatchers=(name,)))[0]
    assert abort == ""
    failed = [row for row in rows if row["status"] == "failed"]
    assert {row["variant"] for row in failed} == wrong
    assert {row["dispatcher"] for row in failed} == {name}
    for row in failed:
        assert row["wrong"] > 0 and row["us_p50"] is None and "float64 reference" in row["reason"]


def test_wrong_rows_in_a_later_layer_abort(pool: RankPool) -> None:
    rows, abort = pool.run(measure, replace(STACK, dispatchers=("rows_of_others",)))[0]
    assert "aborted: dispatcher 'rows_of_others': rank" in abort
    assert rows and all(row["status"] == "failed" and row["variant"] for row in rows)


def count_transfers(group: dist.ProcessGroup, rank: int) -> dict[str, tuple[int, int]]:
    """By variant: all-to-alls of counts, of rows. Counts are int64."""
    place = Place(device=torch.device("cpu"), group=group, rank=rank, num_ranks=group.size())
    setting = make_setting(make_workload(SMALL, 2, 1.0, 0), place, torch.float32, 2)
    stack = BenchStack(setting, 2, "torch", None, 3)
    real, found = collectives._all_to_all_single, dict[str, tuple[int, int]]()
    calls: list[bool] = []

    def noting(out: Tensor, *args: Any, **options: Any) -> Any:
        calls.append(out.dtype in (torch.int64, torch.uint8) and out.numel() <= 8 * 64)
        return real(out, *args, **options)

    cases = [
        StackCase(
            stack, Candidate("all2all"), Plan(level="stack", pass_="fwd+bwd", num=2, variant=variant, reserve_sms=0)
        )
        for variant in ("split", "overlapped", "compute", "communication")
    ]
    with mock.patch.object(collectives, "_all_to_all_single", noting):
        for case in cases:
            calls.clear()
            case.run(0, Untimed())
            found[case.plan.variant] = (len(calls), len(case.tap._held_back))
    return found


def test_compute_sends_no_rows_and_communication_sends_them_all(pool: RankPool) -> None:
    # a layer and micro-batch: dispatch (rows, weights), combine, their transposes, and one exchange of counts
    layers, micro_batches = 3, 2
    counts, rows = layers * micro_batches, 6 * layers * micro_batches
    for found in pool.run(count_transfers):
        assert found == {
            "split": (counts + rows, 0), "overlapped": (counts + rows, 0), "compute": (counts, 0),
            "communication": (counts + rows, 0),
        }  # fmt: skip


def gradients_without_transfers(group: dist.ProcessGroup, rank: int) -> tuple[bool, bool]:
    """Whether `compute` gave every parameter a finite gradient, and other outputs than the real run."""
    place = Place(device=torch.device("cpu"), group=group, rank=rank, num_ranks=group.size())
    setting = make_setting(make_workload(SMALL, 2, 1.0, 0), place, torch.float32, 2)
    stack = BenchStack(setting, 2, "torch", None, 2)
    plan = Plan(level="step", pass_="fwd+bwd", num=2, variant="overlapped", reserve_sms=0)
    real, silent = (StackCase(stack, Candidate("all2all"), replace(plan, variant=v)) for v in ("overlapped", "compute"))
    real.run(0, Untimed())
    ys = [y.clone() for y in real.left.ys]
    silent.run(0, Untimed())
    finite = all(p.grad is not None and bool(p.grad.isfinite().all()) for _, p in stack.parameters())
    return finite, not any(torch.equal(a, b) for a, b in zip(ys, silent.left.ys, strict=True))


def test_compute_runs_all_of_backward_on_rows_that_never_travelled(pool: RankPool) -> None:
    assert pool.run(gradients_without_transfers) == [(True, True)] * 2


def test_reserved_sms_are_refused_where_there_are_none(pool: RankPool) -> None:
    rows, _ = pool.run(measure, replace(STACK, passes=("fwd",), reserve_sms=(None, 16)))[0]
    (refused,) = [row for row in rows if row["status"] != "ok"]
    assert (refused["variant"], refused["reserve_sms"], refused["status"]) == ("overlapped", 16, "refused")
    assert "reserve_sms = 16 would have no effect: tensors are on cpu, which has no SMs" in refused["reason"]


def test_a_trace_of_each_candidate_is_kept_where_asked(tmp_path: Path) -> None:
    measure(None, 0, replace(STACK, passes=("fwd",), trace=tmp_path / "new"))
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {
        f"stack-16x8x8x4x2-all2all-fwd-M2-{variant}-reserve0-rank0.json.gz"
        for variant in ("unsplit", "split", "overlapped", "compute", "communication")
    }

"""Stages of copies of experts in the benchmark: right when alone, and left out where the layer runs without them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep.replica import runtime
from moe_ep.replica.exchange import Exchange
from moe_ep.replica.messages import GroupTransport
from moe_ep.replica.reroute import reroute
from moe_ep.replica.transport import InFlight
from moe_ep.routing import Routing
from moe_ep.testing.ranks import RankPool
from tests.ranks.test_bench import SMALL, measure
from tools.bench_candidates import Candidate
from tools.bench_layer import BenchLayer
from tools.bench_options import Options
from tools.bench_report import load, report
from tools.bench_setting import Place, make_setting
from tools.bench_without import STAGES, WholeCase
from tools.floors import Rates
from tools.replica_lines import replica_stage_lines
from tools.rows import Row, RowFile, machine_header
from tools.shapes import make_workload
from tools.timing import Untimed

OPTIONS = Options(
    dispatchers=("agrs",), shapes=(SMALL,), skews=(1.5,), passes=("fwd", "fwd+bwd"), replica_slots=(2,), iterations=3,
    warmup=1, rates=Rates(link_gbs=1.0, hbm_tbs=1.0),
)  # fmt: skip
EXPERT_BYTES = 3 * SMALL.H * SMALL.I * 4


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=60) as ranks:
        yield ranks


def test_each_stage_alone_and_exposed(pool: RankPool, tmp_path: Path) -> None:
    (rows, abort), (other_rows, _) = pool.run(measure, OPTIONS)
    assert abort == "" and rows == other_rows
    assert [row["stage"] for row in rows] == [*STAGES[:3], *STAGES] * 2
    for row in rows:
        assert (row["status"], row["level"], row["S"], row["experts"], row["wrong"]) == ("ok", "stage", 2, "torch", 0)
        assert row["us_p50"] > 0 and row["exposed_us"] is not None
        assert row["hidden_share_steps"] == pytest.approx(1 - row["exposed_us"] / row["us_p50"], abs=1e-3)
        moves = row["stage"] in ("weight_sync", "grad_reduce")
        assert (row["dedup_bytes"] is not None) == (row["floor_us"] is not None) == moves
        if moves:  # one or two experts, and forward and backward for weights
            assert EXPERT_BYTES <= row["dedup_bytes"] <= 2 * EXPERT_BYTES
            trips = 2 if row["stage"] == "weight_sync" and row["pass"] == "fwd+bwd" else 1
            assert row["floor_us"] == pytest.approx(trips * row["dedup_bytes"] / 1e3, rel=1e-3)
            assert row["ratio"] == pytest.approx(row["us_p50"] / row["floor_us"], rel=1e-3)
    lines = replica_stage_lines(rows)
    assert len(lines) == len(rows)
    reduce = next(row for row in rows if row["stage"] == "grad_reduce" and row["dispatcher"] == "agrs")
    wanted = f"grad_reduce alone {reduce['us_p50']:.1f} us ({1 / reduce['ratio']:.0%} of the link's rate), exposed "
    assert any(f"{wanted}{reduce['exposed_us']:.1f} us" in line for line in lines)
    file = RowFile(tmp_path / "rows.jsonl", machine_header(["x"]))
    file.append(rows)
    assert set(lines) < set(report([load(tmp_path / "rows.jsonl")]))


def homes(routing: Routing, plan: Any, rank: int) -> Routing:
    """Every route to its expert's own rank: the right rows in all, and none where the plan wants them."""
    slots, num_local = plan.slots, plan.num_local
    ids = routing.expert_ids + routing.expert_ids // num_local * slots
    return Routing(expert_ids=ids, weights=routing.weights, num_experts=reroute(routing, plan, rank).num_experts)


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "plan": (runtime, "reroute", homes),
    "weight_sync": (GroupTransport, "_push", lambda *_: InFlight(lambda: None)),
    "grad_reduce": (GroupTransport, "_pull", lambda *_: InFlight(lambda: None)),
}


def measure_mutant(group: dist.ProcessGroup, rank: int, name: str) -> tuple[list[Row], str]:
    with mock.patch.object(*MUTANTS[name]):
        return measure(group, rank, replace(OPTIONS, dispatchers=(), passes=("fwd+bwd",), iterations=1))


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_wrong_results_have_no_time(pool: RankPool, name: str) -> None:
    rows, _ = pool.run(measure_mutant, name)[0]
    failed = [row for row in rows if row["status"] == "failed"]
    assert failed and failed[0]["wrong"] > 0 and "the masters, the sums of what the slots held" in failed[0]["reason"]
    assert not [row for row in rows if row["status"] == "ok"]


def count_calls(group: dist.ProcessGroup, rank: int) -> dict[str | None, Counter[str]]:
    """Of the layer as a whole and without each stage: how often each part of it was called."""
    place = Place(device=torch.device("cpu"), group=group, rank=rank, num_ranks=group.size())
    setting = make_setting(make_workload(SMALL, 2, 1.5, 0), place, torch.float32, 1)
    layer = BenchLayer(Candidate("all2all"), "torch", setting, slots=2)
    found: dict[str | None, Counter[str]] = {}
    parts = {"exchange": (Exchange, "gather"), "reroute": (runtime, "reroute")}
    parts |= {"push": (GroupTransport, "_push"), "pull": (GroupTransport, "_pull")}
    for without in (None, *STAGES):
        case, calls = WholeCase(layer, "fwd+bwd", setting, without), Counter[str]()
        with ExitStack() as counted:
            for name, (owner, method) in parts.items():
                counted.enter_context(_counting(owner, method, calls, name))
            case.run(0, Untimed())
        assert not case.mismatches
        found[without] = calls
    return found


def _counting(owner: Any, method: str, calls: Counter[str], name: str) -> Any:
    real = getattr(owner, method)

    def counting(*args: Any, **how: Any) -> Any:
        calls[name] += 1
        return real(*args, **how)

    return mock.patch.object(owner, method, counting)


def test_a_stage_left_out_is_not_run_and_all_others_are(pool: RankPool) -> None:
    everything = dict(exchange=2, reroute=1, push=2, pull=1)
    parts = {"plan": "exchange", "reroute": "reroute", "weight_sync": "push", "grad_reduce": "pull"}
    for found in pool.run(count_calls):
        assert found[None] == everything
        for stage, part in parts.items():
            assert found[stage] == {name: n for name, n in everything.items() if name != part}, stage


DELAY_S = 0.1


def measure_slow_reduction(group: dist.ProcessGroup, rank: int) -> tuple[list[Row], str]:
    real = GroupTransport._pull

    def slow(*args: Any) -> InFlight:
        flight = real(*args)

        def finish() -> None:
            time.sleep(DELAY_S)
            flight.wait()

        return InFlight(finish)

    with mock.patch.object(GroupTransport, "_pull", slow):
        return measure(group, rank, replace(OPTIONS, dispatchers=(), passes=("fwd+bwd",)))


def test_what_takes_long_and_is_waited_for_is_exposed(pool: RankPool) -> None:
    rows, _ = pool.run(measure_slow_reduction)[0]
    exposed = {row["stage"]: row["exposed_us"] for row in rows}
    assert exposed.pop("grad_reduce") > 0.7e6 * DELAY_S > max(exposed.values())
    assert next(row["us_p50"] for row in rows if row["stage"] == "grad_reduce") > 1e6 * DELAY_S


def test_one_rank_has_no_copies() -> None:
    rows, _ = measure(None, 0, replace(OPTIONS, dispatchers=(), passes=("fwd",), skews=(1.0,)))
    assert {row["status"] for row in rows} == {"refused"}
    assert all("would have no effect on one rank" in row["reason"] for row in rows)

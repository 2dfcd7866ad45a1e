"""bench_dispatch on gloo ranks: complete rows of right results, and every kind of wrong work found."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import Ticket, register_dispatcher
from moe_ep.dispatch.all2all import All2All
from moe_ep.errors import InputError
from moe_ep.routing import NO_ROUTE, Routing
from moe_ep.testing.ranks import RankPool
from tests.ranks.launch import start
from tools import bench_dispatch
from tools.bench_dispatch import main
from tools.bench_options import Options, parse_rates
from tools.bench_run import WrongWork, run
from tools.bench_setting import Place
from tools.floors import Rates
from tools.replica_lines import speed_lines
from tools.rows import ROW_FIELDS, Row, read_rows
from tools.shapes import Shape

ROOT = Path(__file__).resolve().parents[2]
SMALL = Shape(T=32, H=16, I=24, E=8, K=2)
QUICK = Options(dispatchers=(), shapes=(SMALL,), iterations=2, warmup=1)
EVERYTHING = replace(QUICK, levels=("stage", "layer"), passes=("fwd", "fwd+bwd"))


def global_ids_as(name: str, change: Any) -> None:
    """Register an all2all that changes the routing before it dispatches."""

    class Changed(All2All):
        def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
            ids = change(routing.expert_ids, self.rank * self.num_local, self.num_local)
            changed = Routing(expert_ids=ids, weights=routing.weights, num_experts=routing.num_experts)
            super()._dispatch_preprocess(ticket, x_TH, changed)

    Changed.__qualname__ = Changed.__name__ = name
    register_dispatcher(name)(Changed)


# flashinfer-ai/flashinfer#3892: local ids where global ids are expected, so that work of other ranks is dropped
global_ids_as("dropped", lambda ids, first, count: torch.where(ids // count == first // count, ids, NO_ROUTE))
global_ids_as("local_ids", lambda ids, first, count: torch.where(ids // count == first // count, ids - first, NO_ROUTE))
global_ids_as("modulo", lambda ids, first, count: ids % count)
# the right number of rows in all, but not on the right experts
global_ids_as("neighbour", lambda ids, first, count: torch.where(ids == first, first + 1, ids))
# right rows on the right experts, of the wrong tokens
global_ids_as("rotated", lambda ids, first, count: ids.roll(1, 0))


@register_dispatcher("stale")
class Stale(All2All):
    """Returns the first result for ever: right once, and then what moved nothing."""

    kept: Tensor | None = None

    def _combine_postprocess(self, ticket: Ticket) -> Tensor:
        fresh = super()._combine_postprocess(ticket)
        if self.kept is None:
            self.kept = fresh.detach().clone()
        return fresh * 0 + self.kept


@register_dispatcher("last_token_lost")
class LastTokenLost(All2All):
    """NaN where the last token should be."""

    def _combine_postprocess(self, ticket: Ticket) -> Tensor:
        y = super()._combine_postprocess(ticket)
        return torch.cat([y[:-1], torch.full_like(y[-1:], float("nan"))])


@register_dispatcher("wrong_gradient")
class WrongGradient(All2All):
    """The forward is right; the gradient of x is doubled."""

    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        super()._dispatch_preprocess(ticket, 2 * x_TH - x_TH.detach(), routing)


@register_dispatcher("no_gradient")
class NoGradient(All2All):
    """The forward is right; backward stops at the dispatch."""

    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        super()._dispatch_preprocess(ticket, x_TH.detach(), routing)


@register_dispatcher("one_rank_fails")
class OneRankFails(All2All):
    """Rank 1 refuses its input."""

    def dispatch_preprocess(self, x_TH: Tensor, routing: Routing, *, layer: int = 0, micro_batch: int = 0) -> Ticket:
        if self.rank == 1:
            self.announce_failure(x_TH.device)
            raise InputError("planted")
        return super().dispatch_preprocess(x_TH, routing, layer=layer, micro_batch=micro_batch)


@register_dispatcher("greedy")
class Greedy(All2All):
    """Runs out of memory when it is built."""

    def __init__(self, config: DispatchConfig, group: dist.ProcessGroup | None) -> None:
        raise torch.OutOfMemoryError("tried to allocate 1 TiB\nand more lines")


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


def test_complete_rows_of_right_results(pool: RankPool) -> None:
    options = replace(EVERYTHING, dispatchers=("agrs", "local"), skews=(1.0, 1.5))
    (rows, abort), (other_rows, _) = pool.run(measure, options)
    assert abort == "" and rows == other_rows, "every rank knows the slowest rank's times"
    assert all(tuple(row) == ROW_FIELDS for row in rows)
    ok = [row for row in rows if row["status"] == "ok"]
    per_skew = 2 * (4 + 3 + 2)  # dispatchers x (stage fwd, stage fwd+bwd, layer)
    assert [row["skew"] for row in ok] == [1.0] * per_skew + [1.5] * per_skew
    assert {row["dispatcher"] for row in ok} == {"all2all", "agrs"}
    for row in ok:
        assert row["wrong"] == 0 and 0 <= row["err"] < 1e-5
        assert 0 < row["us_p10"] <= row["us_p50"] <= row["us_p90"]
        assert row["dtype"] == "float32" and row["experts"] == ("torch" if row["level"] == "layer" else None)
        unknown_here = ("host_syncs", "peak_mib", "sms", "floor_us", "ratio", "api", "hidden_share", "reason")
        assert all(row[name] is None for name in unknown_here)
        assert row["route_bytes"] == 32 * 2 * 16 * 4 and 0 < row["dedup_bytes"] <= 32 * 16 * 4
        assert abs(row["skew_realised"] - row["skew"]) < 0.2
    refused = [row for row in rows if row["status"] == "refused"]
    assert len(refused) == 2 * 2 * 2 and len(ok) + len(refused) == len(rows)
    assert all("serves 1 rank(s), the group has 2" in row["reason"] and row["us_p50"] is None for row in refused)


def test_keys_reach_the_dispatcher_on_every_level(pool: RankPool) -> None:
    levels, names = ("stage", "layer", "stack"), ("all2all:kernels=torch", "all2all:kernels=cuda")
    rows, abort = pool.run(measure, replace(QUICK, dispatchers=names, levels=levels, layers=1))[0]
    assert abort == ""
    for level in levels:
        found = {row["api"]: (row["dispatcher"], row["status"]) for row in rows if row["level"] == level}
        ok, refused = ("all2all", "ok"), ("all2all", "refused")  # CUDA kernels without a GPU
        assert found == {None: ok, "kernels=torch": ok, "kernels=cuda": refused}


def test_layers_with_copies_of_hot_experts(pool: RankPool) -> None:
    """Two slots on a skewed routing: right results, rows counted over all copies, and a line beside the even layer."""
    options = replace(EVERYTHING, levels=("layer",), skews=(1.0, 1.5), replica_slots=(0, 2))
    (rows, abort), _ = pool.run(measure, options)
    assert abort == ""
    assert {row["status"] for row in rows} == {"ok"}
    assert {(row["S"], row["skew"]) for row in rows} == {(s, k) for s in (0, 2) for k in (1.0, 1.5)}
    lines = speed_lines(rows)
    assert len(lines) == sum(row["S"] == 2 for row in rows)
    assert any("S = 2" in line and "of its speed" in line and "without" in line for line in lines)


def test_floors_and_bandwidths_follow_from_bytes_and_times(pool: RankPool) -> None:
    rates = Rates(link_gbs=1e-3, hbm_tbs=1e3)  # a link so slow that it alone decides: a byte in a nanosecond x 1000
    rows, _ = pool.run(measure, replace(QUICK, rates=rates))[0]
    by_stage = {(row["stage"], row["form"]): row for row in rows}
    for row in rows:
        trips = 2 if row["stage"] == "dispatch+combine" else 1
        assert row["floor_us"] == pytest.approx(trips * row["dedup_bytes"], rel=1e-3)
        assert row["ratio"] == pytest.approx(row["us_p50"] / row["floor_us"], rel=1e-3)
        assert row["algbw"] == pytest.approx(trips * row["route_bytes"] / row["us_p50"] / 1e3, abs=1e-3)
        assert row["busbw"] == pytest.approx(trips * row["dedup_bytes"] / row["us_p50"] / 1e3, abs=1e-3)
    assert by_stage["dispatch", "unique"]["us_p50"] <= by_stage["dispatch", "expanded"]["us_p50"]


@pytest.mark.parametrize("level", ["stage", "layer"])
@pytest.mark.parametrize("name", ["dropped", "local_ids", "modulo", "neighbour"])
def test_a_run_that_moved_other_rows_aborts(pool: RankPool, name: str, level: str) -> None:
    for rows, abort in pool.run(measure, replace(QUICK, dispatchers=(name,), levels=(level,))):
        assert f"aborted: dispatcher {name!r}: rank" in abort and "it moved other work than it claims" in abort
        (row,) = rows
        assert row["status"] == "failed" and row["us_p50"] is None and row["reason"] in abort


@pytest.mark.parametrize(
    ("name", "pass_", "levels"),
    [
        ("rotated", "fwd", ("stage",)),
        ("stale", "fwd", ("stage", "layer")),
        ("last_token_lost", "fwd", ("stage", "layer")),
        ("wrong_gradient", "fwd+bwd", ("stage", "layer")),
    ],
)
def test_wrong_results_have_no_time(pool: RankPool, name: str, pass_: str, levels: tuple[str, ...]) -> None:
    options = replace(QUICK, dispatchers=(name,), passes=(pass_,), levels=levels)
    rows, abort = pool.run(measure, options)[0]
    failed = [row for row in rows if row["dispatcher"] == name]
    assert abort == "" and [row["level"] for row in failed] == list(levels)
    for row in failed:
        assert row["status"] == "failed" and row["wrong"] > 0 and row["us_p50"] is None
        assert "differ from the float64 reference" in row["reason"]
    assert all(row["status"] == "ok" for row in rows if row["dispatcher"] == "all2all")


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("no_gradient", "failed", "rank 0: MoEError: the backward of dispatch gave x no gradient"),
        ("one_rank_fails", "failed", "rank 0: PeerError: rank 1 reported a fault"),
        ("greedy", "oom", "rank 0: out of memory: tried to allocate 1 TiB"),
        ("agsr", "refused", "unknown dispatcher 'agsr'; did you mean 'agrs'?"),
    ],
)
def test_a_candidate_that_cannot_run_is_a_row_with_the_reason(
    pool: RankPool, name: str, status: str, reason: str
) -> None:
    options = replace(QUICK, dispatchers=(name,), passes=("fwd+bwd",))
    rows, abort = pool.run(measure, options)[0]
    (lost,) = [row for row in rows if row["dispatcher"] == name]
    assert abort == "" and lost["status"] == status and reason in lost["reason"] and "\n" not in lost["reason"]
    assert [row["stage"] for row in rows if row["status"] == "ok"] == ["dispatch", "combine", "dispatch+combine"]


def test_one_rank_without_a_process_group() -> None:
    rows, _ = measure(None, 0, replace(EVERYTHING, dispatchers=("local",), experts="loop"))
    assert {(row["dispatcher"], row["status"], row["R"]) for row in rows} == {("all2all", "ok", 1), ("local", "ok", 1)}
    assert all(row["dedup_bytes"] == 0 for row in rows)


def test_bfloat16_stays_within_its_tolerance() -> None:
    rows, _ = measure(None, 0, replace(EVERYTHING, dtype=torch.bfloat16))
    assert {row["status"] for row in rows} == {"ok"}
    assert all(1e-4 < row["err"] < 0.05 for row in rows), "rounding to bfloat16 shows"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--micro-batches", "1,2"], "micro-batches = 2 needs level stack or step"),
        (["--micro-batches", "0"], "micro-batches must be at least 1, got 0"),
        (["--hot-experts", "2"], "hot-experts = 2 would have no effect without a skew above 1"),
        (["--replica-slots", "-1"], "replica-slots must not be negative, got -1"),
        (["--reserve-sms", "16"], "reserve-sms = [16] acts where micro-batches interleave"),
        (["--reserve-sms", "-1"], "reserve-sms must be auto or at least 0, got -1"),
        (["--reserve-sms", "few"], "--reserve-sms 'few'"),
        (["--level", "stack", "--layers", "0"], "layers must lie between 1 and 1024, got 0"),
        (["--level", "stack", "--attention", "mla"], "--attention 'mla' is not none, gqa"),
        (["--level", "stack", "--attention", "gqa:2,1,4"], "four positive numbers"),
        (["--level", "stack", "--attention", "gqa:2,1,4,3"], "gqa:2,1,4,3 does not fit T = 8"),
        (["--nccl-ctas", "8"], "--nccl-ctas 8 limits NCCL, and this run has no use for NCCL"),
        (["--level", "stages"], "level 'stages' is unknown; did you mean 'stage'?"),
        (["--pass", "bwd"], "pass 'bwd' is unknown"),
        (["--dtype", "f32"], "dtype 'f32' is not one of"),
        (["--skew", "x"], "--skew 'x': 'x' is not one of the comma-separated numbers that it takes"),
        (["--micro-batches", "2,x"], "--micro-batches '2,x': 'x' is not one of the comma-separated integers that it"),
        (["--micro-batches", "1.5"], "--micro-batches '1.5': '1.5' is not one of the comma-separated integers"),
        (["--replica-slots", "one"], "--replica-slots 'one': 'one' is not one of the comma-separated integers"),
        (["--reserve-sms", "auto,all"], "'all' is not one of the comma-separated integers or 'auto' that it takes"),
        (["--skew", "1.5"], r"skew 1.5 lies outside [1, 1]"),
        (["--rates", "nan,1"], "--rates 'nan,1': each must be finite and above 0"),
        (["--rates", "380,inf"], "--rates '380,inf': each must be finite and above 0"),
        (["--rates", "380"], "--rates '380' must be LINK_GBS,HBM_TBS"),
        (["--dispatchers", ","], "--dispatchers is empty; it takes comma-separated names"),
        (["--iterations", "0"], "iterations must be at least 1, got 0"),
        (["--warmup", "0"], "warmup must be at least 1"),
    ],
)
def test_what_is_not_measured_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["--shape", "8,4,4,4,2", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_command_on_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["--shape", "16,8,8,4,2", "--dispatchers", "local", "--strict", "--iterations", "2", "--warmup", "1"]
    job = start(2, [*command, "--out", str(out)], tmp_path, program=ROOT / "tools" / "bench_dispatch.py")
    assert job.wait() == [1, 1], "--strict: local is refused on two ranks\n" + job.text()
    header, rows = read_rows(out)
    assert header["argv"][0] == "tools/bench_dispatch.py" and header["argv"][-1] == "rows.jsonl"
    assert header["gpu"] is None or torch.cuda.is_available()
    assert [row["status"] for row in rows] == ["refused", *["ok"] * 4]
    assert str(tmp_path) not in json.dumps([header, rows])
    if not torch.cuda.is_available():
        assert job.text(0).rstrip().endswith("they are not performance.")


def test_wrong_results_fail_the_command_without_strict_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    quick = ["--shape", "16,8,8,4,2", "--iterations", "2", "--warmup", "1", "--out", str(tmp_path / "x.jsonl")]
    assert main([*quick, "--dispatchers", "agsr"]) == 0
    assert main([*quick, "--dispatchers", "agsr", "--strict"]) == 1
    assert main([*quick, "--dispatchers", "stale"]) == 1
    assert main([*quick, "--dispatchers", "neighbour"]) == 1
    assert "error: aborted: dispatcher 'neighbour'" in capsys.readouterr().err
    assert [row["status"] for row in read_rows(tmp_path / "x.jsonl")[1]] == ["failed"]


def test_rates_that_are_equal_are_two_rates() -> None:
    assert parse_rates("4,4") == Rates(link_gbs=4.0, hbm_tbs=4.0)


def test_a_file_that_cannot_be_written_ends_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["--shape", "16,8,8,4,2", "--iterations", "1", "--warmup", "1", "--out", "/dev/full"]) == 1
    assert "error: /dev/full: No space left on device; free space or choose another --out" in capsys.readouterr().err


def test_a_rank_that_never_comes_ends_the_benchmark_with_3_and_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(bench_dispatch, "TIMEOUT_S", 1)
    assert main(["--shape", "16,8,8,4,2"]) == 3
    assert "only 1 of 2 ranks came within 1 s (the benchmark's limit)" in capfd.readouterr().err

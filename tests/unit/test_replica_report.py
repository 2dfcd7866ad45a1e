"""The comparison of balancing policies: figures against hand counts, large simulated groups, and refusals."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import torch

from moe_ep.errors import InputError, RecipeError
from moe_ep.load import expert_load, imbalance, rank_load
from moe_ep.replica import verify
from recipes.routing_trace import Step, TraceHeader, read_steps, write_step
from tools import replica_report
from tools.replica_policies import POLICIES, Setting, build_policy, destinations, in_turns, pack
from tools.replica_series import Report, measure
from tools.synthetic_traces import Synthetic, parse, steps_of

HEADER = TraceHeader(
    step=1, rank=0, replica=0, ranks=2, num_experts=4, top_k=1, layers=1, micro_batches=1, expert_bytes=2**20,
    row_bytes=8, seed=0, commit="",
)  # fmt: skip


def hand_written(folder: Path) -> Path:
    """Rank 0 sends 6 rows to expert 0, rank 1 two to expert 3: 6 against 2 on the home ranks."""
    for rank, ids in enumerate(([0] * 6, [3, 3, -1])):
        tensor = torch.tensor(ids, dtype=torch.int32).view(1, 1, -1, 1)
        header = TraceHeader(**{**{name: getattr(HEADER, name) for name in HEADER.__slots__}, "rank": rank})
        write_step(folder, header, tensor, torch.ones(tensor.shape))
    return folder


def figures(*arguments: str) -> Report:
    chosen = replica_report.options().parse_args(list(arguments))
    ((name, steps),) = replica_report.traces(chosen.traces)
    return measure(name, steps, chosen, chosen.policies.split(","))


def test_figures_of_a_trace_counted_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(hand_written(tmp_path / "trace"))
    series = figures(trace, "--slots", "2").series
    none, quota, fixed = series[0, "none"], series[0, "quota"], series[0, "fixed_rows"]
    assert (none.peak, none.replicas, none.sent, none.remote, none.sends) == ([1.5], [0], [0], [0.0], [0.0])
    assert (quota.peak, quota.replicas, quota.sent, quota.remote, quota.sends) == ([1.0], [1], [1], [0.25], [0.25])
    assert fixed.peak == [1.0]
    assert series[0, "balanced"].peak == [1.0]
    assert replica_report.main([trace, "--slots", "1"]) == 0
    out = capsys.readouterr().out
    assert "R=2 E=4 K=1, 1 MoE layer(s), 1 micro-batches; 1 slot(s) a rank, smallest quota 1, 1 MiB an expert" in out
    assert "fixed_rows: left out, it needs 2 slots a rank" in out


@pytest.mark.parametrize("kind", ["zipf", "drifting", "bursty"])
def test_quota_stays_within_a_hundredth_of_the_bound(kind: str) -> None:
    """Realised after rerouting every token, and no other policy with fixed masters is better."""
    report = figures(f"{kind}:R=8,E=64,K=4,T=256,steps=3,layers=2,skew=2.5", "--policies", "none,least-loaded,quota")
    for layer, bounds in report.bounds.items():
        before, spilled, ours = (report.series[layer, name].peak for name in ("none", "least-loaded", "quota"))
        assert fmean(before) > 1.5
        for bound, best, other in zip(bounds, ours, spilled, strict=True):
            assert best <= 1.01 * bound
            assert best <= other


@pytest.mark.parametrize(("ranks", "experts", "slots"), [(16, 256, 1), (64, 256, 2), (256, 512, 2)])
def test_large_groups_in_one_process(ranks: int, experts: int, slots: int) -> None:
    report = figures(
        f"zipf:R={ranks},E={experts},K=8,T=64,steps=1,micro_batches=1,skew=3", "--slots", str(slots),
        "--policies", "none,eplb-exact,quota",
    )  # fmt: skip
    (bound,), ours = report.bounds[0], report.series[0, "quota"]
    assert report.series[0, "none"].peak[0] > 2
    assert ours.peak[0] <= 1.01 * bound
    assert ours.peak[0] <= report.series[0, "eplb-exact"].peak[0]
    assert 0 < ours.replicas[0] <= ranks * slots
    assert ours.remote[0] < report.series[0, "none"].remote[0]  # locality first


def test_history_lags_behind_a_burst() -> None:
    report = figures("bursty:R=8,E=32,K=2,T=256,steps=12,micro_batches=1,skew=1.5", "--policies", "eplb-history,quota")
    lagging = report.series[0, "eplb-history"]
    assert lagging.peak[10] > 1.5  # the first micro-batch of the burst
    assert lagging.sent[0] == 0  # nothing is known before the first one
    assert max(report.series[0, "quota"].peak) < 1.02


@pytest.mark.parametrize("together", [1, 2, 3, 4])
def test_micro_batches_placed_together_send_once(together: int) -> None:
    """A step of four: weights travel once for each group, and every plan of a group fills the same slots."""
    trace = "zipf:R=8,E=32,K=2,T=256,steps=1,skew=2"
    report = figures(trace, "--policies", "none,quota,quota-joint", "--together", str(together))
    alone, joint = report.series[0, "quota"], report.series[0, "quota-joint"]
    assert [count > 0 for count in joint.sent] == [n % together == 0 for n in range(4)]
    assert sum(count > 0 for count in alone.sent) == 4
    first = joint.replicas[::together]
    assert joint.replicas == [first[n // together] for n in range(4)]
    for home, apart, shared in zip(report.series[0, "none"].peak, alone.peak, joint.peak, strict=True):
        assert apart <= shared < 1.1 < home
    assert together > 1 or joint.peak == alone.peak


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_computes_every_row_once(name: str) -> None:
    setting = Setting(num_ranks=4, num_experts=8, slots=2, min_quota=1)
    policy = build_policy(name, setting, window=2)
    generator = torch.Generator().manual_seed(1)
    past: list[torch.Tensor] = []
    for _ in range(3):
        ids = [(torch.rand(20, 2, generator=generator) ** 3 * 9).long() - 1 for _ in range(4)]
        load = torch.stack([expert_load(rank, 8) for rank in ids])
        placement = policy.place([load], 0, past)
        dest = [destinations(placement, rank_ids, setting, rank) for rank, rank_ids in enumerate(ids)]
        assert len(placement.sent) == 4
        if name != "balanced":
            assert all(torch.equal(d < 0, i < 0) for d, i in zip(dest, ids, strict=True))
        if placement.plan is not None:
            verify(placement.plan)
            arrived = sum(expert_load(d, 4) for d in dest)
            assert torch.equal(arrived, placement.plan.rank_load())
        if placement.hosts is not None:
            routes = torch.stack([torch.cat(ids).flatten(), torch.cat(dest).flatten()], 1).tolist()
            assert all(rank in placement.hosts[expert] for expert, rank in routes if expert >= 0)
        past.append(load.sum(0))


def test_packing_like_eplb() -> None:
    """Loads 90, 10, 20, 10 and two copies more: both for expert 0, and no rank holds more than three."""
    setting = Setting(num_ranks=2, num_experts=4, slots=1, min_quota=1)
    ranks = pack([90, 10, 20, 10], setting)
    assert [len(experts) for experts in ranks] == [3, 3]
    assert sorted(e for experts in ranks for e in experts) == [0, 0, 0, 1, 2, 3]


def test_tokens_in_turns() -> None:
    ids = torch.tensor([[0, 1], [0, 0], [-1, 0]])
    assert in_turns(ids, [[0, 1], [1]], rank=0).tolist() == [[0, 1], [1, 0], [-1, 1]]
    assert in_turns(ids, [[0, 1], [1]], rank=1).tolist() == [[1, 1], [0, 1], [-1, 0]]


def test_synthetic_traces_have_the_skew_asked_for_and_repeat() -> None:
    spec = parse("zipf:R=8,E=64,K=4,T=2048,skew=2.5,steps=1,micro_batches=1,seed=3")
    (step,), (again,) = steps_of(spec), steps_of(spec)
    assert all(torch.equal(a, b) for a, b in zip(step.ids, again.ids, strict=True))
    load = sum(expert_load(ids[0, 0], 64) for ids in step.ids)
    assert float(imbalance(rank_load(load, 8))) == pytest.approx(2.5, rel=0.1)
    assert bool((step.ids[0][0, 0].sort(1).values.diff(dim=1) > 0).all())  # no expert twice in a token


def test_popularities_drift() -> None:
    spec = Synthetic(kind="drifting", R=4, E=16, K=1, T=1024, steps=101, micro_batches=1)
    steps = list(steps_of(spec))
    first, next_one, late = (expert_load(steps[n].ids[0][0, 0], 16).double() for n in (0, 1, 100))
    close, far = (float(torch.corrcoef(torch.stack([first, other]))[0, 1]) for other in (next_one, late))
    assert close > 0.9
    assert far < 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zipf:R=3,E=64", "R = 3 must divide E = 64"),
        ("zipf:R=8,E=8,K=9", "K = 9 must be at most E = 8"),
        ("zipf:skew=9", r"skew = 9.0 must lie in \[1, 8\)"),
        ("zipf:T=0", "T must be at least 1, got 0"),
        ("zipf:tokens=9", "tokens"),
        ("zipf:R", "'R' must read KEY=VALUE"),
        ("zipf:R=many", "R"),
    ],
)
def test_senseless_synthetic_traces_are_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse(text)


def test_what_cannot_be_read_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    torn = tmp_path / "step-00000001-rank0.safetensors"
    torn.write_bytes(b"no trace")
    for arguments, text in (
        ([str(tmp_path / "empty")], "holds no step-*-rank*.safetensors; record one with metrics.routing_trace="),
        ([str(tmp_path / "missing")], "is no routing trace"),
        (["zipf:skew=two"], "skew = 'two' must be float, got str"),
        ([str(torn)], "is no routing trace"),
        (["zipf", "--policies", "quotas"], "'quotas' is unknown"),
        (["zipf", "--every", "0"], "--every must be at least 1, got 0"),
        (["zipf", "--window", "0"], "--window must be at least 1, got 0"),
        (["zipf", "--together", "-1"], "--together must be at least 1, got -1"),
        (["zipf:R=3"], "R = 3 must divide E = 64"),
        (["zipf", "--slots", "-1"], "slots = -1 must be at least 0"),
    ):
        assert replica_report.main(arguments) == 2
        assert text in capsys.readouterr().err


def test_traces_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    folder = hand_written(tmp_path)
    ids = torch.zeros(1, 1, 2, 1, dtype=torch.int32)
    with pytest.raises(InputError, match="lacks rank 1 of 2"):
        read_steps([folder / HEADER.file_name])
    with pytest.raises(InputError, match="is there twice"):
        read_steps([folder, folder])
    for changes, text in (
        ({"rank": 1, "row_bytes": 9}, "differ in row_bytes"),
        ({"rank": 1, "top_k": 2}, "contradict the header"),
        ({"rank": 1, "num_experts": 0}, "contradict the header"),
    ):
        fields = {name: getattr(HEADER, name) for name in HEADER.__slots__}
        write_step(folder, TraceHeader(**{**fields, **changes}), ids, ids.float())
        with pytest.raises(InputError, match=text):
            read_steps([folder])


def test_a_trace_goes_to_disk_and_back(tmp_path: Path) -> None:
    (step,) = read_steps([hand_written(tmp_path)])
    assert isinstance(step, Step)
    assert step.header == HEADER
    assert [ids.flatten().tolist() for ids in step.ids] == [[0] * 6, [3, 3, -1]]


def test_experts_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    fields = {name: getattr(HEADER, name) for name in HEADER.__slots__}
    for rank in range(2):
        ids = torch.zeros(1, 1, 2, 1, dtype=torch.int32)
        write_step(tmp_path, TraceHeader(**{**fields, "num_experts": 5, "rank": rank}), ids, ids.float())
    with pytest.raises(RecipeError, match="5 experts cannot be divided among 2 ranks"):
        figures(str(tmp_path), "--policies", "quota")


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "load.png"
    assert replica_report.main(["zipf:T=32,steps=1", "--policies", "none,quota", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")

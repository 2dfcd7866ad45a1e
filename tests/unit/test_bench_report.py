"""The report: ratios that anybody can recompute, refusals of what is no comparison, regressions by exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tools.bench_report import main
from tools.rows import MACHINE_FIELDS, make_row

SHAPE = {"T": 64, "H": 32, "I": 48, "E": 8, "K": 2}


def row(dispatcher: str, us: float | None, **change: Any) -> dict[str, Any]:
    known = {
        "level": "stage", "stage": "dispatch", "pass": "fwd", "form": "expanded", "shape": SHAPE, "R": 2, "skew": 1.0,
        "M": 1, "S": 0, "dtype": "float32", "status": "ok", "us_p50": us, "dispatcher": dispatcher,
    }  # fmt: skip
    return make_row(**(known | change))


def write(path: Path, rows: list[dict[str, Any]], **header: Any) -> str:
    first = dict.fromkeys(MACHINE_FIELDS) | {"kind": "machine", "gpu": "H200", "gpus": 2, "link": "NV18"} | header
    path.write_text("".join(json.dumps(value) + "\n" for value in [first, *rows]))
    return str(path)


@pytest.fixture
def first(tmp_path: Path) -> str:
    return write(tmp_path / "a.jsonl", [row("all2all", 1234.57), row("agrs", 789.12), row("direct", 301.0)])


RATIO = re.compile(r"(\w+): ([\d.]+) us / (\w+) ([\d.]+) us = ([\d.]+)")


def test_every_ratio_can_be_recomputed_from_its_own_line(first: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([first]) == 0
    found = RATIO.findall(capsys.readouterr().out)
    assert [name for name, *_ in found] == ["all2all", "agrs", "direct"]
    for _, us, baseline, baseline_us, ratio in found:
        assert baseline == "all2all" and baseline_us == "1234.57"
        assert ratio == f"{float(us) / float(baseline_us):.3f}"


def test_each_run_is_held_against_its_own_baseline(
    first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # a baseline that is weaker, averaged or of another run would make 500 us look like another speed-up
    second = write(tmp_path / "b.jsonl", [row("all2all", 1000.0), row("deepep", 500.0, api="v2")], nccl_loaded="2.30")
    assert main([first, second]) == 0
    out = capsys.readouterr().out
    assert "deepep v2: 500.00 us / all2all 1000.00 us = 0.500  [b.jsonl]" in out
    assert "agrs: 789.12 us / all2all 1234.57 us = 0.639  [a.jsonl]" in out
    assert "nccl_loaded 2.30" in out


def test_a_run_without_its_baseline_gets_no_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = row("all2all", None, status="oom", reason="out of memory: 1 GiB")
    assert main([write(tmp_path / "c.jsonl", [lost, row("agrs", 5.0)])]) == 0
    out = capsys.readouterr().out
    assert "agrs: 5.00 us / all2all -: no ok row of all2all in this run" in out
    assert "all2all oom: out of memory: 1 GiB" in out


@pytest.mark.parametrize(("us", "status"), [(789.0, 0), (825.0, 0), (833.0, 1)])
def test_a_ratio_beyond_the_threshold_is_a_regression(
    first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], us: float, status: int
) -> None:
    second = write(tmp_path / "b.jsonl", [row("all2all", 1234.57), row("agrs", us)])
    assert main([first, second]) == status
    out = capsys.readouterr().out
    assert ("REGRESSION" in out) == bool(status)
    if status:
        assert "ratio grew by 5.6 %: a.jsonl agrs: 789.12 us / all2all 1234.57 us = 0.639; b.jsonl agrs: 833.00" in out
        assert main([first, second, "--threshold", "0.1"]) == 0


def test_a_slower_machine_hour_is_no_regression_but_a_slower_baseline_is(first: str, tmp_path: Path) -> None:
    alike = write(tmp_path / "b.jsonl", [row("all2all", 1234.57 * 1.04), row("agrs", 789.12 * 1.04)])
    slower = write(tmp_path / "c.jsonl", [row("all2all", 1234.57 * 1.2), row("agrs", 789.12 * 1.2)])
    assert main([first, alike, "--threshold", "0.05"]) == 0
    assert main([first, slower, "--threshold", "0.05"]) == 1


@pytest.mark.parametrize(
    ("header", "change", "message"),
    [
        ({"gpu": "B200"}, {}, r"gpu is 'H200' in .*a\.jsonl and 'B200' in .*b\.jsonl"),
        ({"gpus": 8}, {}, "gpus is 2"),
        ({"link": "PIX"}, {}, "link is 'NV18'"),
        ({}, {"shape": SHAPE | {"T": 65}}, r"only .*b\.jsonl has .*T,H,I,E,K=65,32,48,8,2"),
        ({}, {"skew": 1.5}, r"only .*a\.jsonl has .*skew=1\.0"),
        ({}, {"R": 4}, r"only .*b\.jsonl has .*R=4"),
    ],
)
def test_other_machines_and_shapes_are_refused_unless_forced(
    first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], header: Any, change: Any, message: str
) -> None:
    second = write(tmp_path / "b.jsonl", [row("all2all", 5.0, **change), row("agrs", 5.0, **change)], **header)
    assert main([first, second]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and "--force" in error
    main([first, second, "--force"])
    out = capsys.readouterr().out
    assert re.search("forced: " + message, out) and "agrs: 5.00 us / all2all 5.00 us = 1.000" in out


def test_files_that_say_nothing_are_refused(first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = write(tmp_path / "b.jsonl", [row("all2all", 5.0), row("all2all", 6.0)])
    empty = write(tmp_path / "c.jsonl", [])
    for path, message in (
        (twice, "twice"),
        (empty, "no row with status ok"),
        (str(tmp_path / "no.jsonl"), "no.jsonl cannot be read (No such"),
    ):
        assert main([first, path]) == 2
        assert message in capsys.readouterr().err
    for value in ("-1", "inf", "nan"):
        assert main([first, "--threshold", value]) == 2


def test_cpu_figures_are_labelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path / "a.jsonl", [row("all2all", 5.0)], gpu=None, gpus=None, link=None)]) == 0
    assert "CPU/gloo are not performance" in capsys.readouterr().out


def test_runs_with_other_popular_experts_are_no_comparison(
    first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = [row("all2all", 1234.57), row("agrs", 789.12), row("direct", 301.0)]
    for argv in (["tools/bench_dispatch.py", "--hot-experts", "4"], ["tools/bench_dispatch.py", "--hot-experts=4"]):
        other = write(tmp_path / "b.jsonl", same, argv=argv)
        assert main([first, other]) == 2
        assert "--hot-experts is None in" in (said := capsys.readouterr().err) and "and 4 in" in said
        assert main([other, other]) == 0


def stacked(variant: str, us: float, **change: Any) -> dict[str, Any]:
    known = {"level": "stack", "stage": None, "form": None, "M": 2, "attention": "none", "layers": 4, "reserve_sms": 0}
    return row("all2all", us, **(known | {"variant": variant} | change))


def test_variants_of_a_stack_have_one_line_for_each_reserve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = {"unsplit": 9000.0, "split": 9900.0, "compute": 7000.0, "communication": 2500.0}
    rows = [stacked(variant, us) for variant, us in times.items()]
    shares = {"ratio": 1.05, "hidden_share": 0.93, "hidden_share_steps": 0.9, "gemm_rate": 0.97, "peak_mib": 812.4}
    rows += [stacked("overlapped", 7350.0, **shares), stacked("overlapped", 7500.0, reserve_sms=16)]
    assert main([write(tmp_path / "a.jsonl", rows)]) == 0
    out = capsys.readouterr().out
    assert out.count("stack T,H,I,E,K=64,32,48,8,2 R=2 skew=1.0 float32 all2all fwd none 4") == 1
    lines = [line.split() for line in out.splitlines() if line.startswith("  2 ")]
    same = ["2", "9.000", "9.900"]
    assert lines == [
        [*same, "7.350", "-", "0", "7.000", "2.500", "1.050", "0.930", "0.900", "0.970", "-", "-", "812"],
        [*same, "7.500", "-", "16", "7.000", "2.500", "-", "-", "-", "-", "-", "-", "-"],
    ]
    assert "us / all2all" not in out, "a variant is no dispatcher to be held against another"


def test_copies_of_experts_are_held_against_the_even_layer_and_against_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = {"level": "layer", "stage": None, "form": None, "pass": "fwd+bwd", "experts": "torch"}
    copied = {"skew": 1.7, "S": 2}
    rows = [
        row("all2all", 1000.0, **layer), row("all2all", 1700.0, **layer, skew=1.7),
        row("all2all", 1040.0, **layer | copied | {"skew_realised": 1.71}),
        row("all2all", 99.0, stage="weight_sync", form=None, floor_us=90.0, exposed_us=12.34, **copied),
        stacked("overlapped", 7000.0), stacked("overlapped", 7100.0, **copied), stacked("joint", 7455.0, **copied),
    ]  # fmt: skip
    assert main([write(tmp_path / "a.jsonl", rows)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("replicas: ")]
    shape = "T,H,I,E,K=64,32,48,8,2, skew"
    together = f"stack fwd all2all, {shape} 1.70, M = 2 joint, S = 2"
    assert lines == [
        f"replicas: stage fwd all2all, {shape} 1.70, S = 2: weight_sync alone 99.0 us (91% of the link's rate), "
        "exposed 12.3 us: the layer's time with it less that without it",
        f"replicas: layer fwd+bwd all2all torch, {shape} 1.71, S = 2: 1.04 times the even layer's 1000 us, 1.70 "
        "without; 96 % of its speed",
        f"replicas: stack fwd all2all, {shape} 1.70, M = 2 overlapped, S = 2: 1.01 times the even stack's 7000 us; 99 "
        "% of its speed",
        f"replicas: {together}: 1.06 times the even stack's 7000 us; 94 % of its speed",
        f"replicas: {together}: 1.050 times the 7100 us with a placement for each micro-batch",
    ]


def test_a_slower_stack_is_a_regression_of_its_own_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [
        write(tmp_path / name, [stacked("overlapped", us), stacked("split", 9900.0)])
        for name, us in (("a.jsonl", 7000.0), ("b.jsonl", 7700.0))
    ]
    assert main(files) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("REGRESSION")]
    assert "overlapped" in line and "10.0 %" in line and "attention=none layers=4 reserve_sms=0" in line


def test_variants_of_a_dispatcher_are_candidates_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row("all2all", 100.0), row("all2all", 400.0, api="kernels=torch"), row("direct", 50.0)]
    rows += [row("direct", 25.0, api="expand=true"), row("direct", None, api="num_sms=8", status="oom", reason="full")]
    files = [write(tmp_path / "a.jsonl", rows)]
    files += [write(tmp_path / "b.jsonl", [*rows[:3], row("direct", 30.0, api="expand=true")])]
    assert main([files[0]]) == 0
    out = capsys.readouterr().out
    assert "direct expand=true: 25.00 us / all2all 100.00 us = 0.250" in out
    assert "all2all kernels=torch: 400.00 us / all2all 100.00 us = 4.000" in out
    assert "direct num_sms=8 oom: full" in out
    assert main(files) == 1
    slower = [line for line in capsys.readouterr().out.splitlines() if line.startswith("REGRESSION")]
    assert len(slower) == 1 and "direct expand=true" in slower[0]

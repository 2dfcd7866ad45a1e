"""The suite of one host: commands that parse, steps that are not done twice, and processes that do not stay behind."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from tools import bench_chart, bench_dispatch, bench_suite
from tools.bench_options import parse_options
from tools.bench_suite import Suite
from tools.rows import RowFile, machine_header, make_row
from tools.suite_steps import GROUPS, Step, steps

SHAPE = {"T": 4, "H": 8, "I": 8, "E": 4, "K": 2}


def step(name: str, *argv: str, limit_s: float = 60) -> Step:
    return Step(name=name, group="stages", argv=argv, limit_s=limit_s)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rehearsal", [True, False])
def test_every_benchmark_s_arguments_are_valid_ones(ranks: int, rehearsal: bool, tmp_path: Path) -> None:
    found = steps(ranks, tmp_path, rehearsal=rehearsal, commit=None)
    assert len({one.name for one in found}) == len(found)
    assert {one.group for one in found} == set(GROUPS) - ({"megatron"} if rehearsal else set())
    dispatch = [one for one in found if "tools/bench_dispatch.py" in one.argv]
    assert len(dispatch) == 4 * (1 if rehearsal else 3)
    for one in dispatch:
        given = one.argv[one.argv.index("tools/bench_dispatch.py") + 1 :]
        options = parse_options(bench_dispatch._parser().parse_args(given), torch.device("cpu"))
        options.check()
        assert max(options.skews) <= ranks and all(shape.E % ranks == 0 for shape in options.shapes)
        assert options.hot_experts is None or options.hot_experts in options.replica_slots


def test_on_two_ranks_it_measures_what_may_stand_beside_the_experts(tmp_path: Path) -> None:
    """Numbers of SMs, of micro-batches and of copies, on the sizes whose experts fit two GPUs."""
    found = {one.name: one.text for one in steps(2, tmp_path, rehearsal=False, commit=None)}
    assert all(f"direct:capacity_factor=1.2:num_sms={sms}" in found["stages-dsv3"] for sms in (4, 8, 16, 32, 64))
    assert all(f"all2all:num_sms={sms}" in found["domino-qwen3"] for sms in (4, 6, 8, 16))
    assert "--micro-batches 1,2,4" in found["domino-mixtral"] and "--shape dsv3 " in found["domino-dsv3"]
    assert "--hot-experts 4" in found["replicas-qwen3"] and "--replica-slots 0,1,2,4" in found["replicas-qwen3"]


def test_the_contract_s_files_are_there(tmp_path: Path) -> None:
    for ranks in (2, 4, 8):
        for one in steps(ranks, tmp_path, rehearsal=False, commit=None):
            for word in one.argv if one.group == "contract" else ():
                assert not word.startswith("tests/") or (bench_suite.ROOT / word).exists(), word


def test_a_step_runs_once_for_a_command_and_a_commit(tmp_path: Path) -> None:
    note = f"open({str(tmp_path / 'ran')!r}, 'a').write('x')"
    one, other = step("a", sys.executable, "-c", note), step("a", sys.executable, "-c", f"{note}; 1")
    suite = Suite(out=tmp_path, commit="abcdef1")
    assert not suite.is_done(one) and suite.run(one)["state"] == "done"
    assert suite.is_done(one) and not suite.is_done(other)
    assert not Suite(out=tmp_path, commit="abcdef2").is_done(one)
    lines, all_done = bench_suite.table(suite, [one, step("b", "true")])
    assert not all_done and "done" in lines[0] and "not run" in lines[1]


def test_a_failed_step_is_told_and_run_again(tmp_path: Path) -> None:
    suite = Suite(out=tmp_path, commit=None)
    one = step("bad", sys.executable, "-c", "print('why'); raise SystemExit(3)")
    assert suite.run(one)["state"] == "failed (3)" and not suite.is_done(one)
    assert (tmp_path / "bad.txt").read_text() == "why\n"


def test_what_a_step_has_started_does_not_outlive_its_limit(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']);"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid)); time.sleep(99)"
    )
    suite = Suite(out=tmp_path, commit=None)
    assert suite.run(step("long", sys.executable, "-c", code, limit_s=5))["state"] == "cut off"
    child = int((tmp_path / "child").read_text())
    for _ in range(50):  # a killed process is a zombie until somebody has waited for it
        status = Path(f"/proc/{child}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            return
        time.sleep(0.1)
    os.kill(child, 9)
    pytest.fail("the child still runs")


def test_a_suite_without_gpus_says_what_can_be_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--ranks", "64", "--out", str(tmp_path)]
    assert bench_suite.main(given) == 2 and "--rehearsal" in capsys.readouterr().err
    assert bench_suite.main([*given, "--rehearsal", "--only", "stage"]) == 2
    assert "stages" in capsys.readouterr().err


def test_rows_become_lines_of_panels_and_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = RowFile(path, machine_header(["tools/bench_dispatch.py"]))
    fixed = {"level": "stage", "stage": "dispatch", "pass_": "fwd", "shape": SHAPE, "R": 4, "M": 1, "S": 0}
    for name, skew, us in (("all2all", 2.0, 9e3), ("all2all", 1.0, 4e3), ("agrs", 1.0, 5e3)):
        file.append([make_row(**fixed, dispatcher=name, skew=skew, dtype="float32", us_p50=us, status="ok")])
    file.append([make_row(**fixed, dispatcher="direct", skew=1.0, dtype="float32", status="refused", reason="no GPU")])
    rows = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert bench_chart.panels(rows) == {
        "stage dispatch fwd 4,8,8,4,2 R=4 float32": {"all2all": [(1.0, 4.0), (2.0, 9.0)], "agrs": [(1.0, 5.0)]}
    }
    pytest.importorskip("matplotlib")
    assert bench_chart.main([str(tmp_path)]) == 0 and path.with_suffix(".png").stat().st_size > 0


def test_a_folder_that_cannot_be_made_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert bench_suite.main(["--ranks", "2", "--rehearsal", "--only", "charts", "--out", str(file)]) == 2
    assert capsys.readouterr().err == f"error: {file} cannot be made: File exists; choose another folder for --out\n"


def test_what_holds_no_rows_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken").write_text("rows")
    for name, text in {
        ".": "holds no *.jsonl; give a folder",
        "none": "none: No such file or directory; give files",
        "broken": "broken:1: the line is no JSON",
    }.items():
        assert bench_chart.main([str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert text in said and said.count("\n") == 1

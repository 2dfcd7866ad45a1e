"""The overlap report as a command: its tables, its shares, its picture, and what it refuses."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from unittest import mock

import pytest

from moe_ep.testing.chrome_trace import read_trace
from tests.unit.overlap_traces import backward, forward, launch, measured, on_cpu, two_steps
from tools import timeline
from tools.overlap_report import main
from tools.trace_labels import Label

Capture = pytest.CaptureFixture[str]


def cells(text: str, *begin: str) -> list[str]:
    """The line of a table that begins with these cells."""
    (line,) = [line.split() for line in text.splitlines() if line.split()[: len(begin)] == list(begin)]
    return line[len(begin) :]


@pytest.fixture
def two_ranks(tmp_path: Path) -> list[str]:
    slow = forward(1, 2, longer=30)
    slow.range("moe_ep: wait for dispatch of layer 0, micro-batch 0", 38, 2)
    slow.call("cudaEventSynchronize", 39)
    slow.kernel(90, 690, 10)
    smalls = [forward(0, 2), slow]
    return [str(small.write(tmp_path / f"rank{rank}.json.gz")) for rank, small in enumerate(smalls)]


def test_totals_layers_and_shares(two_ranks: list[str], capsys: Capture) -> None:
    assert main(two_ranks) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 rank(s), GPU; steps 4; rank 1 is the slowest\n")
    # step, communication, exposed, unfed, hidden, peer wait, other communication, host syncs and those in stages
    assert cells(out, "0", "4") == ["0.600", "0.170", "0.070", "0.000", "58.8", "%", "0.000", "0.000", "0", "0"]
    assert cells(out, "1", "4") == ["0.700", "0.200", "0.100", "0.000", "50.0", "%", "0.030", "0.000", "1", "1"]
    # number, communication, exposed, unfed, hidden, peer wait, compute wait, start delay, late, host syncs
    found = cells(out, "0", "fwd", "dispatch")
    assert found == [
        "2",
        "0.150",
        "0.100",
        "0.000",
        "33.3",
        "%",
        "0.030",
        "0.080",
        "273",
        "/",
        "418",
        "50",
        "/",
        "100",
        "1",
    ]
    assert cells(out, "0", "fwd", "experts") == ["0.100"]
    assert cells(out, "-", "-", "(no", "stage)") == ["0.020"]
    assert "hidden share of rank 1: 50.0 % = 1 - exposed 0.100 ms / communication 0.200 ms" in out
    assert main([*two_ranks, "--rank", "0"]) == 0
    assert "hidden share of rank 0: 58.8 %" in capsys.readouterr().out


def test_backward_and_a_rank_that_is_missing(tmp_path: Path, capsys: Capture) -> None:
    small = backward()
    launch(small, "exchange of counts of layer 0, micro-batch 0", 300, (310, 60))
    small.content["distributedInfo"] = {"rank": 0, "world_size": 8}
    assert main([str(small.write(tmp_path / "a.json"))]) == 0
    out = capsys.readouterr().out
    assert "no ranges of steps: each trace counts as one step" in out
    assert "only 1 of the run's 8 ranks: a slower one may be missing" in out
    assert cells(out, "0", "bwd", "combine")[:7] == ["1", "0.100", "0.047", "0.002", "53.0", "%", "-"]
    assert [cells(out, "0", which, "experts") for which in ("fwd", "recompute", "bwd")] == [
        ["0.010"],
        ["0.007"],
        ["0.050"],
    ]
    ways = [line.split()[1:3] for line in out.splitlines() if re.match(r" +0  (fwd|bwd|rec)", line)]
    assert ways == [
        ["fwd", "exchange"], ["fwd", "experts"], ["recompute", "experts"], ["bwd", "combine"], ["bwd", "experts"],
    ]  # fmt: skip
    assert "hidden share of rank 0: 33.1 % = 1 - exposed 0.107 ms / communication 0.160 ms" in out
    assert "  dispatch and combine alone: 53.0 % = 1 - exposed 0.047 ms / communication 0.100 ms" in out


def test_the_second_way(tmp_path: Path, capsys: Capture) -> None:
    overlapped, serial = two_steps(7).write(tmp_path / "m2.json"), two_steps(7, gap=20).write(tmp_path / "m1.json")
    assert main([str(overlapped), "--serial", str(serial)]) == 0
    out = capsys.readouterr().out
    assert cells(out, "0", "mean")[:3] == ["0.100", "0.040", "0.010"]
    assert "hidden share of rank 0: 75.0 % = 1 - exposed 0.010 ms / communication 0.040 ms" in out
    assert (
        "hidden share by step times: 50.0 % = (serial step 0.120 ms, rank 0 - overlapped step 0.100 ms, rank 0) / "
        "communication 0.040 ms, rank 0; the serial run's communication was 0.040 ms"
    ) in out


def test_no_communication_and_cpus(tmp_path: Path, capsys: Capture) -> None:
    silent = backward()
    silent.events[:] = [event for event in silent.events if not event["name"].startswith("nccl")]
    assert main([str(silent.write(tmp_path / "a.json"))]) == 0
    out = capsys.readouterr().out
    assert "hidden share of rank 0: none, nothing was communicated" in out
    assert main([str(on_cpu(rank).write(tmp_path / f"rank{rank}.json")) for rank in range(2)][:]) == 0
    out = capsys.readouterr().out
    assert "CPU ranks over gloo, whose times are not performance" in out
    assert "hidden share of rank 0: 50.0 %" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "3"], "--rank 3: there are traces of the ranks 0, 1"),
        (["--steps", "1,2"], "has no step from 1 to 2; it has 4"),
        (["--window", "0,1"], "--window is a part of the picture; give --png as well"),
        (["--serial", "none.json"], "No such file"),
        (["--png", "no/folder/here.png"], "no/folder/here.png cannot be written"),
        (["--png", "picture.docx"], "picture.docx cannot be written"),
    ],
)
def test_refusals(two_ranks: list[str], capsys: Capture, options: list[str], message: str) -> None:
    assert main([*two_ranks, *options]) == 2
    caught = capsys.readouterr()
    assert caught.out == "" and caught.err.startswith("error: ") and message in caught.err
    assert caught.err.count("\n") == 1


@pytest.mark.parametrize(
    "options", [["--steps", "4"], ["--steps", "5,4"], ["--window", "a,b"], ["--window", "2,1"], []]
)
def test_options_that_are_none(two_ranks: list[str], capsys: Capture, options: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*two_ranks, *options] if options else [])
    assert caught.value.code == 2
    assert (options or ["TRACE"])[0] in capsys.readouterr().err


def test_the_picture(two_ranks: list[str], tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    for number, window in enumerate(([], ["--window", "0.1,0.3"])):
        path = tmp_path / f"{number}.png"
        assert main([*two_ranks, "--png", str(path), *window]) == 0
        assert f"timeline: {path}" in capsys.readouterr().out
        assert path.read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "0.png").read_bytes() != (tmp_path / "1.png").read_bytes()


def test_the_picture_is_of_the_last_step_unless_another_one_is_chosen(tmp_path: Path, capsys: Capture) -> None:
    """The first one of a run is warm-up."""
    pytest.importorskip("matplotlib")
    traces = [str(two_steps(7).write(tmp_path / "rank0.json"))]
    pictures = []
    for number, (chosen, step) in enumerate((([], 8), (["--steps", "7,8"], 8), (["--steps", "7,7"], 7))):
        path = tmp_path / f"{number}.png"
        assert main([*traces, *chosen, "--png", str(path)]) == 0
        assert f"timeline: {path} of step {step}; --steps A,A draws step A\n" in capsys.readouterr().out
        pictures.append(path.read_bytes())
    assert pictures[0] == pictures[1] != pictures[2]


def test_without_matplotlib_it_says_so(two_ranks: list[str], tmp_path: Path, capsys: Capture) -> None:
    with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
        assert main([*two_ranks, "--png", str(tmp_path / "a.png")]) == 2
        assert "pip install 'moe-ep[plots]'" in capsys.readouterr().err
        assert main(two_ranks) == 0


def test_what_the_picture_shows(tmp_path: Path) -> None:
    (step,) = measured(tmp_path, forward()).ranks[0]
    compute, comm = timeline.bars(step)
    assert compute == {
        Label("attention", 0, 0, "fwd"): [(100, 200)],
        Label("experts", 0, 0, "fwd"): [(300, 400)],
        None: [(310, 320)],
    }
    assert comm == {
        Label("dispatch", 0, 0, "fwd"): [(150, 250)],
        Label("combine", 0, 0, "fwd"): [(300, 350)],
        Label("dispatch", 0, 1, "fwd"): [(500, 520)],
    }


def test_bars_that_touch_become_one_and_keep_to_the_window() -> None:
    spans = timeline._spans([(1000, 2000), (2001, 3000), (5000, 6000), (8000, 9000)], 0, (1.5, 8.5), gap=0.01)
    assert spans == [(1.5, 1.5), (5.0, 1.0), (8.0, 0.5)]
    assert timeline._spans([(0, 1)], 0, (1.5, 8.5), gap=0.01) == []


def test_stages_of_other_back_ends_have_their_place(tmp_path: Path, capsys: Capture) -> None:
    small = forward()
    for number, what in enumerate(("exchange of routes", "arrival of combine", "announcement of a fault")):
        launch(small, f"{what} of layer 0, micro-batch 0", 100 + 20 * number, (530 + 10 * number, 5))
    assert main([str(small.write(tmp_path / "a.json"))]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r" +0  fwd", line)]
    stages = [re.sub(r"  .*", "", line.strip()[8:].strip()) for line in lines]
    others = ["announcement of a fault", "arrival of combine"]
    assert stages == ["attention", "exchange of routes", "dispatch", "experts", "combine", *others]
    assert (
        timeline._colour("exchange of routes") == timeline._colour("exchange of counts") != timeline._colour(others[0])
    )


def test_looks_differ() -> None:
    pytest.importorskip("matplotlib")
    labels = [Label(stage, 0, i, way) for stage in ("dispatch", "experts") for i in (0, 1) for way in ("fwd", "bwd")]
    assert len({str(timeline._look(label)) for label in [*labels, None]}) == len(labels) + 1


def test_gzipped_or_not_is_all_the_same(tmp_path: Path) -> None:
    plain, zipped = (forward().write(tmp_path / name) for name in ("a.json", "a.json.gz"))
    assert plain.read_bytes()[:1] == b"{" and zipped.read_bytes()[:1] != b"{"
    assert read_trace(plain).events == read_trace(zipped).events

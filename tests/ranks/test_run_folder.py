"""A run's folder belongs to one run at a time, and a run says truly where it stands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_ep.errors import RecipeError
from recipes import convert
from recipes.lock import LOCK, FolderLock
from recipes.ranks import Ranks
from recipes.recipe import load_recipe
from recipes.session import Session
from tests.ranks.launch import run, start
from tests.ranks.small_recipe import write

ALONE = ["parallel.ep_size=1", "train.warmup_steps=0", "checkpoint.every=0"]
HOLD = "import sys, pathlib, time; from recipes.lock import FolderLock; lock = FolderLock(); "


@pytest.fixture
def handler() -> Iterator[None]:
    """A session sets its own."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def session(folder: Path, *overrides: str) -> Session:
    paths = [f"data.path={folder / 'text'}", f"run.dir={folder / 'runs'}"]
    recipe = load_recipe(write(folder), [*paths, *ALONE, *overrides])
    return Session(recipe, Ranks(0, 1, 1, torch.device("cpu")))


def test_a_second_run_in_a_folder_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    recipe = str(write(tmp_path))
    first = start(2, [recipe, *ALONE, "parallel.ep_size=2", "train.steps=100000"], tmp_path)
    first.wait_for("step      2/")
    for more in ([], ["checkpoint.resume=never"]):
        second = start(2, [recipe, *ALONE, "parallel.ep_size=2", *more], tmp_path)
        assert second.wait() == [2, 2]
        pid = first.processes[0].pid
        assert f"runs/small is in use by another run (process {pid} on " in second.text()
        assert "choose another run.name" in second.text()
        assert "Traceback" not in second.text()
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    assert first.wait() == [0, 0]
    rows = [json.loads(line) for line in (tmp_path / "runs/small/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["small"]


def holder(folder: Path, then: str) -> subprocess.Popen[str]:
    code = f"{HOLD}lock.hold(pathlib.Path(sys.argv[1])); print('held', flush=True); {then}"
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_killed_run_leaves_its_folder_free(tmp_path: Path) -> None:
    process = holder(tmp_path / "run", "time.sleep(60)")
    lock = FolderLock()
    with pytest.raises(RecipeError, match=f"in use by another run .process {process.pid} on "):
        lock.hold(tmp_path / "run")
    process.kill()
    process.wait()
    assert lock.hold(tmp_path / "run") is None
    assert (tmp_path / "run" / LOCK).read_text().startswith(f"process {os.getpid()} on ")


def test_nothing_is_imported_into_a_run_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = ["model.num_shared_experts=0", "model.shared_intermediate_size=0", f"run.dir={tmp_path}", *ALONE]
    recipe = str(write(tmp_path))
    with FolderLock() as lock:
        lock.hold(tmp_path / "small")
        assert convert.main(["import", recipe, str(tmp_path / "weights"), *plain]) == 2
    assert "small is in use by another run" in capsys.readouterr().err
    assert convert.main(["export", recipe, "", *plain]) == 2
    assert "usage" in capsys.readouterr().err


def test_the_lock_follows_the_name_when_the_folder_is_renamed(tmp_path: Path) -> None:
    folder, lock, other = tmp_path / "run", FolderLock(), FolderLock()
    lock.hold(folder)
    lock.hold(folder)
    folder.rename(tmp_path / "run.old1")
    lock.hold(folder)
    for name in ("run", "run.old1"):
        with pytest.raises(RecipeError, match="in use"):
            other.hold(tmp_path / name)
    with lock:
        pass
    other.hold(folder)


def test_never_makes_a_new_folder_that_is_locked_too(tmp_path: Path, handler: None) -> None:
    for _ in range(2):
        running = session(tmp_path, "train.steps=1", "checkpoint.resume=never")
        with running.lock:
            running.run()
            with pytest.raises(RecipeError, match="in use"):
                FolderLock().hold(tmp_path / "runs" / "small")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"small", "small.old1"}
    FolderLock().hold(tmp_path / "runs" / "small")


@pytest.mark.parametrize(
    ("steps", "said"),
    [(1, "SIGTERM: saved step 1 in {}; that was the last one: the run is complete"),
     (2, "SIGTERM: saved step 1 in {}; the same command goes on")],
)  # fmt: skip
def test_a_signal_in_the_last_step_is_no_interruption(
    tmp_path: Path, handler: None, capsys: pytest.CaptureFixture[str], steps: int, said: str
) -> None:
    running = session(tmp_path, f"train.steps={steps}")
    running.stop_asked = True
    with running.lock:
        running.run()
    assert capsys.readouterr().out.splitlines()[-1] == said.format(tmp_path / "runs" / "small" / "checkpoints")


def test_a_run_that_stands_beyond_its_last_step_is_refused_and_untouched(tmp_path: Path) -> None:
    recipe = str(write(tmp_path))
    run(1, [recipe, *ALONE, "train.steps=3"], tmp_path)
    metrics = tmp_path / "runs" / "small" / "metrics.jsonl"
    before = metrics.read_bytes()
    job = start(1, [recipe, *ALONE, "train.steps=2"], tmp_path)
    assert job.wait() == [2]
    last = job.text().strip().splitlines()[-1]
    assert last.startswith("refused: ")
    assert "[train]: steps = 2 lies below step 3 of runs/small/checkpoints/step-00000003" in last
    assert "done" not in job.text()
    assert metrics.read_bytes() == before


def test_a_run_folder_that_cannot_be_is_this_ranks_own_failure(tmp_path: Path) -> None:
    recipe = str(write(tmp_path))
    (tmp_path / "file").write_text("")
    job = start(1, [recipe, *ALONE, "run.dir=file"], tmp_path)
    assert job.wait() == [1]
    assert "file/small" in job.text() and "choose another run.dir" in job.text()
    assert "another rank" not in job.text() and "Traceback" not in job.text()

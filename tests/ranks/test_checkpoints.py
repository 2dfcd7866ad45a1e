"""Checkpoints that are damaged, and runs that go back to an older one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep.errors import CheckpointError
from moe_ep.testing.ranks import RankPool
from recipes import checkpoint
from recipes.build import build
from recipes.checkpoint_folder import META, find, list_steps, newest, prune, put_aside, step_name
from recipes.checkpoint_meta import record, write_meta
from recipes.identity import identity
from recipes.ranks import Ranks, over_process_group
from recipes.recipe import load_recipe
from recipes.train_loop import Trainer, save, train_step
from tests.ranks.launch import run, start
from tests.ranks.small_recipe import write

CPU = torch.device("cpu")
NAMES = ("__0_0.distcp", ".metadata", META)


def make(folder: Path, world: int = 1, *overrides: str) -> Trainer:
    paths = [f"data.path={folder / 'text'}", f"run.dir={folder}", f"parallel.ep_size={world}"]
    ranks = Ranks(0, 1, 1, CPU) if world == 1 else over_process_group(world, CPU)
    return build(load_recipe(folder / "small.toml", [*paths, *overrides]), ranks)


def load(trainer: Trainer, path: Path) -> checkpoint.Progress:
    parts = (trainer.model, trainer.optimizer, trainer.entries, trainer.ranks)
    return checkpoint.restore(path, identity(trainer.recipe, trainer.corpus), *parts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    write(folder)
    trainer = make(folder)
    train_step(trainer)
    save(trainer)
    return folder


@pytest.fixture
def saved(folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(folder / "small" / "checkpoints" / "step-00000001", tmp_path / "step-00000001"))


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [master.clone() for master in trainer.optimizer.masters]


def refused(folder: Path, path: Path) -> str:
    """The refusal, which leaves the model as it was."""
    trainer = make(folder)
    before = weights(trainer)
    with pytest.raises(CheckpointError) as caught:
        load(trainer, path)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    return str(caught.value)


def flip(file: Path, count: int = 64) -> None:
    """Damage bytes in the middle; the size stays."""
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + count] = bytes(byte ^ 0x55 for byte in data[middle : middle + count])
    file.write_bytes(data)


def test_the_names_are_all_that_a_checkpoint_holds(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == set(NAMES)


@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize("name", NAMES)
def test_damage_of_the_same_size_is_named(folder: Path, saved: Path, name: str, count: int) -> None:
    flip(saved / name, count)
    message = refused(folder, saved)
    assert str(saved) in message and name in message


META_FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda meta: [],
    "a number": lambda meta: 7,
    "nothing in it": lambda meta: {},
    "only a format": lambda meta: {"format": meta["format"]},
    "no model": lambda meta: {k: v for k, v in meta.items() if k != "model"},
    "no data": lambda meta: {k: v for k, v in meta.items() if k != "data"},
    "no files": lambda meta: {**meta, "files": {}},
    "a step in quotes": lambda meta: {**meta, "step": "1"},
    "another step": lambda meta: {**meta, "step": 2},
    "samples that are null": lambda meta: {**meta, "samples_per_step": None},
    "files as a list": lambda meta: {**meta, "files": [1]},
    "another format": lambda meta: {**meta, "format": 1},
}


@pytest.mark.parametrize("what", META_FAULTS)
def test_a_meta_file_that_is_not_as_written_is_a_checkpoint_error(folder: Path, saved: Path, what: str) -> None:
    file = saved / META
    file.write_text(json.dumps(META_FAULTS[what](json.loads(file.read_text()))))
    assert str(saved) in refused(folder, saved)


def test_a_step_of_another_type_is_refused_although_the_digest_fits(folder: Path, saved: Path) -> None:
    meta = json.loads((saved / META).read_text())
    files = {path.name: record(path) for path in saved.iterdir() if path.name != META}
    write_meta(saved, {k: meta[k] for k in ("samples_per_step", "model", "data")} | {"step": "1"}, files)
    assert META in refused(folder, saved)


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_read_at_all_is_a_checkpoint_error(folder: Path, saved: Path, name: str) -> None:
    size = (saved / name).stat().st_size
    (saved / name).unlink()
    (saved / name).mkdir()
    if name != META and (saved / name).stat().st_size == size:
        pytest.skip("a folder of just this size")
    assert str(saved) in refused(folder, saved)


def test_metadata_that_torch_cannot_read_is_a_checkpoint_error(folder: Path, saved: Path) -> None:
    """Written that way, as by another version: the digest fits."""
    (saved / ".metadata").write_bytes(b"no pickle")
    meta = json.loads((saved / META).read_text())
    files = {path.name: record(path) for path in saved.iterdir() if path.name != META}
    write_meta(saved, {k: meta[k] for k in ("step", "samples_per_step", "model", "data")}, files)
    assert "cannot be read (UnpicklingError" in refused(folder, saved)


def damaged_on_ranks(group: dist.ProcessGroup, rank: int, folder: Path) -> dict[str, str]:
    trainer = make(folder, 2, "run.name=two")
    train_step(trainer)
    save(trainer)
    whole = folder / "two" / "checkpoints" / "step-00000001"
    said = {"whole": str(load(trainer, whole).step)}
    for name in sorted(path.name for path in whole.iterdir()):
        broken = folder / f"broken{name}"
        if rank == 0:
            shutil.copytree(whole, broken)
            flip(broken / name)
        dist.barrier(group=group)
        try:
            load(trainer, broken)
        except CheckpointError as err:
            said[name] = str(err)
    return said


def test_every_rank_learns_of_damage_in_any_ranks_file(tmp_path: Path) -> None:
    write(tmp_path)
    with RankPool(2, timeout_s=60) as pool:
        first, second = pool.run(damaged_on_ranks, tmp_path)
    assert first == second
    assert first.pop("whole") == "1"
    assert first.keys() == {"__0_0.distcp", "__1_0.distcp", ".metadata", META}
    assert all(name in message for name, message in first.items())


def fake(folder: Path, step: int) -> Path:
    path = folder / step_name(step)
    path.mkdir(parents=True)
    (path / META).write_text("")
    return path


STEPS = st.integers(1, 12)


@settings(max_examples=60, deadline=None)
@given(there=st.sets(STEPS, min_size=1), keep=st.integers(1, 3), every=st.integers(1, 3), data=st.data())
def test_new_work_is_the_newest_and_nothing_of_another_line_is_lost(
    there: set[int], keep: int, every: int, data: st.DataObject
) -> None:
    """Going back to any step of a folder, with any others in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for step in there:
            fake(folder, step)
        back = data.draw(st.sampled_from(sorted(there)))
        aside = put_aside(folder, folder / step_name(back), back)
        assert {path.name for path in aside} == {f"{step_name(step)}.aside" for step in there if step > back}
        assert newest(folder) == folder / step_name(back)
        for step in range(back + every, back + 4 * every, every):
            written = fake(folder, step)
            prune(folder, step, keep)
            assert find("auto", folder) == written
            assert len(list_steps(folder)) <= max(keep, 1)
        assert all(path.exists() for path in aside)


def test_pruning_leaves_the_checkpoint_just_written_and_higher_ones(tmp_path: Path) -> None:
    for step in (7, 8, 9, 10, 12):
        fake(tmp_path, step)
    prune(tmp_path, 9, 2)
    assert [step for step, _ in list_steps(tmp_path)] == [8, 9, 10, 12]


def test_a_start_from_elsewhere_puts_all_aside_and_a_second_time_under_other_names(tmp_path: Path) -> None:
    own, elsewhere = tmp_path / "own", fake(tmp_path / "other", 5)
    for _ in range(2):
        for step in (4, 5, 6):
            fake(own, step)
        put_aside(own, elsewhere, 5)
    names = {path.name for path in own.iterdir()}
    assert names == {f"{step_name(step)}.{aside}" for step in (4, 5, 6) for aside in ("aside", "aside2")}


def test_a_run_that_goes_back_to_what_it_put_aside_puts_the_other_line_aside(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        fake(tmp_path, step)
    (aside,) = put_aside(tmp_path, tmp_path / step_name(2), 2)
    fake(tmp_path, 3)
    put_aside(tmp_path, aside, 3)
    assert list_steps(tmp_path) == [] and aside.exists()
    assert len(list(tmp_path.iterdir())) == 4


def test_a_step_that_is_written_again_puts_the_former_one_aside(folder: Path) -> None:
    trainer = make(folder, 1, "run.name=twice")
    train_step(trainer)
    save(trainer)
    trainer.saved_step = -1
    save(trainer)
    names = {path.name for path in (folder / "twice" / "checkpoints").iterdir()}
    assert names == {"step-00000001", "step-00000001.aside"}
    aside = folder / "twice" / "checkpoints" / "step-00000001.aside"
    assert load(make(folder), aside).step == 1


def test_a_run_that_goes_back_keeps_its_new_work(tmp_path: Path) -> None:
    alone = [str(write(tmp_path)), "parallel.ep_size=1", "metrics.valid_every=0"]
    run(1, [*alone, "train.steps=4", "checkpoint.every=1", "checkpoint.keep=9"], tmp_path)
    folder = tmp_path / "runs" / "small" / "checkpoints"
    back = [f"checkpoint.resume={folder.relative_to(tmp_path) / 'step-00000002'}", "checkpoint.keep=1"]
    job = start(1, [*alone, *back, "checkpoint.every=0", "train.steps=100000"], tmp_path)
    job.wait_for("step      3/")
    pid = job.processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    assert job.wait() == [0]
    last = max(step for step, _ in list_steps(folder))
    assert f"saved step {last}" in job.text(0)
    said = "put aside, as this run goes on from step 2 without them: step-00000003.aside, step-00000004.aside"
    for name in ("metrics.jsonl.aside", "load.jsonl.aside"):
        said += f", {name}"
        rows = (tmp_path / "runs" / "small" / name).read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4]
    assert said in job.text(0).splitlines()
    assert {path.name for path in folder.iterdir()} == {
        step_name(last), "step-00000003.aside", "step-00000004.aside"
    }  # fmt: skip
    job = run(1, [*alone, f"train.steps={last + 1}"], tmp_path)
    assert f"resumes at step {last} from" in job.text(0)

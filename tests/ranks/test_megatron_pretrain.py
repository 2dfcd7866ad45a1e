"""recipes/megatron_pretrain.py on CPU ranks: it learns, and neither dispatcher nor interleaving changes the losses."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moe_ep import close_dispatchers
from moe_ep.testing.ranks import RankPool
from recipes.megatron_recipe import load
from recipes.ranks import over_process_group
from tests.ranks import launch, small_recipe
from tests.ranks.megatron_cpu import on_cpu

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (moe-ep[megatron])")

PROGRAM = launch.PROGRAM.with_name("megatron_pretrain.py")
CHANGES = ("parallel.ep_size=2", "moe.weighting=activation")


_until_the_end = contextlib.ExitStack()  # of the process


def without_cuda(rank: int) -> None:
    _until_the_end.enter_context(on_cpu())


def failing_in_step_3(rank: int) -> None:
    without_cuda(rank)
    from recipes import megatron_session

    def step(trainer: Any, number: int) -> Any:
        if rank == 1 and number == 3:
            raise ZeroDivisionError("planted")
        return train_step(trainer, number)

    train_step = megatron_session.train_step
    _until_the_end.enter_context(mock.patch.object(megatron_session, "train_step", step))


def recipe_in(folder: Path) -> Path:
    path = small_recipe.write(folder)
    text = path.read_text()
    before, _, after = text.partition("[checkpoint]")
    path.write_text(before + "[metrics]" + after.partition("[metrics]")[2])
    return path


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=150) as ranks:
        yield ranks


def session(group: Any, rank: int, folder: str, overrides: tuple[str, ...]) -> str:
    """What the program does between joining and leaving the job; what it printed."""
    loaded = load(Path(folder) / "small.toml", [*CHANGES, *overrides])
    printed = io.StringIO()
    here = Path.cwd()
    with on_cpu(), contextlib.redirect_stdout(printed):
        from recipes import megatron_groups, megatron_session

        os.chdir(folder)
        ranks = over_process_group(2, torch.device("cpu"))
        megatron_groups.open_groups(ranks)
        try:
            megatron_session.run(loaded, ranks)
        finally:
            os.chdir(here)
            close_dispatchers(megatron_groups.parallel_state.get_expert_model_parallel_group())
            megatron_groups.parallel_state.destroy_model_parallel()
    return printed.getvalue()


def train(pool: RankPool, folder: Path, *overrides: str) -> tuple[list[dict[str, Any]], str]:
    recipe_in(folder)
    text, silent = pool.run(session, str(folder), overrides)
    assert silent == ""
    return metrics(folder), text


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / "small" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def native(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    rows, text = train(pool, tmp_path_factory.mktemp("native"), "megatron.dispatcher=native")
    assert "dispatcher Megatron's alltoall" in text
    return rows


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ((), "dispatcher all2all (2 ranks"),
        (("moe.dispatcher=agrs", "train.intra_layer_micro_batch=2"), "dispatcher agrs"),
        (("replica.slots=2",), "replicas: 2 slot(s) a rank"),
    ],
)
def test_same_losses_as_on_megatrons_dispatcher(
    pool: RankPool, native: list[dict[str, Any]], tmp_path: Path, overrides: tuple[str, ...], named: str
) -> None:
    rows, text = train(pool, tmp_path, *overrides)
    assert named in text and "experts SequentialMLP" in text and "done: held-out loss" in text
    assert [row["step"] for row in rows] == [row["step"] for row in native] == [1, 2, 3, 4, 5, 6]
    assert native[-1]["loss"] < native[0]["loss"] - 0.2
    for ours, theirs in zip(rows, native, strict=True):
        for key in ("loss", "grad_norm", "tokens", "lr"):
            assert ours[key] == pytest.approx(theirs[key], rel=2e-5), (key, ours["step"])
    assert rows[-1]["valid_loss"] == pytest.approx(native[-1]["valid_loss"], rel=2e-5)


@pytest.mark.slow
def test_the_program_from_start_to_end(tmp_path: Path) -> None:
    arguments = [str(recipe_in(tmp_path)), *CHANGES, "train.intra_layer_micro_batch=2"]
    job = launch.start(2, arguments, tmp_path, prepare=without_cuda, program=PROGRAM)
    assert job.wait(250) == [0, 0], job.text()
    assert "intra_layer_micro_batch 2" in job.text(0) and "done: held-out loss" in job.text(0)
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_an_error_of_one_rank_ends_the_other_with_its_text(tmp_path: Path) -> None:
    job = launch.start(2, [str(recipe_in(tmp_path)), *CHANGES], tmp_path, prepare=failing_in_step_3, program=PROGRAM)
    assert job.wait(150) == [3, 1], job.text()
    assert "rank 1 failed: ZeroDivisionError: planted" in job.text(0)


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    overrides = [*CHANGES, "parallel.ep_size=1"]
    job = launch.start(1, [str(recipe_in(tmp_path)), *overrides], tmp_path, program=PROGRAM)
    assert job.wait() == [2]
    assert "Megatron-Core runs on GPUs only" in job.text(0)

"""The trainer with `replica.slots`, on 4 ranks against one rank: gradients, norm, figures, checkpoints, run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ep.testing.ranks import RankPool
from recipes import checkpoint
from recipes.build import resume
from recipes.train_loop import save, train_step, validate
from tests.ranks.launch import run
from tests.ranks.small_recipe import write
from tests.ranks.test_pretrain_steps import make, on_ranks, reference, whole

ON = "replica.slots=2"
# sharded: experts over the 2 ranks that hold the same ones, so their weights are there inside of their forward alone
CASES = {
    "plain": (4, ()),
    "agrs": (4, ("moe.dispatcher=agrs",)),
    "sharded": (2, ()),
    "plain, recompute of layers": (4, ("train.recompute=layer",)),
    "sharded, recompute of experts": (2, ("train.recompute=moe",)),
    "sharded, recompute of layers": (2, ("train.recompute=layer",)),
    "plain, interleaved": (4, ("train.intra_layer_micro_batch=2",)),
    "sharded, interleaved": (2, ("train.intra_layer_micro_batch=2",)),
    "plain, placed together": (4, ("train.intra_layer_micro_batch=2", "replica.joint=true")),
    "sharded, placed together, recompute": (
        2,
        ("train.intra_layer_micro_batch=2", "replica.joint=true", "train.recompute=layer"),
    ),
    "fixed rows": (2, ("replica.planner=fixed_rows",)),
}
SLOW = ("agrs", "sharded", "plain, interleaved", "sharded, interleaved")  # others are these and more


@pytest.fixture(scope="module")
def pool():
    with RankPool(4, timeout_s=120) as pool:
        yield pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    write(folder)
    return folder


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_gradients_and_one_sgd_step_equal_one_rank(pool: RankPool, folder: Path, name: str) -> None:
    ep_size, overrides = CASES[name]
    expected_grads, expected_weights, expected_sums, expected_norm = reference(folder)
    for grads, weights, sums, norm in pool.run(on_ranks, folder, ep_size, (ON, *overrides)):
        assert grads.keys() == expected_grads.keys()
        for parameter, grad in grads.items():
            torch.testing.assert_close(grad, expected_grads[parameter], rtol=1e-4, atol=1e-7)
            torch.testing.assert_close(weights[parameter], expected_weights[parameter], rtol=1e-5, atol=1e-7)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
        assert sums.loss == pytest.approx(expected_sums.loss, rel=1e-6)
        assert torch.equal(sums.load, expected_sums.load)
        assert torch.equal(sums.rank_rows.sum(1), sums.load.sum(1))
        assert (sums.replicas > 0).all(), "copies in every layer"


def train_both(group: dist.ProcessGroup, rank: int, folder: Path, ep_size: int) -> list[Any]:
    """Five steps and evaluations with replicas and without; what a checkpoint, an optimizer and a norm know."""
    results = []
    for overrides in ((ON,), ()):
        trainer = make(folder, ep_size, f"run.name=both{len(overrides)}-{ep_size}", "train.clip_norm=0.1", *overrides)
        rows = [train_step(trainer)[0] for _ in range(5)]
        keys = [*trainer.model.state_dict(), *(owned.name for owned in trainer.optimizer.params)]
        saved = trainer.entries.shapes
        norms = [row.grad_norm for row in rows]
        numbers = [row.loss for row in rows], norms, validate(trainer), whole(trainer, trainer.optimizer.masters)
        results.append(((keys, saved, len(list(trainer.model.parameters()))), numbers, rows[-1].replicas))
    return results


@pytest.mark.parametrize("ep_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_checkpoint_optimizer_and_norm_know_no_replica(pool: RankPool, folder: Path, ep_size: int) -> None:
    for (names, numbers, copies), (plain_names, plain_numbers, none) in pool.run(train_both, folder, ep_size):
        assert names == plain_names
        assert all(count > 0 for count in copies) and not any(none)
        for ours, theirs in zip(numbers[:3], plain_numbers[:3], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
        for name, value in numbers[3].items():
            torch.testing.assert_close(value, plain_numbers[3][name], rtol=1e-3, atol=1e-5)


def bfloat16_steps(group: dist.ProcessGroup, rank: int, folder: Path, ep_size: int, *overrides: str) -> list[float]:
    trainer = make(folder, ep_size, "model.dtype=bfloat16", *overrides)
    return [train_step(trainer)[0].loss for _ in range(4)]


@pytest.mark.parametrize("ep_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bfloat16(pool: RankPool, folder: Path, ep_size: int) -> None:
    ours, theirs = (pool.run(bfloat16_steps, folder, ep_size, *how)[0] for how in ((ON,), ()))
    assert ours == pytest.approx(theirs, rel=2e-2)
    assert ours[-1] < ours[0] - 0.05


def save_with(group: dist.ProcessGroup, rank: int, folder: Path) -> None:
    trainer = make(folder, 4, ON, "run.name=saved")
    train_step(trainer)
    save(trainer)


def go_on_without(group: dist.ProcessGroup, rank: int, folder: Path, overrides: tuple[str, ...]) -> tuple[int, float]:
    trainer = make(folder, 2, "run.name=saved", *overrides)
    resume(trainer)
    return trainer.step, train_step(trainer)[0].loss


def test_a_run_with_replicas_goes_on_without_them_and_back(pool: RankPool, folder: Path) -> None:
    pool.run(save_with, folder)
    (step, with_them), *_ = pool.run(go_on_without, folder, (ON,))
    (again, without), *_ = pool.run(go_on_without, folder, ())
    assert step == again == 1
    assert with_them == pytest.approx(without, rel=1e-5)
    assert checkpoint.newest(folder / "saved" / "checkpoints") is not None


def test_the_run_folder_shows_loads_before_and_after(tmp_path: Path) -> None:
    recipe = write(tmp_path)
    job = run(4, [str(recipe), ON, "train.steps=3"], tmp_path)
    assert "replicas: 2 slot(s) a rank beside its 1 expert(s), which" in job.text(0)
    left = tmp_path / "runs" / "small"
    rows = [json.loads(line) for line in (left / "metrics.jsonl").read_text().splitlines()]
    loads = [json.loads(line) for line in (left / "load.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [load["step"] for load in loads] == [1, 2, 3]
    for row, load in zip(rows, loads, strict=True):
        assert all(count > 0 for count in row["replicas"])
        pairs = zip(row["rank_imbalance_after"], row["rank_imbalance_before"], strict=True)
        assert all(after < before for after, before in pairs)
        for experts, before, after in zip(load["experts"], load["ranks_before"], load["ranks_after"], strict=True):
            assert sum(experts) == sum(before) == sum(after) and max(after) < max(before)
    assert (left / "load.png").read_bytes().startswith(b"\x89PNG")

"""Long runs of the program: curves over ranks and dispatchers, kills at random moments."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from recipes.build import build, resume
from recipes.ranks import Ranks
from recipes.recipe import load_recipe
from recipes.train_loop import validate
from tests.ranks.launch import PROGRAM, run, start
from tests.ranks.small_recipe import write

CPU = torch.device("cpu")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TIMES = ("tokens_per_s", "tflops_per_rank", "step_s", "data_s", "peak_mib", "eta_s")
LONG = ["train.steps=50", "checkpoint.every=0", "train.lr=6e-3", "train.warmup_steps=5"]
BIAS = ["moe.router=sigmoid", "moe.bias_update_rate=0.01"]


def rows(folder: Path, name: str) -> list[dict]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The curve of one rank that sees the same global batches."""
    folder = tmp_path_factory.mktemp("curves")
    recipe = write(folder)
    alone = ["parallel.ep_size=1", "train.gradient_accumulation=8", "run.name=alone"]
    run(1, [str(recipe), *LONG, *alone], folder, 300)
    return folder, [row["loss"] for row in rows(folder, "alone")]


@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("dispatcher", ["all2all", "agrs"])
def test_fifty_steps_follow_the_curve_of_one_rank(one_rank, ep_size, dispatcher):
    folder, expected = one_rank
    name = f"{dispatcher}{ep_size}"
    overrides = [f"moe.dispatcher={dispatcher}", f"parallel.ep_size={ep_size}", f"run.name={name}"]
    job = run(4, [str(folder / "small.toml"), *LONG, *overrides], folder, 300)
    found = rows(folder, name)
    assert len(found) == len(expected) == 50
    assert [row["loss"] for row in found] == pytest.approx(expected, abs=1e-3)
    assert expected[0] - expected[-1] > 1
    assert all((row["cross_rank_routes"] > 0) == (ep_size > 1) for row in found)
    assert f"{4 // ep_size} experts a rank" in job.text(0)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    run(4, [str(write(folder)), *BIAS, "train.steps=40", "checkpoint.every=5", "run.name=whole"], folder, 300)
    return rows(folder, "whole")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("moment", ["step", "save"])
def test_killed_at_a_random_moment_the_next_rows_equal_an_unbroken_run(unbroken, tmp_path, moment, seed):
    """Bit for bit on the same ranks, to 1e-5 on another number of ranks."""
    recipe, chance = str(write(tmp_path)), random.Random(seed)
    whole = [recipe, *BIAS, "train.steps=40", "checkpoint.every=5", "run.name=broken"]
    job = start(4, whole, tmp_path)
    job.wait_for(f"step {chance.randrange(6, 19):>2}/40")
    if moment == "save":
        wait_for_a_save(tmp_path / "runs/broken/checkpoints")
    for process in job.processes:
        process.kill()
    for process in job.processes:
        process.join()
    for path in list(tmp_path.iterdir()):
        if path.name in ("runs", "text", "small.toml"):
            copy = tmp_path / "elsewhere" / path.name
            copy.parent.mkdir(exist_ok=True)
            (shutil.copytree if path.is_dir() else shutil.copy)(path, copy)
    resumed = run(4, whole, tmp_path, 300)
    assert "resumes at step" in resumed.text(0)
    assert rows(tmp_path, "broken") == unbroken
    run(2, [*whole, "parallel.ep_size=2", "train.gradient_accumulation=4"], tmp_path / "elsewhere", 300)
    losses = [row["loss"] for row in rows(tmp_path / "elsewhere", "broken")]
    assert losses == pytest.approx([row["loss"] for row in unbroken], abs=1e-5)


def test_the_tiny_recipe_has_one_curve_however_many_micro_batches_interleave(tmp_path):
    """Of four micro-batches a step none, two at a time, or all: one set of experts, one order of text, other sums."""
    fixed = [
        "train.steps=30",
        "train.warmup_steps=5",
        "checkpoint.every=0",
        "metrics.every=1",
        "metrics.valid_every=30",
    ]
    curves = {}
    for num in (1, 2, 4):
        name = f"interleaved{num}"
        given = [*fixed, f"train.intra_layer_micro_batch={num}", f"run.name={name}"]
        run(4, [str(PROGRAM.parent / "tiny.toml"), *given], tmp_path, 600)
        curves[num] = rows(tmp_path, name)
    serial = curves.pop(1)
    assert len(serial) == 30 and serial[0]["loss"] - serial[-1]["loss"] > 1
    for found in curves.values():
        assert found[0] | {"grad_norm": 0} == serial[0] | {"grad_norm": 0}, "the first forward is the same to the bit"
        for key in ("loss", "aux_loss", "z_loss"):
            assert [row[key] for row in found] == pytest.approx([row[key] for row in serial], abs=1e-5)
        assert found[-1]["valid_loss"] == pytest.approx(serial[-1]["valid_loss"], abs=1e-5)


def test_the_tiny_recipe_learns_python_and_its_experts_matter(tmp_path):
    """Below 2.0 nats/byte on held-out files; without its experts the model is much worse."""
    recipe = PROGRAM.parent / "tiny.toml"
    run(4, [str(recipe)], tmp_path, 900)
    last = rows(tmp_path, "tiny")[-1]
    assert last["valid_loss"] < 2.0
    assert last["valid_unigram_entropy"] > 3.0
    trainer = build(load_recipe(recipe, [f"run.dir={tmp_path / 'runs'}", "parallel.ep_size=1"]), Ranks(0, 1, 1, CPU))
    resume(trainer)
    assert validate(trainer) == pytest.approx(last["valid_loss"], abs=1e-4)
    with torch.no_grad():
        for layer in trainer.moe:
            for parameter in layer.experts.parameters():
                parameter.zero_()
    assert validate(trainer) > last["valid_loss"] + 0.1


def wait_for_a_save(folder: Path) -> None:
    """Until a checkpoint is half written, or 20 s."""
    end = time.monotonic() + 20
    while time.monotonic() < end and not list(folder.glob(".partial-step-*")):
        time.sleep(0.001)
    assert time.monotonic() < end, "no save began"

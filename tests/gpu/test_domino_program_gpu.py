"""The pretraining program on two GPUs with interleaved micro-batches: FSDP2, recompute and comm streams together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.launch import PROGRAM
from tests.ranks.small_recipe import write

pytestmark = pytest.mark.gpu(2, apart=True)
LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
STEPS = 6
FIXED = ("parallel.backend=auto", "parallel.ep_size=2", "train.gradient_accumulation=4", f"train.steps={STEPS}")
SHIPPED = PROGRAM.parent / "qwen3_moe_2gpu.toml"


def rows(folder: Path, recipe: Path, *given: str, seed: int | None = None) -> list[dict[str, Any]]:
    """The rows of every step of a run in `folder`; `seed`: of delays of communication."""
    command = [*LAUNCH, str(PROGRAM), str(recipe), "metrics.every=1", "run.name=run", *given]
    environment = os.environ | ({} if seed is None else {"MOE_EP_RACE": str(seed)})
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]


def curve(folder: Path, *given: str, seed: int | None = None) -> torch.Tensor:
    """Loss and gradient norm of every step of a small model, [steps, 2], float64."""
    folder.mkdir()
    found = rows(folder, write(folder), *FIXED, *given, seed=seed)
    return torch.tensor([[row["loss"], row["grad_norm"]] for row in found], dtype=torch.float64)


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return curve(tmp_path_factory.mktemp("serial") / "run")


CASES: dict[str, tuple[int, tuple[str, ...], int | None]] = {
    "2": (2, (), None),
    "4, recomputed from the router on": (4, ("train.recompute=moe",), None),
    "2, agrs": (2, ("moe.dispatcher=agrs",), None),
    "2, direct": (2, ("moe.dispatcher=direct",), None),
    "4, communication late": (4, (), 2),
    "2, recomputed layers, communication late": (2, ("train.recompute=layer",), 3),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_do_not_depend_on_how_many_interleave(serial: torch.Tensor, tmp_path: Path, name: str) -> None:
    num, given, seed = CASES[name]
    found = curve(tmp_path / "run", f"train.intra_layer_micro_batch={num}", *given, seed=seed)
    assert len(found) == len(serial) == STEPS
    torch.testing.assert_close(found[0, 0], serial[0, 0], rtol=1e-6, atol=0)
    torch.testing.assert_close(found, serial, rtol=1e-4, atol=0)
    assert serial[0, 0] - serial[-1, 0] > 0.01, "it learns"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_recipe_for_two_gpus_learns_in_bfloat16_with_two_interleaved(tmp_path: Path) -> None:
    """As it is shipped, for a few steps. The first forward has the same rows in either run, the steps behind it sums
    of bfloat16 gradients in another order."""
    short = ("train.steps=8", "train.warmup_steps=2", "metrics.valid_every=0")
    found = {}
    for num in (1, 2):
        folder = tmp_path / str(num)
        folder.mkdir()
        found[num] = rows(folder, SHIPPED, *short, f"train.intra_layer_micro_batch={num}")
    serial, split = found[1], found[2]
    assert len(serial) == len(split) == 8
    assert split[0]["loss"] == pytest.approx(serial[0]["loss"], rel=1e-3)
    assert [row["loss"] for row in split] == pytest.approx([row["loss"] for row in serial], rel=2e-2)
    assert split[-1]["loss"] < split[0]["loss"] - 0.5
    for row in split:
        assert row["cross_rank_routes"] > 0 and row["tflops_per_rank"] > 0 and row["peak_mib"] > 0
        assert row["host_syncs"] == 12 * 4, "one for each layer and micro-batch"

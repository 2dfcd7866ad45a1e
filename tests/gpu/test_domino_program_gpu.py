"""The pretraining program on two GPUs with interleaved micro-batches: FSDP2, recompute and comm streams together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks.launch import PROGRAM
from tests.ranks.small_recipe import write

pytestmark = pytest.mark.gpu(2, apart=True)
LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
STEPS = 6
FIXED = ("parallel.backend=auto", "parallel.ep_size=2", "train.gradient_accumulation=4", f"train.steps={STEPS}")


def curve(folder: Path, *given: str, seed: int | None = None) -> torch.Tensor:
    """Loss and gradient norm of every step, [steps, 2], float64; `seed`: of delays of communication."""
    folder.mkdir()
    command = [*LAUNCH, str(PROGRAM), str(write(folder)), *FIXED, "metrics.every=1", *given]
    environment = os.environ | ({} if seed is None else {"MOE_EP_RACE": str(seed)})
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / "runs/small/metrics.jsonl").read_text().splitlines()]
    return torch.tensor([[row["loss"], row["grad_norm"]] for row in rows], dtype=torch.float64)


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

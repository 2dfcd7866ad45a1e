"""Field reports tried on the pretraining program: its trainer on 4 ranks, and its launch. See docs/field_reports.md."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ep import CheckpointError
from moe_ep.testing.ranks import RankPool
from recipes import checkpoint
from recipes.build import build
from recipes.identity import identity
from recipes.ranks import Ranks, over_process_group
from recipes.recipe import load_recipe
from recipes.train_loop import Trainer, save, train_step
from tests.ranks.launch import PROGRAM
from tests.ranks.small_recipe import write

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=60) as ranks:
        yield ranks


def drifted_save(group: dist.ProcessGroup, rank: int, folder: Path) -> tuple[str, bool]:
    overrides = ["moe.router=sigmoid", "moe.bias_update_rate=0.1", f"data.path={folder / 'text'}", f"run.dir={folder}"]
    trainer = build(load_recipe(folder / "small.toml", [*overrides, "parallel.ep_size=2"]), over_process_group(2, CPU))
    train_step(trainer)
    save(trainer)
    train_step(trainer)
    if rank == 2:
        trainer.moe[1].router.bias[3] += 2**-20
    try:
        save(trainer)
    except CheckpointError as err:
        dist.barrier(group=group)
        return str(err), (folder / "small" / "checkpoints" / "step-00000002").exists()
    return "", True


def test_a_selection_bias_that_drifted_is_not_saved(pool: RankPool, tmp_path: Path) -> None:
    """pytorch/torchtitan#2387: only one copy would reach the checkpoint, and nobody would ever know."""
    write(tmp_path)
    for message, exists in pool.run(drifted_save, tmp_path):
        assert message.startswith(
            "step 2 is not saved: copies differ from rank 0's: layers.1.moe.router.bias on rank 2; resume"
        )
        assert not exists


def trainer_of(folder: Path, experts: int, ep_size: int, world: int) -> Trainer:
    sizes = [f"model.num_experts={experts}", "model.top_k=2", f"train.gradient_accumulation={4 // world}"]
    paths = [f"data.path={folder / 'text'}", f"run.dir={folder}", f"parallel.ep_size={ep_size}"]
    ranks = over_process_group(ep_size, CPU) if world > 1 else Ranks(0, 1, 1, CPU)
    return build(load_recipe(folder / "small.toml", [*paths, *sizes]), ranks)


def step_and_save(group: dist.ProcessGroup, rank: int, folder: Path, experts: int) -> tuple[int, float]:
    trainer = trainer_of(folder, experts, 2, 4)
    train_step(trainer)
    save(trainer)
    rows = trainer.optimizer.masters[[p.name.endswith("w_down") for p in trainer.optimizer.params].index(True)].shape[0]
    return rows, train_step(trainer)[0].loss


def read_and_step(group: Any, rank: int, folder: Path, experts: int, ep_size: int, world: int = 4) -> float:
    trainer = trainer_of(folder, experts, ep_size, world)
    path = folder / "small" / "checkpoints" / "step-00000001"
    parts = (trainer.model, trainer.optimizer, trainer.entries, trainer.ranks)
    trainer.step = checkpoint.restore(path, identity(trainer.recipe, trainer.corpus), *parts).step
    return train_step(trainer)[0].loss


@pytest.mark.parametrize(("experts", "shards"), [(2, [1, 1, 0, 0]), (6, [2, 2, 1, 1])])
def test_experts_that_do_not_divide_over_the_ranks_that_share_them(
    pool: RankPool, tmp_path: Path, experts: int, shards: list[int]
) -> None:
    """KempnerInstitute/KempnerForge#202: 1 and 3 experts of an expert-parallel rank, sharded over 2 data-parallel ones:
    an empty shard and uneven ones are saved and found again, on any number of ranks."""
    write(tmp_path)
    saved = pool.run(step_and_save, tmp_path, experts)
    assert [rows for rows, _ in saved] == shards
    losses = [loss for _, loss in saved]
    assert pool.run(read_and_step, tmp_path, experts, 2) == losses
    for loss in (*pool.run(read_and_step, tmp_path, experts, 1), read_and_step(None, 0, tmp_path, experts, 1, 1)):
        assert loss == pytest.approx(losses[0], abs=1e-5)


class Recorder(TorchDispatchMode):
    """Notes every collective in the order of issue; a rank with a delay sleeps before some of them."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.log: list[str] = []
        self.delay_s = delay_s

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            if len(self.log) % 5 == 3:
                time.sleep(self.delay_s)
            self.log.append(str(func))
        return func(*args, **(kwargs or {}))


def recorded_steps(
    group: dist.ProcessGroup, rank: int, folder: Path, dispatcher: str, mode: str, together: int
) -> list[str]:
    overrides = [f"moe.dispatcher={dispatcher}", f"train.recompute={mode}", "parallel.ep_size=2"]
    overrides += [f"train.intra_layer_micro_batch={together}"]
    paths = [f"data.path={folder / 'text'}", f"run.dir={folder}"]
    trainer = build(load_recipe(folder / "small.toml", [*paths, *overrides]), over_process_group(2, CPU))
    with Recorder(0.02 if rank == 1 else 0.0) as recorder:
        for _ in range(2):
            train_step(trainer)
    return recorder.log


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize(("dispatcher", "mode"), [("all2all", "none"), ("agrs", "layer")])
def test_collectives_are_issued_in_one_order_whoever_is_late(
    pool: RankPool, tmp_path: Path, dispatcher: str, mode: str, together: int
) -> None:
    """deepseek-ai/DeepEP#496, meta-pytorch/torchrec#4149, PrimeIntellect-ai/prime-rl#3195: gradients are reduced over
    one group while tokens travel over another, with micro-batches interleaved or not, and rank 1 is late each time."""
    write(tmp_path)
    logs = pool.run(recorded_steps, tmp_path, dispatcher, mode, together, timeout_s=40)
    assert all(log == logs[0] for log in logs)
    assert {"c10d._reduce_scatter_base_.default", "c10d.alltoall_base_.default"} <= set(logs[0])


ONE = ["parallel.ep_size=1", "train.steps=1", "train.warmup_steps=0", "checkpoint.every=0"]
LAUNCHES: dict[str, tuple[int, list[str], int, str]] = {
    "plain python": (0, ONE, 0, "1 rank(s) on cpu"),
    "torchrun, one rank": (1, ONE, 0, "1 rank(s) on cpu"),
    "torchrun, too few ranks": (2, ["parallel.ep_size=4"], 2, "ep_size = 4 does not divide the 2 rank(s) of this job"),
    "torchrun, three ranks": (3, ["parallel.ep_size=2"], 2, "ep_size = 2 does not divide the 3 rank(s) of this job"),
    "torchrun, a fault": (2, ["parallel.ep_size=2", "train.lr=1e30", "train.warmup_steps=0"], 1, "finite"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", LAUNCHES)
def test_launching(tmp_path: Path, how: str) -> None:
    """facebookresearch/FAMBench#103, pytorch/gloo#209: no launcher, one rank, the wrong number; Tencent-Hunyuan/UniRL
    #226: what goes wrong on the ranks ends the launcher with a code that is not 0."""
    ranks, overrides, code, said = LAUNCHES[how]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, str(PROGRAM), str(write(tmp_path)), *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    output = done.stdout + done.stderr
    assert (done.returncode != 0) == (code != 0), output
    assert said in output
    assert code != 2 or output.count(said) == 1, output
    assert 'program.py", line' not in output, "a trace of ours in place of a sentence"

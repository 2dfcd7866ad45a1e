"""Training with `train.intra_layer_micro_batch` = M against M = 1: same losses, gradients, loads."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep.testing.ranks import RankPool
from recipes import model
from recipes.build import build
from recipes.ranks import over_process_group
from recipes.recipe import load_recipe
from recipes.train_loop import train_step, validate
from tests.ranks.small_recipe import write

STEPS = 3
FIGURES = ("loss", "aux_loss", "z_loss", "grad_norm")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=120) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("domino")
    write(folder)
    return folder


def train(
    group: dist.ProcessGroup, rank: int, folder: Path, overrides: tuple[str, ...]
) -> tuple[list[list[float]], list[torch.Tensor], float]:
    """Figures of each step, loads of each step, loss on held-out text at the end."""
    fixed = [f"data.path={folder / 'text'}", f"run.dir={folder}"]
    recipe = load_recipe(folder / "small.toml", [*fixed, *overrides])
    trainer = build(recipe, over_process_group(recipe.parallel.ep_size, torch.device("cpu")))
    with mock.patch.object(model, "launch", wraps=model.launch) as launches:
        steps = [train_step(trainer) for _ in range(STEPS)]
    groups = [len(call.args[1]) for call in launches.call_args_list]
    t = recipe.train
    assert groups == [t.intra_layer_micro_batch] * (STEPS * t.gradient_accumulation // t.intra_layer_micro_batch)
    return [[getattr(row, name) for name in FIGURES] for row, _ in steps], [s.load for _, s in steps], validate(trainer)


@pytest.fixture(scope="module")
def serial(pool: RankPool, folder: Path):
    """What M = 1 gives for these overrides, on rank 0."""
    return functools.cache(lambda *overrides: pool.run(train, folder, overrides)[0])


EXACT = [
    ("parallel.ep_size=4",),
    ("parallel.ep_size=4", "moe.dispatcher=agrs"),
    ("parallel.ep_size=4", "model.first_dense_layers=1", "model.intermediate_size=16", "model.num_layers=3"),
    ("parallel.ep_size=4", "moe.router=sigmoid", "moe.bias_update_rate=0.01"),
]


@pytest.mark.parametrize("overrides", EXACT)
def test_two_of_two_micro_batches_train_bit_for_bit_alike(pool, folder, serial, overrides):
    """Two terms have one sum, whatever their order."""
    want = serial(*overrides)
    for got in pool.run(train, folder, (*overrides, "train.intra_layer_micro_batch=2")):
        assert got[0] == want[0]
        assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))
        assert got[2] == want[2]
    assert want[0][0] != want[0][1], "a step changes something"


@pytest.mark.parametrize("mode", ["moe", "layer"])
def test_recompute_of_interleaved_micro_batches(pool, folder, serial, mode):
    want = serial("parallel.ep_size=4")
    got = pool.run(train, folder, ("parallel.ep_size=4", "train.intra_layer_micro_batch=2", f"train.recompute={mode}"))[
        0
    ]
    assert got[0] == want[0]
    assert got[2] == want[2]


NEAR = [(2, 4, 4), (4, 4, 4), (4, 4, 2), (1, 2, 2)]


@pytest.mark.parametrize(("ep_size", "accumulation", "num"), NEAR)
def test_losses_and_gradients_up_to_the_order_of_sums(pool, folder, serial, ep_size, accumulation, num):
    """Three and more terms, and those of experts sharded over data-parallel ranks, add up in another order."""
    fixed = (f"parallel.ep_size={ep_size}", f"train.gradient_accumulation={accumulation}")
    want = serial(*fixed)
    got = pool.run(train, folder, (*fixed, f"train.intra_layer_micro_batch={num}"))[0]
    assert got[0][0][:3] == want[0][0][:3], "the first forward knows nothing of the order"
    for ours, theirs in zip(got[0], want[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert torch.equal(got[1][0], want[1][0])
    assert got[2] == pytest.approx(want[2], rel=1e-5)

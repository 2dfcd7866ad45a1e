"""What a run must share with the checkpoint that it takes up, and what may change in between. One rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_ep.errors import CheckpointError
from recipes.build import build, resume
from recipes.corpus import load_corpus
from recipes.ranks import Ranks
from recipes.recipe import load_recipe
from recipes.train_loop import Trainer, save, train_step
from tests.ranks.small_recipe import write

CPU = torch.device("cpu")


def make(folder: Path, *overrides: str) -> Trainer:
    paths = [f"data.path={folder / 'text'}", f"run.dir={folder}", "parallel.ep_size=1"]
    return build(load_recipe(folder / "small.toml", [*paths, *overrides]), Ranks(0, 1, 1, CPU))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint of step 1, and one called `fresh` with a checkpoint of step 0, as an import leaves it."""
    folder = tmp_path_factory.mktemp("identity")
    write(folder)
    (folder / "other").mkdir()
    for name in ("a", "b"):
        (folder / "other" / name).write_text(f"another text, {name} " * 40)
    save(make(folder, "run.name=fresh"))
    trainer = make(folder)
    train_step(trainer)
    save(trainer)
    return folder


WEIGHTS = {
    "model.rope_theta=2e4": "model.rope_theta is 10000.0 there and 20000.0 in this run",
    "moe.router=sigmoid": "moe.router is 'softmax' there and 'sigmoid' in this run",
    "moe.normalize_weights=false": "moe.normalize_weights is True there and False in this run",
    "moe.routed_scale=2.5": "moe.routed_scale is 1.0 there and 2.5 in this run",
    "moe.force_balance=true": "moe.force_balance is False there and True in this run",
}
DATA = {
    "train.seed=4": "train.seed is 3 there and 4 in this run",
    "train.sequence_length=8": "train.sequence_length is 16 there and 8 in this run",
    "data.valid_fraction=0.4": "data.valid_fraction is 0.2 there and 0.4 in this run",
    "data.path={folder}/other": "SHA-256 of the text of data.path is '{before}' there and '{after}' in this run",
}
MAY_CHANGE = [
    *("train.lr=1e-3", "train.steps=60", "train.weight_decay=0.0", "train.recompute=layer", "train.clip_norm=2.0"),
    *("moe.dispatcher=agrs", "moe.experts=loop", "moe.weighting=activation", "moe.aux_loss_coef=0.0"),
    *("metrics.every=3", "checkpoint.every=5", "train.timeout_s=9.0", "train.deterministic=false"),
]


def filled(text: str, folder: Path) -> str:
    before, after = (load_corpus(str(folder / name), 0.2).info.sha256 for name in ("text", "other"))
    return text.format(folder=folder, before=before, after=after)


@pytest.mark.parametrize("override", {**WEIGHTS, **DATA})
def test_another_meaning_of_the_weights_or_other_data_are_refused_with_both_values(folder: Path, override: str) -> None:
    trainer = make(folder, filled(override, folder))
    before = [master.clone() for master in trainer.optimizer.masters]
    with pytest.raises(CheckpointError) as caught:
        resume(trainer)
    message = str(caught.value)
    assert filled({**WEIGHTS, **DATA}[override], folder) in message
    assert "step-00000001 is of another run: " in message
    assert message.endswith("; keep the old value, or start afresh with checkpoint.resume=never")
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.optimizer.masters, strict=True))


def test_every_difference_is_named(folder: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        resume(make(folder, "train.seed=4", "moe.routed_scale=2.5"))
    assert WEIGHTS["moe.routed_scale=2.5"] in str(caught.value) and DATA["train.seed=4"] in str(caught.value)


@pytest.mark.parametrize("override", MAY_CHANGE)
def test_what_neither_depends_on_may_change(folder: Path, override: str) -> None:
    assert resume(make(folder, override)).startswith("resumes at step 1 from")


def test_another_size_of_the_global_batch_is_said(folder: Path) -> None:
    said = resume(make(folder, "train.gradient_accumulation=4"))
    assert said.endswith("(a step has 4 sequences, not 2 as before: other text follows)")


@pytest.mark.parametrize("override", DATA)
def test_weights_that_saw_no_data_go_with_any_and_so_does_a_run_that_trains_no_more(
    folder: Path, override: str
) -> None:
    assert resume(make(folder, "run.name=fresh", filled(override, folder))).startswith("resumes at step 0 from")
    assert resume(make(folder, filled(override, folder)), train=False).startswith("resumes at step 1 from")


@pytest.mark.parametrize(("name", "train"), [("fresh", True), ("small", False)])
def test_what_the_weights_mean_counts_there_too(folder: Path, name: str, train: bool) -> None:
    with pytest.raises(CheckpointError, match=r"routed_scale is 1\.0 there and 2\.5"):
        resume(make(folder, f"run.name={name}", "moe.routed_scale=2.5"), train=train)


def test_the_layers_of_a_dense_model_have_no_router(folder: Path) -> None:
    dense = ["run.name=dense", "model.first_dense_layers=2", "model.intermediate_size=8"]
    save(make(folder, *dense))
    assert resume(make(folder, *dense, "moe.routed_scale=2.5")).startswith("resumes at step 0 from")

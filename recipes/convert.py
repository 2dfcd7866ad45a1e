"""Carry a run to and from the folder layout of `transformers` (config.json and safetensors, Qwen3MoeForCausalLM).

    [torchrun ...] recipes/convert.py import RECIPE.toml FOLDER [section.key=value ...]
    [torchrun ...] recipes/convert.py export RECIPE.toml FOLDER [section.key=value ...]

`import` writes FOLDER's weights as step 0 of the recipe's run, from which `recipes/pretrain.py RECIPE.toml` goes on.
`export` writes the run's newest checkpoint (or the one that `checkpoint.resume` names) into FOLDER.
Exit codes are those of pretrain.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # runs from a clone, installed or not
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from moe_ep.errors import CheckpointError
from moe_ep.schema import nearest, require
from recipes import checkpoint, one_rank
from recipes.build import build, resume
from recipes.hf import check_exportable, export_hf, import_hf
from recipes.one_rank import leave
from recipes.ranks import Ranks, mark_agreed
from recipes.recipe import Recipe, load_recipe
from recipes.session import Session
from recipes.train_loop import save

_COMMANDS = ("import", "export")
USAGE = "usage: [torchrun ...] recipes/convert.py import|export RECIPE.toml FOLDER [section.key=value ...]"


def main(arguments: Sequence[str]) -> int:
    """Run one rank; returns its exit code."""
    return one_rank.run(arguments, USAGE, read)


def read(arguments: Sequence[str]) -> one_rank.Task | None:
    """What to do.

    Raises:
        RecipeError: the command, the recipe, or a model that the folder's layout does not hold.
    """
    if not arguments or arguments[0].startswith("-"):
        return None
    require(arguments[0] in _COMMANDS, f"command {arguments[0]!r} is unknown; {nearest(arguments[0], _COMMANDS)}")
    if len(arguments) < 3 or not arguments[2]:
        return None
    recipe = load_recipe(arguments[1], arguments[3:])
    check_exportable(recipe.moe_config())
    work = functools.partial(convert, recipe, arguments[0] == "import", Path(arguments[2]))
    return one_rank.Task(recipe, work, recipe.flat())


def convert(recipe: Recipe, importing: bool, folder: Path, ranks: Ranks) -> None:
    """Either way, in the run's own folder."""
    session = Session(recipe, ranks)
    with session.lock:
        if importing:
            session.hold_folder()
        session.say((import_run if importing else export_run)(recipe, ranks, folder))
        session.close()


def import_run(recipe: Recipe, ranks: Ranks, folder: Path) -> str:
    """Weights of `folder` as step 0 of the run; a collective that returns a sentence for the log.

    Raises:
        CheckpointError: on every rank; weights that do not fit, or a run that has checkpoints already.
    """
    checkpoints = recipe.folder / "checkpoints"
    ranks.together(lambda: _refuse_old(checkpoints))
    trainer = build(recipe, ranks)
    ranks.together(lambda: import_hf(trainer.model, folder))
    with torch.no_grad():
        for master, shard in zip(trainer.optimizer.masters, trainer.optimizer.shards, strict=True):
            master.copy_(shard)
    save(trainer)
    return f"imported {folder} as step 0 of {recipe.folder}; recipes/pretrain.py goes on from there"


def _refuse_old(checkpoints: Path) -> None:
    old = checkpoint.newest(checkpoints)
    if old is not None:
        raise CheckpointError(f"import would hide {old}; choose another run.name or remove the run's checkpoints")


def export_run(recipe: Recipe, ranks: Ranks, folder: Path) -> str:
    """The run's checkpoint as a folder of transformers; a collective that returns a sentence for the log.

    Raises:
        CheckpointError: on every rank; no checkpoint, or a folder that cannot be written.
    """
    trainer = build(recipe, ranks)
    how = resume(trainer, train=False)
    if trainer.saved_step < 0 and trainer.step == 0:
        raise mark_agreed(CheckpointError(f"{recipe.folder} has no checkpoint to export; train it first"))
    positions = recipe.train.sequence_length
    writer = ranks.rank < ranks.ep_size  # the other ranks hold copies of these ranks' experts
    ranks.together(lambda: export_hf(trainer.model, folder, max_positions=positions, writer=writer))
    return f"{how}; exported to {folder}"


if __name__ == "__main__":
    leave(main(sys.argv[1:]))

"""The program behind `recipes/pretrain.py`: from arguments to an exit code."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from recipes import one_rank
from recipes.ranks import Ranks
from recipes.recipe import Recipe, load_recipe
from recipes.session import Session

USAGE = "usage: [torchrun ...] recipes/pretrain.py RECIPE.toml [section.key=value ...]"


def main(arguments: Sequence[str]) -> int:
    """Run one rank; returns its exit code."""
    return one_rank.run(arguments, USAGE, read)


def read(arguments: Sequence[str]) -> one_rank.Task | None:
    """What to do.

    Raises:
        RecipeError: the recipe.
    """
    if not arguments or arguments[0].startswith("-"):
        return None
    recipe = load_recipe(arguments[0], arguments[1:])
    return one_rank.Task(recipe, functools.partial(train, recipe), recipe.flat())


def train(recipe: Recipe, ranks: Ranks) -> None:
    """From the first step, or the newest checkpoint, to the last step."""
    session = Session(recipe, ranks)
    with session.lock:
        session.run()
        session.close()

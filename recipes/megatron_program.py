"""The program behind `recipes/megatron_pretrain.py`: from arguments to an exit code."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from moe_ep.integrations.megatron_limits import megatron_version
from recipes import one_rank
from recipes.megatron_recipe import MegatronRecipe, load
from recipes.ranks import Ranks

USAGE = "usage: [torchrun ...] recipes/megatron_pretrain.py RECIPE.toml [section.key=value ...]"


def main(arguments: Sequence[str]) -> int:
    """Run one rank; returns its exit code."""
    return one_rank.run(arguments, USAGE, read)


def read(arguments: Sequence[str]) -> one_rank.Task | None:
    """What to do.

    Raises:
        RecipeError: the recipe.
        Unavailable: Megatron-Core is missing.
    """
    if not arguments or arguments[0].startswith("-"):
        return None
    loaded = load(arguments[0], arguments[1:])
    megatron_version()
    return one_rank.Task(loaded.recipe, functools.partial(train, loaded), loaded.flat())


def train(loaded: MegatronRecipe, ranks: Ranks) -> None:
    """From the first step to the last, in Megatron's process groups.

    Raises:
        Unavailable: there is no GPU.
    """
    from recipes import megatron_groups  # imports Megatron-Core, which the recipe's checks do without

    megatron_groups.check_device(ranks.device)
    megatron_groups.open_groups(ranks)
    from recipes import megatron_session

    megatron_session.run(loaded, ranks)
    megatron_groups.close()

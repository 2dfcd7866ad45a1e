"""The program behind `recipes/megatron_pretrain.py`: from arguments to an exit code."""

from __future__ import annotations

import torch.distributed as dist

from moe_ep.errors import RecipeError
from moe_ep.integrations.megatron_limits import megatron_version
from recipes.lost_peer import absent
from recipes.megatron_recipe import MegatronRecipe, load
from recipes.ranks import ALONE, Launch, Ranks, start
from recipes.recipe import check_world
from recipes.report import REFUSED, report, say_once

USAGE = "usage: [torchrun ...] recipes/megatron_pretrain.py RECIPE.toml [section.key=value ...]"


def main(arguments: list[str]) -> int:
    """Run one rank; returns its exit code."""
    try:
        launch = Launch.from_env()
    except RecipeError as err:
        return report(err, ALONE)
    if not arguments or arguments[0].startswith("-"):
        say_once(launch, USAGE)
        return REFUSED
    try:
        loaded = load(arguments[0], arguments[1:])
        ranks = join(loaded, launch)
        from recipes import megatron_groups, megatron_session  # import Megatron-Core

        megatron_session.run(loaded, ranks)
        megatron_groups.close()
    except Exception as err:  # every rank ends with a message and a code, whatever happens
        return report(err, launch)
    return 0


def join(loaded: MegatronRecipe, launch: Launch) -> Ranks:
    """Start this rank's part of the job, and Megatron's process groups.

    Raises:
        RecipeError: on every rank; a recipe that these ranks cannot run.
        Unavailable: Megatron-Core is missing, or there is no GPU.
        PeerError: not all ranks came in time.
    """
    megatron_version()
    from recipes import megatron_groups  # imports Megatron-Core, which the recipe's checks do without

    recipe = loaded.recipe
    check_world(recipe, launch.world_size)
    try:
        ranks = start(
            recipe.parallel.backend, recipe.parallel.ep_size, recipe.train.timeout_s, loaded.flat(), recipe.source
        )
    except (dist.DistStoreError, dist.DistNetworkError) as err:
        raise absent(err, launch, recipe.train.timeout_s) from err
    megatron_groups.check_device(ranks.device)
    megatron_groups.open_groups(ranks)
    return ranks

"""The program behind `recipes/pretrain.py`: arguments to exit code, and what a failure looks like."""

from __future__ import annotations

import sys
import traceback

from moe_ep.errors import MoEError, PeerError, RecipeError, Unavailable
from recipes.corpus import CorpusError
from recipes.lost_peer import is_lost_peer, watch_peers
from recipes.ranks import Launch, Ranks, start
from recipes.recipe import Recipe, check_world, load_recipe
from recipes.session import Session

USAGE = "usage: [torchrun ...] recipes/pretrain.py RECIPE.toml [section.key=value ...]"
FAILED, REFUSED, PEER_LOST = 1, 2, 3


def main(arguments: list[str]) -> int:
    """Run one rank; returns its exit code."""
    launch = Launch.from_env()
    if not arguments or arguments[0].startswith("-"):
        say(launch.rank, USAGE)
        return REFUSED
    try:
        recipe = load_recipe(arguments[0], arguments[1:])
        ranks = join(recipe, launch)
    except RecipeError as err:  # the same on every rank: only one says so
        say(launch.rank, f"refused: {err}")
        return REFUSED
    except Exception as err:
        return report(err, launch.rank)
    watch_peers(ranks, recipe.train.timeout_s, PEER_LOST)
    session = Session(recipe, ranks)
    try:
        session.run()
    except Exception as err:  # every rank ends with a message and a code, whatever it was
        return report(err, ranks.rank)
    session.close()
    return 0


def join(recipe: Recipe, launch: Launch) -> Ranks:
    """Start this rank's part of the job.

    Raises:
        RecipeError: on every rank; a recipe that these ranks cannot run, or ranks with different recipes.
    """
    check_world(recipe, launch.world_size)
    parallel, timeout_s = recipe.parallel, recipe.train.timeout_s
    return start(parallel.backend, parallel.ep_size, timeout_s, recipe.flat(), recipe.source)


def report(err: Exception, rank: int) -> int:
    """Print what went wrong, once where all ranks know it, and return the exit code."""
    once = rank if getattr(err, "agreed", False) else 0
    if isinstance(err, RecipeError | Unavailable | CorpusError):
        say(once, f"refused: {err}")
        return REFUSED
    if isinstance(err, PeerError) or is_lost_peer(err):
        say(once, f"rank {rank}: another rank failed or was lost, so this one stops: {err}")
        return PEER_LOST
    if isinstance(err, MoEError):
        who = "failed" if getattr(err, "agreed", False) else f"rank {rank} failed"
        say(once, f"{who}: {type(err).__name__}: {err}")
    else:
        traceback.print_exception(err)
    return FAILED


def say(rank: int, text: str) -> None:
    """Print to stderr on rank 0."""
    if rank == 0:
        print(text, file=sys.stderr, flush=True)

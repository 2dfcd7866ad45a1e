"""The program behind `recipes/pretrain.py`: from arguments to an exit code."""

from __future__ import annotations

import torch.distributed as dist

from moe_ep.errors import RecipeError
from moe_ep.peers import is_lost_peer
from recipes.lost_peer import Heartbeat, absent, watch_peers
from recipes.ranks import ALONE, Launch, Ranks, start
from recipes.recipe import Recipe, check_world, load_recipe
from recipes.report import PEER_LOST, REFUSED, report, say_once
from recipes.session import Session

USAGE = "usage: [torchrun ...] recipes/pretrain.py RECIPE.toml [section.key=value ...]"


def main(arguments: list[str]) -> int:
    """Run one rank; returns its exit code."""
    try:
        launch = Launch.from_env()
    except RecipeError as err:
        return report(err, ALONE)
    if not arguments or arguments[0].startswith("-"):
        say_once(launch, USAGE)
        return REFUSED
    heartbeat = None
    try:  # every rank ends with a message and a code, whatever happens
        recipe = load_recipe(arguments[0], arguments[1:])
        ranks = join(recipe, launch)
        heartbeat = watch_peers(ranks, recipe.train.timeout_s, PEER_LOST)
        session = Session(recipe, ranks)
        with session.lock:
            session.run()
            session.close()
    except Exception as err:
        return _end(err, launch, heartbeat)
    return 0


def _end(err: Exception, launch: Launch, heartbeat: Heartbeat | None) -> int:
    """Last words; the others hear them too, unless they have the same."""
    if heartbeat is None:
        return report(err, launch)
    lost = is_lost_peer(err)
    code = report(heartbeat.explain(err) if lost else err, launch)
    if not lost and not getattr(err, "agreed", False):
        heartbeat.tell(err)
    return code


def join(recipe: Recipe, launch: Launch) -> Ranks:
    """Start this rank's part of the job.

    Raises:
        RecipeError: on every rank; a recipe that these ranks cannot run, or ranks with different recipes.
        PeerError: not all ranks came in time.
        Unavailable: the launcher's port is taken.
    """
    check_world(recipe, launch.world_size)
    parallel, timeout_s = recipe.parallel, recipe.train.timeout_s
    try:
        return start(parallel.backend, parallel.ep_size, timeout_s, recipe.flat(), recipe.source)
    except (dist.DistStoreError, dist.DistNetworkError) as err:
        raise absent(err, launch, timeout_s) from err

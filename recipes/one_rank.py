"""What each program of `recipes/` does on a rank around its work: arguments, ranks that meet, last words, exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist

from moe_ep.errors import RecipeError
from moe_ep.peers import is_lost_peer
from recipes.lost_peer import Heartbeat, absent, watch_peers
from recipes.ranks import ALONE, Launch, Ranks, start
from recipes.recipe import Recipe, check_world
from recipes.report import PEER_LOST, REFUSED, report, say_once


@dataclass(frozen=True, slots=True)
class Task:
    """What the arguments ask for.

    Attributes:
        recipe: says which ranks, and how long they wait for each other.
        work: done by all ranks; they have met.
        facts: `section.key` -> value, which must be equal on all ranks.
    """

    recipe: Recipe
    work: Callable[[Ranks], None]
    facts: dict[str, Any]


def run(arguments: Sequence[str], usage: str, read: Callable[[Sequence[str]], Task | None]) -> int:
    """Run one rank; returns its exit code. `read` gives None for arguments that it does not understand."""
    try:
        launch = Launch.from_env()
    except RecipeError as err:
        return report(err, ALONE)
    heartbeat = None
    try:  # every rank ends with a message and a code, whatever happens
        task = read(arguments)
        if task is None:
            say_once(launch, usage)
            return REFUSED
        ranks = _join(task, launch)
        heartbeat = watch_peers(ranks, task.recipe.train.timeout_s, PEER_LOST)
        task.work(ranks)
    except Exception as err:
        return _end(err, launch, heartbeat)
    return 0


def leave(code: int) -> NoReturn:
    """End the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code != 0:
        os._exit(code)  # a process group with a lost peer may wait for ever in its destructor
    sys.exit(0)


def _end(err: Exception, launch: Launch, heartbeat: Heartbeat | None) -> int:
    """Last words; the others hear them too, unless they have the same."""
    if heartbeat is None:
        return report(err, launch)
    lost = is_lost_peer(err)
    code = report(heartbeat.explain(err) if lost else err, launch)
    if not lost and not getattr(err, "agreed", False):
        heartbeat.tell(err)
    return code


def _join(task: Task, launch: Launch) -> Ranks:
    """Start this rank's part of the job.

    Raises:
        RecipeError: on every rank; a recipe that these ranks cannot run, or ranks with different recipes.
        PeerError: not all ranks came in time.
        Unavailable: the launcher's port is taken.
    """
    recipe = task.recipe
    check_world(recipe, launch.world_size)
    parallel, timeout_s = recipe.parallel, recipe.train.timeout_s
    try:
        return start(parallel.backend, parallel.ep_size, timeout_s, task.facts, recipe.source)
    except (dist.DistStoreError, dist.DistNetworkError) as err:
        raise absent(err, launch, timeout_s) from err

"""What a failure looks like: one message for each thing that went wrong, where it can be seen, and an exit code."""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from moe_ep.errors import MoEError, PeerError, RecipeError, Unavailable, lost_peer
from recipes.corpus import CorpusError
from recipes.lost_peer import is_lost_peer
from recipes.ranks import Launch

FAILED, REFUSED, PEER_LOST = 1, 2, 3
_STORE_S = 10  # how long to wait for the launcher's store before saying it anyway


def report(err: Exception, launch: Launch) -> int:
    """Print what went wrong and return the exit code.

    An error that all ranks raise (`agreed`) is printed by the first rank of each node; any other where it happened.
    """
    agreed = getattr(err, "agreed", False)
    if isinstance(err, RecipeError | Unavailable | CorpusError):
        if agreed:
            say_on_each_node(launch, f"refused: {err}")
        else:
            say_once(launch, f"refused: {err}")
        return REFUSED
    if is_lost_peer(err) and not isinstance(err, PeerError):
        err = lost_peer(f"rank {launch.rank}", err)
    if isinstance(err, PeerError):
        text = f"rank {launch.rank}: another rank failed or was lost, so this one stops: {err}"
        say_on_each_node(launch, text) if agreed else say(text)
        return PEER_LOST
    if isinstance(err, MoEError):
        if agreed:
            say_on_each_node(launch, f"failed: {type(err).__name__}: {err}")
        else:
            say(f"rank {launch.rank} failed: {type(err).__name__}: {err}")
    else:
        traceback.print_exception(err)
    return FAILED


def say(text: str) -> None:
    """Print to stderr, in one write: several ranks share it."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def say_on_each_node(launch: Launch, text: str) -> None:
    """Print what all ranks know on the first rank of each node."""
    if launch.local_rank == 0:
        say(text)


def say_once(launch: Launch, text: str) -> None:
    """Print what this rank found out alone, before or without asking the others.

    Mostly all ranks of a node find the same. Under torchrun, whose store outlives the ranks, the first one to say a
    text says it for its node; without that store each rank speaks for itself.
    """
    if launch.world_size == 1 or _first_to_say(text):
        say(text)


def _first_to_say(text: str) -> bool:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    place = "/".join(os.environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "GROUP_RANK"))
    key = f"said/{place}/{hashlib.sha256(text.encode()).hexdigest()}"
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_STORE_S))
        return store.add(key, 1) == 1
    except (KeyError, ValueError, RuntimeError):
        return True  # twice is better than never

"""What a failure looks like: one message for each thing that went wrong, where it can be seen, and an exit code."""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from moe_ep.errors import MoEError, PeerError, RecipeError, Unavailable, lost_peer
from moe_ep.peers import is_lost_peer
from recipes.corpus import CorpusError
from recipes.ranks import Launch

FAILED, REFUSED, PEER_LOST = 1, 2, 3
_STORE_S = 10  # how long to wait for the launcher's store before saying it anyway


def report(err: Exception, launch: Launch) -> int:
    """Print what went wrong and return the exit code.

    What all ranks raise (`agreed`) is printed once a node, and so is a refusal, which most ranks find alike. Any other
    error is printed where it happened.
    """
    agreed = getattr(err, "agreed", False)
    if isinstance(err, RecipeError | Unavailable | CorpusError):
        (say_agreed if agreed else say_once)(launch, f"refused: {err}")
        return REFUSED
    if is_lost_peer(err) and not isinstance(err, PeerError):
        err = lost_peer("at a collective", err)
    if isinstance(err, PeerError):
        if agreed:
            say_agreed(launch, f"all ranks stop: {err}")
        else:
            say(f"rank {launch.rank}: another rank failed or was lost, so this one stops: {err}")
        return PEER_LOST
    if isinstance(err, MoEError):
        if agreed:
            say_agreed(launch, f"failed: {type(err).__name__}: {err}")
        else:
            say(f"rank {launch.rank} failed: {type(err).__name__}: {err}")
    else:
        traceback.print_exception(err)
    return FAILED


def say(text: str) -> None:
    """Print to stderr, in one write: several ranks share it."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def say_agreed(launch: Launch, text: str) -> None:
    """Print what all ranks of a node are about to print: the first to come, since torchrun then ends the others."""
    if _launcher_has_a_store():
        say_once(launch, text)
    elif launch.local_rank == 0:
        say(text)


def say_once(launch: Launch, text: str) -> None:
    """Print what the other ranks of the node mostly find too.

    Under torchrun, whose store outlives the ranks, the first one to say a
    text says it for its node; without that store each rank speaks for itself.
    """
    if launch.world_size == 1 or _first_to_say(text):
        say(text)


def _launcher_has_a_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _first_to_say(text: str) -> bool:
    if not _launcher_has_a_store():
        return True
    place = "/".join(os.environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "GROUP_RANK"))
    key = f"said/{place}/{hashlib.sha256(text.encode()).hexdigest()}"
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_STORE_S))
        return store.add(key, 1) == 1
    except (KeyError, ValueError, RuntimeError):
        return True  # twice is better than never

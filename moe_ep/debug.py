"""The environment variables of this package, both for debugging only. Read once; what is set says so in one line.

MOE_EP_RACE=SEED   random delays around every communication, so that a missing wait shows (see `race`)
MOE_EP_DEBUG=1     every communication and every count is compared between ranks first (see `order`)
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass

from .errors import RecipeError


@dataclass(frozen=True, slots=True)
class Debug:
    """What is set. `race_seed` None: no delays."""

    race_seed: int | None = None
    checks: bool = False


@functools.cache
def debug() -> Debug:
    """What the environment said when this was first called.

    Raises:
        RecipeError: a value that means nothing.
    """
    seed, checks = os.environ.get("MOE_EP_RACE", ""), os.environ.get("MOE_EP_DEBUG", "")
    if checks not in ("", "0", "1"):
        raise RecipeError(f"MOE_EP_DEBUG = {checks!r} must be 1 (check and record) or 0; or leave it unset")
    found = Debug(_seed(seed), checks == "1")
    if found.race_seed is not None:
        say(f"MOE_EP_RACE={seed}: random delays around every communication; this run is slow on purpose")
    if found.checks:
        say("MOE_EP_DEBUG=1: ranks compare every communication before it is launched; this run is slow on purpose")
    return found


def _seed(text: str) -> int | None:
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise RecipeError(
            f"MOE_EP_RACE = {text!r} must be a whole number, the seed of its delays; or leave it unset for none"
        ) from None


def say(text: str) -> None:
    """To standard error, as one line or block of this rank."""
    print(f"moe_ep: {text}", file=sys.stderr, flush=True)

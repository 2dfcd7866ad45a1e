"""Whom an error concerns: this rank, all ranks alike, or a rank that is gone."""

from __future__ import annotations

import re

import torch.distributed as dist

from .errors import MoEError, PeerError

_LOST = re.compile(
    r"gloo|connection (closed|reset|refused)|timed out|timeout|broken pipe|nccl (error|communicator)|"
    r"remote process exited|watchdog|socket",
    re.IGNORECASE,
)
# how gloo's own errors begin; a wider net would catch errors of this rank that speak of a socket or a timeout
_GLOO = re.compile(r"\[\S+\.cc:\d+\] ")
_EVERYWHERE = "raised_on_all_ranks"
_REPORTED = "reported_with_counts"
_OUT_OF_STEP = "ranks_out_of_step"
_HEARD = "heard_from_another_rank"
_EARLY_STOP = "_StopRecomputationError"  # how torch's activation checkpoint leaves its second pass; nothing failed


def is_lost_peer(err: BaseException) -> bool:
    """Whether an exception (or one that it was raised from) says that another rank is gone or does not answer."""
    seen: BaseException | None = err
    before = set[int]()
    while seen is not None and id(seen) not in before:  # somebody may have raised an error from itself
        before.add(id(seen))
        if isinstance(seen, dist.DistError):
            return True
        if type(seen) is RuntimeError and _LOST.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def mark_everywhere(err: BaseException) -> None:
    """Say that the other ranks raise too, so that nobody needs to tell them."""
    setattr(err, _EVERYWHERE, True)


def is_everywhere(err: BaseException) -> bool:
    """Whether the other ranks raise too: by agreement, because they were told, or because a rank is gone."""
    collective = isinstance(err, dist.DistError) or (type(err) is RuntimeError and _GLOO.match(str(err)) is not None)
    return collective or isinstance(err, PeerError) or is_early_stop(err) or getattr(err, _EVERYWHERE, False)


def mark_reported(err: BaseException) -> None:
    """Say that all ranks raise because of what one has told the others with its counts."""
    setattr(err, _REPORTED, True)


def is_reported(err: BaseException) -> bool:
    """Whether all ranks raise: one where it sends its counts, the others where they read them, launches further on."""
    return getattr(err, _REPORTED, False)


def placed(err: MoEError, where: str) -> MoEError:
    """The same error with its place in front, for the ranks that it concerned before."""
    told = type(err)(f"{where}: {err}")
    if getattr(err, _EVERYWHERE, False):
        mark_everywhere(told)
    if is_reported(err):
        mark_reported(told)
    return told


def mark_out_of_step(err: Exception) -> None:
    """Say that all ranks raise, but may have started different numbers of collectives by now."""
    setattr(err, _OUT_OF_STEP, True)


def is_out_of_step(err: BaseException) -> bool:
    """Whether all ranks raise it and have to be brought to the same number of collectives first."""
    return getattr(err, _OUT_OF_STEP, False)


def mark_heard(err: PeerError) -> None:
    """Say that another rank was heard to have stopped, whatever this rank was about to do."""
    setattr(err, _HEARD, True)


def is_heard(err: BaseException) -> bool:
    """Whether it says what another rank had to say, be it that this one has a fault."""
    return getattr(err, _HEARD, False)


def is_early_stop(err: BaseException) -> bool:
    """Whether it only says that an activation checkpoint has recomputed enough."""
    return type(err).__name__ == _EARLY_STOP

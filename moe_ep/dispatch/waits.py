"""Which waits between streams each stage of a ticket makes, in a schedule's words."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from ..in_flight import making
from ..schedule_steps import Kind, Link
from .ticket import Stage, Ticket

LAUNCH_AFTER_PACK = Link(Kind.DISPATCH, Kind.PACK)
# of what a stage launches for what the caller has issued, and of the stage for what was launched before
_WAITS: dict[Stage, tuple[Link | None, Link | None]] = {
    Stage.DISPATCH_PREPROCESS: (Link(Kind.COUNTS, Kind.ROUTE), None),
    Stage.DISPATCH: (LAUNCH_AFTER_PACK, Link(Kind.READ, Kind.COUNTS)),
    Stage.DISPATCH_POSTPROCESS: (None, Link(Kind.EXPERTS, Kind.DISPATCH)),
    Stage.COMBINE: (Link(Kind.COMBINE, Kind.EXPERTS), None),
    Stage.COMBINE_POSTPROCESS: (None, Link(Kind.RESOLVE, Kind.COMBINE)),
}
ALL_WAITS = frozenset(link for both in _WAITS.values() for link in both if link is not None)
_all = contextlib.nullcontext()


def stage_waits(ticket: Ticket, stage: Stage) -> AbstractContextManager[None]:
    """Around a stage: of its waits those that the ticket has."""
    made = ticket.waits
    if made is None or made >= ALL_WAITS:
        return _all
    launch, arrival = (link is None or link in made for link in _WAITS.get(stage, (None, None)))
    return making(at_launch=launch, at_arrival=arrival)

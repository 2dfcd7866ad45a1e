"""How tokens travel to their experts and back."""

from ..load import LayoutStats
from .base import Dispatcher
from .capabilities import Capabilities
from .registry import (
    build_dispatcher,
    close_dispatchers,
    find_dispatcher,
    known_dispatchers,
    register_dispatcher,
    unavailable_reasons,
)
from .ticket import Stage, Ticket

__all__ = [
    "Capabilities",
    "Dispatcher",
    "LayoutStats",
    "Stage",
    "Ticket",
    "build_dispatcher",
    "close_dispatchers",
    "find_dispatcher",
    "known_dispatchers",
    "register_dispatcher",
    "unavailable_reasons",
]

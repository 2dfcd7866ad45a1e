"""What ranks find out on their way is found out here once: most of them are forked from this process and inherit it."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from typing import Any

from tests.ranks.launch import IMPORTED_LATE

for name in IMPORTED_LATE:
    importlib.import_module(name)

_read_entry_points = importlib.metadata.entry_points


@functools.cache
def _entry_points_on(path: tuple[str, ...], **params: str) -> Any:
    return _read_entry_points(**params)


def entry_points(**params: str) -> Any:
    """Those of all packages, which do not change while tests run on one path; every dispatcher built asks for them."""
    return _entry_points_on(tuple(sys.path), **params)


importlib.metadata.entry_points = entry_points

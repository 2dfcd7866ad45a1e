"""Runs under MOE_EP_DEBUG."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from unittest import mock

import torch.distributed as dist

from moe_ep import (
    close_dispatchers,
)  # fmt: skip
from moe_ep.debug import debug


@contextlib.contextmanager
def checking(group: dist.ProcessGroup) -> Iterator[io.StringIO]:
    """MOE_EP_DEBUG is set and no dispatcher is left from before; gives what is printed."""
    close_dispatchers(group)
    with mock.patch.dict(os.environ, MOE_EP_DEBUG="1"), contextlib.redirect_stderr(io.StringIO()) as said:
        debug.cache_clear()
        try:
            yield said
        finally:
            debug.cache_clear()
            close_dispatchers(group)

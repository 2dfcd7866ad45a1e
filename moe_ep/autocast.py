"""Computing in the operands' own dtype, whatever torch.autocast says around it."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

_nothing = contextlib.nullcontext()


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Around products that would come in another dtype, or not at all; nothing where no autocast is on."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else _nothing

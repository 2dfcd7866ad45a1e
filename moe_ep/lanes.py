"""Lanes: what each micro-batch in flight needs for itself, pooled by a dispatcher and lent to tickets."""

from __future__ import annotations

from typing import Any

import torch

from .debug import debug


class Lane:
    """What one in-flight micro-batch needs for itself: a host buffer for counts, and the event of its last writer."""

    def __init__(self, num_ints: int, pinned: bool) -> None:
        # lanes outlive the micro-batch: one made in an evaluation serves training too
        with torch.inference_mode(False):
            self.host = torch.empty(num_ints, dtype=torch.int64, pin_memory=pinned)
        self.event: Any = None

    def idle(self) -> bool:
        """Whether nothing on the device may still write the buffer."""
        return self.event is None or self.event.query()


class Loan:
    """Returns a lane to its pool, once."""

    __slots__ = ("_free", "_lane")

    def __init__(self, free: list[Lane], lane: Lane) -> None:
        self._free = free
        self._lane: Lane | None = lane

    def __call__(self) -> None:
        """Return it."""
        lane, self._lane = self._lane, None
        if lane is not None:
            self._free.append(lane)

    __del__ = __call__


class LanePool:
    """Lanes of one dispatcher. A lane comes back when its ticket is done or dies, whatever stage that is in."""

    def __init__(self, num_ints: int) -> None:
        self._num_ints = num_ints
        self._free: list[Lane] = []
        self.num_lanes = 0

    def borrow(self, device: torch.device) -> tuple[Lane, Loan]:
        """A lane, and the loan that returns it when it is called, or when nobody holds it any more."""
        lane = next((lane for lane in self._free if lane.idle()), None)
        if lane is None:
            lane = Lane(self._num_ints, device.type == "cuda")
            self.num_lanes += 1
        else:
            self._free.remove(lane)
        if debug().race_seed is not None:
            lane.host.fill_(-1)  # what is read too early must not look right
        return lane, Loan(self._free, lane)

    @property
    def num_free(self) -> int:
        """Lanes that no ticket holds."""
        return len(self._free)

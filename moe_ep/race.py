"""MOE_EP_RACE: communication that takes its time, so that whoever does not wait for it sees it.

A wait that is missing goes unnoticed as long as communication happens to be quick. Here each one takes longer by a
random time, a function of (seed, rank, how many there were before), so that what one seed finds it finds again.

- On CUDA the comm stream sleeps before and behind every launch.
- On CPU a collective receives into memory of its own, and its results come into the buffers that were promised only
  when somebody waits for them, after a delay. Until then these hold all ones: NaN, or -1. That is the latest that an
  asynchronous collective may be, so here a missing wait shows under every seed.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .debug import debug

LONGEST_S = 0.002  # a few times what a layer's communication takes: no race needs more, and a test has thousands
_CYCLES_PER_S = 2e9  # of a GPU's clock, about
ALL_ONES = 255
_nothing = contextlib.nullcontext()

Begin = Callable[[Tensor], list[Any]]


class Race:
    """Delays of one rank's communication in one group."""

    def __init__(self, seed: int, rank: int) -> None:
        self.seed, self.rank = seed, rank
        self.num_delays = 0

    def delay_s(self) -> float:
        """The next delay: none in one of four, else anything up to `LONGEST_S`."""
        drawn = random.Random(f"{self.seed} {self.rank} {self.num_delays}").uniform(-1 / 3, 1)
        self.num_delays += 1
        return LONGEST_S * max(drawn, 0.0)

    def sleep_on_stream(self) -> None:
        """Hold up the current CUDA stream."""
        cycles = int(self.delay_s() * _CYCLES_PER_S)
        if cycles:
            torch.cuda._sleep(cycles)


class LateWork:
    """Collectives whose results come when they are waited for."""

    def __init__(self, works: list[Any], arrived: Tensor, out: Tensor, delay_s: float) -> None:
        self._works, self._arrived, self._out, self._delay_s = works, arrived, out, delay_s

    def wait(self) -> None:
        """Wait, take a while, and hand the results over."""
        for work in self._works:
            work.wait()
        time.sleep(self._delay_s)
        with torch.no_grad():
            self._out.copy_(self._arrived)


def race_of(group: dist.ProcessGroup | None) -> Race | None:
    """The delays of a group's communication; None: MOE_EP_RACE is not set."""
    seed = debug().race_seed
    if seed is None:
        return None
    return _race(seed, 0, "") if group is None else _race(seed, group.rank(), group.group_name)


@functools.cache
def _race(seed: int, rank: int, group_name: str) -> Race:
    return Race(seed, rank)


def delays_around(group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
    """Hold up the current CUDA stream before and behind what is issued inside."""
    race = race_of(group)
    return _nothing if race is None else _delayed(race)


@contextlib.contextmanager
def _delayed(race: Race) -> Iterator[None]:
    race.sleep_on_stream()
    yield
    race.sleep_on_stream()


def begin_late(out: Tensor, begin: Begin, group: dist.ProcessGroup | None) -> list[Any]:
    """Start collectives by `begin(buffer)`, as late on the CPU as MOE_EP_RACE wants them; returns their handles."""
    race = None if out.device.type == "cuda" else race_of(group)
    if race is None:
        return begin(out)
    arrived = torch.empty_like(out)
    works = begin(arrived)
    out.view(torch.uint8).fill_(ALL_ONES)
    return [LateWork(works, arrived, out, race.delay_s())]

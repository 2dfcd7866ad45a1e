"""Slots in memory that processes share: pushes and pulls as over peer memory, with fences that can be left out.

What two-sided messages cannot show is what happens when a rank writes into, or reads from, slots that their owner is
not done with. Here both operations are one-sided, and only the fences keep them apart.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.dispatch.twin import open_twin
from moe_ep.replica import Plan
from moe_ep.replica.transport import InFlight, SlotBuffers, Tensors, Transport, copies, zero_used


def wait_for(path: Path) -> None:
    """Until another process has made the file, or 10 s are over."""
    deadline = time.monotonic() + 10
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.001)


class SharedSlots(SlotBuffers):
    """One rank's slots in a file that others map as well."""

    def __init__(self, path: Path, slots: int, like: Sequence[Tensor]) -> None:
        self.weights = tuple(self._map(path, f"w{n}", slots, m, m.dtype) for n, m in enumerate(like))
        self.grads = tuple(self._map(path, f"g{n}", slots, m, torch.float32) for n, m in enumerate(like))

    def _map(self, path: Path, name: str, slots: int, master: Tensor, dtype: torch.dtype) -> Tensor:
        shape = (slots, *master.shape[1:])
        file = f"{path}-{name}"
        return torch.from_file(file, shared=True, size=math.prod(shape), dtype=dtype).view(shape)


class SharedTransport(Transport):
    """One rank's end.

    Args:
        missing: a fence that is left out, "entry" or "exit", or "".
        before: called in front of what this rank moves. Behind it there is a file `moved-NAME-RANK` in the folder.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        folder: Path,
        slots: int,
        like: Sequence[Tensor],
        missing: str,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.num_ranks, self.missing, self._before = group.rank(), group.size(), missing, before
        self._folder = folder
        self._twin = open_twin(group, f"fences of {folder.name}")
        self.everybody = [SharedSlots(folder / f"rank{r}", slots, like) for r in range(self.num_ranks)]
        self.own_slots = self.everybody[self.rank]

    def _fence(self, which: str) -> None:
        if which != self.missing:
            assert self._twin is not None
            self._twin.allreduce([torch.zeros(1)]).wait()

    def _launch(self, name: str, move: Callable[[], None], finish: Callable[[], None]) -> InFlight:
        """As on a comm stream: beside what the rank computes, and what it sends for other purposes."""

        def body() -> None:
            self._fence("entry")
            self._before()
            with torch.no_grad():
                move()
            (self._folder / f"moved-{name}-{self.rank}").touch()

        thread = threading.Thread(target=body)
        thread.start()

        def end() -> None:
            thread.join()
            self._fence("exit")
            finish()

        return InFlight(end)

    def _push(self, plan: Plan, masters: Tensors, slots: Tensors) -> InFlight:
        def move() -> None:
            for copy in copies(plan):
                if copy.home == self.rank:
                    for master, slot in zip(masters, self.everybody[copy.rank].weights, strict=True):
                        slot[copy.slot].copy_(master[copy.local])

        return self._launch("push", move, lambda: None)

    def _pull(self, plan: Plan, slot_grads: Tensors, master_grads: Tensors) -> InFlight:
        def move() -> None:
            for copy in copies(plan):
                if copy.home == self.rank:
                    for total, part in zip(master_grads, self.everybody[copy.rank].grads, strict=True):
                        total[copy.local] += part[copy.slot]

        return self._launch("pull", move, lambda: zero_used(plan, self.rank, slot_grads))

    def _gather(self, value: int) -> list[int]:
        raise NotImplementedError("the runtime compares plans")

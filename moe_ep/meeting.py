"""The end of a step on all ranks: has each of them made the same communications, and does nobody wait in vain?

Where ranks run backward over other outputs, or in another order, rows end up in the wrong place, or a rank waits for
what another never starts, being through with its step. So ranks that meet compare what they have launched. And one that
waits at the end for longer than `PATIENCE_S` says in the group's store how many collectives it has started; a rank that
is not there yet and has started more says so: these can never end, since who waits at the end starts none.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PATIENCE_S = 1.0  # a rank at the end of its step waits that long before it asks
_ASK_EVERY_S = 0.2
_DIGEST_BYTES = 8
WAY_OUT = (
    "All ranks take layers, micro-batches, pending outputs and backward passes in one order, and run backward over the "
    "same outputs; a rank without a loss for one adds 0 * output.sum(). MOE_EP_DEBUG=1 names the first difference"
)


class Launches:
    """What this rank has sent since the step began: rows there and back, forward and backward, in this order."""

    def __init__(self) -> None:
        self.count, self.last, self._sum = 0, "", 0

    def note(self, what: str) -> None:
        """One more."""
        self.count, self.last, self._sum = self.count + 1, what, zlib.crc32(what.encode(), self._sum)

    def begin(self) -> None:
        """A step begins, on all ranks alike."""
        self.__init__()  # type: ignore[misc]

    def digest(self, device: torch.device) -> Tensor:
        """uint8 [8], equal on ranks that have launched the same."""
        both = self.count.to_bytes(4, "little") + self._sum.to_bytes(4, "little")
        return torch.frombuffer(bytearray(both), dtype=torch.uint8).to(device)

    def __str__(self) -> str:
        return f"{self.count} transfers, the last one {self.last}" if self.count else "no transfer"


def all_equal(gathered: Tensor) -> bool:
    """Whether digests [R * 8] are equal. A host sync."""
    digests = gathered.view(-1, _DIGEST_BYTES).cpu()
    return bool((digests == digests[0]).all())


class Meeting:
    """Who waits at the end of a step, over the store of the group; one object for each generation of its alarm."""

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self.number, self.waiting = 0, False

    def ask(self, counts: Sequence[int], digest: Tensor, ended: Callable[[], bool]) -> Callable[[], str | None]:
        """What a rank that waits calls time and again: "" as long as it has to wait, None: all are there.

        Anything else says why that will never be.

        Args:
            counts: collectives of each log that this rank has started.
            digest: of its launches.
            ended: whether all are there.
        """
        next_s, told = time.monotonic() + PATIENCE_S, False
        place = f"{self.number}/at"

        def look() -> str | None:
            nonlocal next_s, told
            if ended():
                return None
            if time.monotonic() < next_s:
                return ""
            next_s = time.monotonic() + _ASK_EVERY_S
            if not told:
                self._store.set(f"{place}/{self._rank}", str(digest.tolist()))
                self._store.set("waits", json.dumps([self.number, *counts]))
                told = True
            return self._ahead() or self._all_wait(place)

        return look

    def _ahead(self) -> str:
        key = f"ahead/{self.number}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _all_wait(self, place: str) -> str:
        """All ranks are at their end, and their meeting stands in line behind what cannot end."""
        keys = [f"{place}/{rank}" for rank in range(self._num_ranks)]
        if not self._store.check(keys) or len(set(self._store.multi_get(keys))) == 1:
            return ""
        return "other ranks have sent something else"

    def answer(self, counts: Sequence[int], said: str) -> None:
        """What a rank calls a few times a second: says `said` if another waits that has started less than this one."""
        if self.waiting or not self._store.check(["waits"]):
            return
        number, *theirs = json.loads(self._store.get("waits"))
        ahead = any(mine > other for mine, other in zip(counts, theirs, strict=False))
        if self.number < number and not self.waiting and ahead:
            self._store.set(f"ahead/{number}", said)

"""Names a communication that does not end: rank, sequence number, stage, layer, micro-batch.

A kernel that waits for a peer waits without a word, and a library's own timeout says nothing of layers. Each rank keeps
a list of what it has issued; a thread looks at the oldest, and prints one line when it is overdue. Ranks that stall at
different numbers, or one that prints nothing, show who is missing.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT_S = 60.0
LIBRARY_TIMEOUT_S = 100.0  # DeepEP's kernels give up then and trap, whatever the group's timeout (configs.cuh)


class Issued:
    """One communication in flight. `done` is asked by the watchdog's thread; it says whether the device is through."""

    __slots__ = ("done", "number", "since", "told", "what")

    def __init__(self, number: int, what: str) -> None:
        self.number = number
        self.what = what
        self.since = time.monotonic()
        self.done: Callable[[], bool] = lambda: False
        self.told = False


class Watchdog:
    """What one rank has issued and not seen end.

    Args:
        name: of the dispatcher, for messages.
        rank, num_ranks: of this rank in its group.
        timeout_s: what waits for a peer gives up then, which may end the process.

    Attributes:
        overdue_s: a communication older than that is named: early enough to be read before anything gives up.
        last_ended: number and words of the last communication that ended.
        broken: set by whoever saw one fail: the ranks are not in step any more, so no further collective can work.
    """

    def __init__(self, name: str, rank: int, num_ranks: int, timeout_s: float) -> None:
        self.name, self.rank, self.num_ranks = name, rank, num_ranks
        self.overdue_s = min(timeout_s, LIBRARY_TIMEOUT_S) / 2
        self.last_ended = "none"
        self.broken = False
        self._issued: collections.deque[Issued] = collections.deque()
        self._number = 0
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    @contextlib.contextmanager
    def watch(self, what: str, device: torch.device) -> Iterator[Issued]:
        """Around the calls that issue one communication on the current stream.

        On a GPU it ends when the stream has reached its end; on a CPU, when the block is left.
        """
        one = self._enter(what)
        try:
            yield one
        except BaseException:
            one.done = lambda: True
            raise
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            one.done = lambda: _through(event)
        else:
            one.done = lambda: True

    def describe(self, one: Issued) -> str:
        """Rank, sequence number and what was issued, for messages."""
        return f"rank {self.rank} of {self.num_ranks}, {self.name}, communication {one.number}: {one.what}"

    def close(self) -> None:
        """End the thread; idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()

    @property
    def num_in_flight(self) -> int:
        """Communications that have not been seen to end."""
        self._forget_ended()
        return len(self._issued)

    def _enter(self, what: str) -> Issued:
        with self._wake:
            self._number += 1
            one = Issued(self._number, what)
            self._issued.append(one)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, daemon=True, name=f"{self.name} watchdog")
                self._thread.start()
            self._wake.notify()
        return one

    def _run(self) -> None:
        while not self._closed:
            self._forget_ended()
            self._tell_overdue()
            with self._wake:
                if not self._closed:
                    self._wake.wait(self.overdue_s / 4 if self._issued else None)

    def _forget_ended(self) -> None:
        with self._wake:
            while self._issued and self._issued[0].done():
                one = self._issued.popleft()
                self.last_ended = f"{one.number} ({one.what})"

    def _tell_overdue(self) -> None:
        with self._wake:
            late = self._issued[0] if self._issued else None
        if late is None or late.told or time.monotonic() - late.since < self.overdue_s:
            return
        late.told = True
        waited = time.monotonic() - late.since
        print(
            f"moe_ep: {self.describe(late)} was issued {waited:.0f} s ago and has not ended; the last one that ended "
            f"is {self.last_ended}, {len(self._issued) - 1} more wait behind it. A rank that prints no such line, or "
            "another number, is the one the others wait for",
            file=sys.stderr,
            flush=True,
        )


def _through(event: Any) -> bool:
    try:
        return bool(event.query())
    except RuntimeError:  # the device is lost: whoever waits for it says so
        return True


def group_timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """The timeout that the group's collectives have on a device, seconds; DEFAULT_TIMEOUT_S where it cannot be told."""
    options: Any = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if isinstance(timeout, timedelta) else DEFAULT_TIMEOUT_S

"""What a rank has started on a process group, and what another rank must call to be its counterpart.

A collective that one rank started and another never does waits for ever, and shifts every later one by one. So each
rank keeps the sizes of its last collectives; a rank that stops early can then make up for those that the others have
started, without knowing what they were for.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["all_to_all", "all_gather"]
_KEPT = 2048  # several backward passes of what can be under way at once


class Call(NamedTuple):
    """One collective that moves rows, as one rank calls it.

    Attributes:
        kind: "all_gather" sends the same rows to every rank.
        device: "cpu" or "cuda".
        row_bytes: of one row.
        send: rows to each rank, in rank order; of an all-gather the one number of rows.
        recv: rows from each rank; alike.
    """

    kind: Kind
    device: str
    row_bytes: int
    send: Sequence[int]
    recv: Sequence[int]

    def to_json(self) -> str:
        """For the store."""
        return json.dumps([self.kind, self.device, self.row_bytes, list(self.send), list(self.recv)])

    @classmethod
    def from_json(cls, text: str | bytes) -> Call:
        """Its inverse."""
        return cls(*json.loads(text))


class CallLog:
    """The last collectives that this rank has started on one process group, numbered from 0 in their order."""

    def __init__(self) -> None:
        self.count = 0
        self._kept: deque[Call] = deque(maxlen=_KEPT)

    def add(self, call: Call) -> None:
        """Note one, right before it starts."""
        self._kept.append(call)
        self.count += 1

    def skip_to(self, count: int) -> None:
        """Go on from a number at which all ranks have met; nobody asks for anything before it."""
        self._kept.clear()
        self.count = count

    def between(self, first: int, end: int) -> list[tuple[int, Call]]:
        """(number, call) of those from `first` on and before `end` that are still known."""
        oldest = self.count - len(self._kept)
        return [(n, self._kept[n - oldest]) for n in range(max(first, oldest), end)]


def counterpart(rank: int, calls: Sequence[Call | None]) -> Call:
    """What `rank`, which started nothing, must call so that the others' calls complete; rows are single bytes.

    Between two ranks that both started nothing, nothing travels.

    Worked example: rank 0 of two sent 3 rows of 4 bytes to rank 1 and awaits 1: rank 1 receives 12 bytes, sends 4.

    Args:
        rank: this one.
        calls: of each rank, None of one that started nothing; at least one is there.
    """
    started = [call for call in calls if call is not None]
    first = started[0]
    if first.kind == "all_gather":
        size = [first.send[0] * first.row_bytes]
        return first._replace(row_bytes=1, send=size, recv=size)
    send = [0 if call is None else call.recv[rank] * call.row_bytes for call in calls]
    recv = [0 if call is None else call.send[rank] * call.row_bytes for call in calls]
    return first._replace(row_bytes=1, send=send, recv=recv)

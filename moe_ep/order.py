"""MOE_EP_DEBUG: which communication each rank makes, compared before it is made and kept for the day it fails.

Without it the ranks compare, with the counts, which layer and micro-batch they dispatch. Combines and backward passes
in different orders on different ranks are not seen then: rows end up in the wrong place, or everybody waits. Here
every rank says before each launch what it is about to do, waits for what the others say, and all raise if one is at
something else, before anything is sent. The last launches of a rank are printed when it loses another.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .debug import say
from .errors import PeerError, lost_peer

RING = 64  # launches kept: a few layers' worth

_orders: dict[str, Order] = {}


class _Stage(threading.local):
    """The dispatcher's stage that this thread is in, "" outside of any."""

    name = ""


_stage = _Stage()


@dataclass(slots=True)
class Record:
    """One launch.

    Attributes:
        number: of the launch, in its group.
        what: stage of the ticket, layer and micro-batch, such as "dispatch of layer 3, micro-batch 0".
        group: in which process group it is issued.
        stage: the dispatcher's method; backward; or failure, of a rank that tells the others that it fails.
        sent: dtypes and shapes of what it reads.
        collectives: operations that it started, with the shapes that go in and come out.
    """

    number: int
    what: str
    group: str
    stage: str
    sent: str
    collectives: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        started = "; ".join(self.collectives) or "no collective of torch.distributed"
        return f"{self.number}: {self.what} [{self.stage}, group {self.group}] sends {self.sent}: {started}"


class Order:
    """The launches of one rank on an expert-parallel group, all streams together.

    Args:
        group: the expert-parallel group; None: one rank.
        talk: a group of the same ranks for comparing, on the host.
    """

    def __init__(self, group: dist.ProcessGroup | None, talk: dist.ProcessGroup | None) -> None:
        self.group, self.talk = group, talk
        self.records: collections.deque[Record] = collections.deque(maxlen=RING)
        self.num_launches = 0

    def enter(self, what: str, purpose: str, sent: Sequence[Any]) -> None:
        """Note a launch and compare it with the other ranks' next one; blocks until all of them are there.

        Raises:
            PeerError: on every rank, if one is at another launch; or a rank did not come in time.
        """
        shapes = ", ".join(_shape(t) for t in sent if isinstance(t, Tensor)) or "nothing"
        stage = _stage.name or ("backward" if what.startswith("backward") else "failure")
        self.records.append(Record(self.num_launches, what, purpose, stage, shapes))
        self.num_launches += 1
        calls = self.gather(what, (what, purpose))
        if len(set(calls)) > 1:
            said = ", ".join(f"rank {rank} makes the {call[0]}" for rank, call in enumerate(calls))
            raise self.told(PeerError(
                f"communication {self.num_launches - 1} is not the same on all ranks: {said}. All ranks of a group "
                "take layers, micro-batches and backward passes in one order"
            ))  # fmt: skip

    def note(self, operation: str, given: Tensor, out: Tensor) -> None:
        """A collective that the launch under way starts."""
        if self.records:
            self.records[-1].collectives.append(f"{operation} {_shape(given)} to {_shape(out)}")

    def compare_splits(self, send: Sequence[int], recv: Sequence[int]) -> None:
        """Every rank sends each other one as many rows as that one expects.

        Raises:
            PeerError: on every rank, with the first pair that differs.
        """
        what = self.records[-1].what if self.records else "all-to-all"
        both = self.gather(what, (tuple(send), tuple(recv)))
        for source, (sent, _) in enumerate(both):
            for target, (_, expected) in enumerate(both):
                if sent[target] != expected[source]:
                    raise self.told(PeerError(
                        f"{what}: rank {source} sends {sent[target]} rows to rank {target}, which expects "
                        f"{expected[source]}; the ranks have different counts"
                    ))  # fmt: skip

    def gather(self, what: str, mine: Any) -> list[Any]:
        """What every rank has to say. Collective.

        Raises:
            PeerError: a rank did not come within the group's timeout.
        """
        if self.talk is None or self.talk.size() == 1:
            return [mine]
        everybody: list[Any] = [None] * self.talk.size()
        try:
            dist.all_gather_object(everybody, mine, group=self.talk)
        except (RuntimeError, ValueError) as err:
            raise self.told(lost_peer(f"comparison of the {what}", err)) from err
        return everybody

    def told(self, err: PeerError) -> PeerError:
        """Print this rank's last launches, once for each error; returns the error."""
        if not getattr(err, "_launches_told", False):
            err._launches_told = True  # type: ignore[attr-defined]
            rank = 0 if self.group is None else self.group.rank()
            lines = "\n".join(f"  {record}" for record in self.records) or "  none"
            say(f"rank {rank} of its group fails; its last {len(self.records)} launches, the newest below:\n{lines}")
        return err


def open_order(group: dist.ProcessGroup | None, talk: dist.ProcessGroup | None, *beside: Any) -> Order:
    """The order of a group, made at the first call; groups `beside` it, such as one for counts, share it."""
    order = _orders.setdefault(_name(group), Order(group, talk))
    for other in beside:
        _orders[_name(other)] = order
    return order


def close_order(*groups: dist.ProcessGroup | None) -> None:
    """Forget what was noted of groups that are closed."""
    for group in groups:
        _orders.pop(_name(group), None)


def order_of(group: dist.ProcessGroup | None) -> Order | None:
    """The order of a group; None: nothing is noted, MOE_EP_DEBUG is not set."""
    return _orders.get(_name(group)) if _orders else None


@contextlib.contextmanager
def in_stage(name: str) -> Iterator[None]:
    """Launches inside are this stage's."""
    before, _stage.name = _stage.name, name
    try:
        yield
    finally:
        _stage.name = before


def told(err: PeerError, group: dist.ProcessGroup | None) -> PeerError:
    """Print the launches behind an error, where they are noted; returns the error."""
    order = order_of(group)
    return err if order is None else order.told(err)


def _name(group: dist.ProcessGroup | None) -> str:
    return "" if group is None else group.group_name


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

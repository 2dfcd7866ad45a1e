"""MOE_EP_DEBUG: which communication each rank makes, compared before it is made and kept for the day it fails.

Without it the ranks compare, with the counts, which layer and micro-batch they dispatch. Combines and backward passes
in different orders on different ranks are seen at the end of a step only (see `meeting`), or not at all. Here
every rank says before each launch what it is about to do, waits for what the others say, and all raise if one is at
something else, before anything is sent. The last launches of a rank are printed when it loses another.
"""

from __future__ import annotations

import collections
import contextlib
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from .alarm import Alarm
from .debug import say
from .errors import PeerError

_POLL_S = 0.0005
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

    Ranks talk over the group's store, so that a rank that has failed can be heard of meanwhile.

    Args:
        group: the expert-parallel group; None: one rank.
        alarm: its alarm, None for one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, alarm: Alarm | None) -> None:
        self.group, self.alarm = group, alarm
        self.records: collections.deque[Record] = collections.deque(maxlen=RING)
        self.num_launches = 0
        self._num_talks, self._generation = 0, 0
        if group is not None and alarm is not None:
            store = PrefixStore("moe_ep.order", group.get_group_store())
            # dispatchers of this group may have been closed and made again, on all ranks alike
            self._store = PrefixStore(str(store.add(f"opened/{group.rank()}", 1)), store)
            self._timeout_s = _timeout_s(group)

    def enter(self, what: str, purpose: str, sent: Sequence[Any]) -> None:
        """Note a launch and compare it with the other ranks' next one; blocks until all of them are there.

        Raises:
            PeerError: on every rank, if one is at another launch; or a rank did not come in time.
        """
        if self.alarm is not None and self.alarm.generation != self._generation:  # all ranks begin anew after a failure
            self._generation, self._num_talks, self.num_launches = self.alarm.generation, 0, 0
        shapes = ", ".join(_shape(t) for t in sent if isinstance(t, Tensor)) or "nothing"
        stage = _stage.name or ("backward" if what.startswith("backward") else "failure")
        self.records.append(Record(self.num_launches, what, purpose, stage, shapes))
        self.num_launches += 1
        self.gather(what, None)

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
        both = self.gather(f"splits of the {what}", (tuple(send), tuple(recv)))
        for source, (sent, _) in enumerate(both):
            for target, (_, expected) in enumerate(both):
                if sent[target] != expected[source]:
                    raise self.told(PeerError(
                        f"{what}: rank {source} sends {sent[target]} rows to rank {target}, which expects "
                        f"{expected[source]}; the ranks have different counts"
                    ))  # fmt: skip

    def gather(self, what: str, mine: Any) -> list[Any]:
        """What every rank has to say. Collective.

        Args:
            what: the same on all ranks, such as "dispatch of layer 3, micro-batch 0".
            mine: what this rank says; anything that can be pickled.

        Raises:
            PeerError: another rank is at something else, has failed, or did not come within the group's timeout.
        """
        if self.group is None or self.alarm is None:
            return [mine]
        rank, talk = self.group.rank(), f"{self._generation}/{self._num_talks}"
        self._store.set(f"{talk}/{rank}", pickle.dumps((what, mine)).hex())
        keys = [f"{talk}/{peer}" for peer in range(self.group.size())]
        end = time.monotonic() + self._timeout_s
        while not self._store.check(keys):
            self.alarm.check()
            if time.monotonic() > end:
                late = [str(peer) for peer, key in enumerate(keys) if not self._store.check([key])]
                raise self.told(PeerError(
                    f"{what}: rank {', '.join(late)} of {len(keys)} did not come to any communication within "
                    f"{self._timeout_s:g} s, the group's timeout; look at the first error among all ranks"
                ))  # fmt: skip
            time.sleep(_POLL_S)
        said = [pickle.loads(bytes.fromhex(self._store.get(key).decode())) for key in keys]
        if self._num_talks >= 1:  # whoever has come here has read what was said before
            self._store.delete_key(f"{self._generation}/{self._num_talks - 1}/{rank}")
        self._num_talks += 1
        if any(theirs != what for theirs, _ in said):
            raise self.told(self._difference([theirs for theirs, _ in said]))
        return [value for _, value in said]

    def _difference(self, said: Sequence[str]) -> PeerError:
        calls = ", ".join(f"rank {rank} makes the {what}" for rank, what in enumerate(said))
        return PeerError(
            f"communication {self.num_launches - 1} is not the same on all ranks: {calls}. All ranks of a group take "
            "layers, micro-batches and backward passes in one order"
        )

    def told(self, err: PeerError) -> PeerError:
        """Print this rank's last launches, once for each error; returns the error."""
        if not getattr(err, "_launches_told", False):
            err._launches_told = True  # type: ignore[attr-defined]
            rank = 0 if self.group is None else self.group.rank()
            lines = "\n".join(f"  {record}" for record in self.records) or "  none"
            say(f"rank {rank} of its group fails; its last {len(self.records)} launches, the newest below:\n{lines}")
        return err


def open_order(group: dist.ProcessGroup | None, alarm: Alarm | None, *beside: Any) -> Order:
    """The order of a group, made at the first call; groups `beside` it, such as one for counts, share it."""
    if _name(group) not in _orders:
        _orders[_name(group)] = Order(group, alarm)
    order = _orders[_name(group)]
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


def _timeout_s(group: dist.ProcessGroup) -> float:
    backends: list[Any] = [group._get_backend(device) for device in group._device_types]
    return min(float(backend.options._timeout.total_seconds()) for backend in backends)


def _name(group: dist.ProcessGroup | None) -> str:
    return "" if group is None else group.group_name


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

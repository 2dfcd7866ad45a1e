"""Replicas over messages of a process group: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..alarm_registry import launch_unlogged
from ..dispatch.collectives import all_to_all
from ..errors import lost_peer
from ..in_flight import InFlight as Launched
from ..streams import CommStream, Launch, comm_stream
from .plan import Plan
from .transport import Copy, InFlight, Tensors, Transport, copies, zero_used

_WEIGHTS, _GRADS = 1, 2  # tags: an operation's messages meet only each other
_BATCH = 16  # replicas whose messages are posted at once


class Message(NamedTuple):
    """A tensor to another rank, or from it into this memory."""

    tensor: Tensor
    peer: int
    is_sent: bool


class GroupTransport(Transport):
    """Messages in a process group, one for each replica and parameter: gloo on CPUs, NCCL on GPUs.

    A receiver is ready when its slots are free, and its waits end when they are filled: for two-sided messages that is
    the entry and the exit fence of each pair, and ranks that exchange nothing need none. On a GPU they travel from rank
    to rank, without a copy, ordered behind what the current stream holds at the launch and before what it gets after
    `wait`; nobody can make up for them should a rank fail. On a CPU all of an operation's are one all-to-all, for which
    the others can, so the group serves on.

    Args:
        group: the expert-parallel ranks. With NCCL the constructor is collective: it makes the communicator, which a
            rank with nothing to send would otherwise come too late to.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.rank, self.num_ranks = group, group.rank(), group.size()
        if torch.cuda.is_available() and torch.device("cuda") in group._device_types:
            device = torch.device("cuda", torch.cuda.current_device())
            if group._get_backend(device).supports_coalescing:
                dist.all_reduce(torch.zeros(1, device=device), group=group)

    def _push(self, plan: Plan, masters: Tensors, slots: Tensors) -> InFlight:
        batches = []
        for some in batched(copies(plan)):
            messages: list[Message] = []
            for copy in some:
                for master, slot in zip(masters, slots, strict=True):
                    if copy.home == self.rank:
                        messages.append(Message(master[copy.local].detach().contiguous(), copy.rank, True))
                    elif copy.rank == self.rank:
                        messages.append(Message(slot[copy.slot], copy.home, False))
            batches.append(messages)
        return InFlight(self._launch(self.named("weight_sync"), _WEIGHTS, batches, slots[0].device))

    def _pull(self, plan: Plan, slot_grads: Tensors, master_grads: Tensors) -> InFlight:
        batches, sums = [], []
        for some in batched(copies(plan)):
            messages: list[Message] = []
            for copy in some:
                for total, part in zip(master_grads, slot_grads, strict=True):
                    if copy.rank == self.rank:
                        messages.append(Message(part[copy.slot], copy.home, True))
                    elif copy.home == self.rank:
                        arrived = torch.empty(total.shape[1:], dtype=total.dtype, device=total.device)
                        messages.append(Message(arrived, copy.rank, False))
                        sums.append((total[copy.local], arrived))
            batches.append(messages)
        wait = self._launch(self.named("grad_reduce"), _GRADS, batches, slot_grads[0].device)

        def finish() -> None:
            wait()
            for total, arrived in sums:
                total += arrived
            zero_used(plan, self.rank, slot_grads)

        return InFlight(finish)

    def _launch(self, what: str, tag: int, batches: list[list[Message]], device: torch.device) -> Callable[[], None]:
        """Send everything; returns what waits for it. All ranks have as many batches."""
        if device.type == "cuda":
            return self._post(what, tag, batches)
        return self._exchange(what, [message for some in batches for message in some], device) if batches else _nothing

    def _exchange(self, what: str, messages: list[Message], device: torch.device) -> Callable[[], None]:
        """All of them as one all-to-all of bytes."""
        messages = sorted(messages, key=lambda message: message.peer)  # of one pair in the order of both
        sent, received = ([m for m in messages if m.is_sent == is_sent] for is_sent in (True, False))
        payload = torch.cat([_bytes(m.tensor) for m in sent] or [torch.empty(0, dtype=torch.uint8, device=device)])

        def start() -> tuple[tuple[Tensor, ...], list[Any]]:
            to_each, from_each = (self._bytes_of_each(some) for some in (sent, received))
            out = payload.new_empty(sum(from_each))
            return (out,), all_to_all(out, payload, from_each, to_each, self._group)

        flight = launched(comm_stream(device, self._group), what, start, (payload,))

        def wait() -> None:
            (arrived,) = flight.wait()
            for message, part in zip(received, arrived.split([m.tensor.nbytes for m in received]), strict=True):
                _bytes(message.tensor).copy_(part)

        return wait

    def _bytes_of_each(self, messages: list[Message]) -> list[int]:
        return [sum(m.tensor.nbytes for m in messages if m.peer == rank) for rank in range(self.num_ranks)]

    def _post(self, what: str, tag: int, batches: list[list[Message]]) -> Callable[[], None]:
        """One by one; what is returned keeps the messages, whose tensors must live until they have travelled."""
        launch_unlogged(self._group)
        works = []
        try:
            for messages in batches:
                ops = [
                    dist.P2POp(
                        dist.isend if is_sent else dist.irecv,
                        _bytes(tensor),
                        group=self._group,
                        group_peer=peer,
                        tag=tag,
                    )
                    for tensor, peer, is_sent in messages
                ]
                works += dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as err:
            raise lost_peer(what, err) from err
        return lambda: self._wait(what, works, batches)

    def _wait(self, what: str, works: list[Any], _batches: list[list[Message]]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as err:
            raise lost_peer(what, err) from err

    def _gather(self, value: int) -> list[int]:
        everybody: list[Any] = [None] * self.num_ranks
        try:
            dist.all_gather_object(everybody, value, group=self._group)
        except RuntimeError as err:
            raise lost_peer("agreement about a replica plan", err) from err
        return everybody


def batched(all_copies: list[Copy]) -> list[list[Copy]]:
    """Pieces of one list, alike on all ranks: hundreds of messages at once hung NCCL (sgl-project/sglang#30829)."""
    return [all_copies[first : first + _BATCH] for first in range(0, len(all_copies), _BATCH)]


def launched(comm: CommStream, what: str, start: Launch, keep: Tensors) -> Launched:
    """Launch an operation on replicas, which ranks compare at the end of a step as they do rows."""
    flight = comm.launch(what, start, keep=keep)
    if flight.alarm is not None:
        flight.alarm.launches.note(what)
    return flight


def ended(_: object) -> None:
    """A wait of which nobody needs the results."""
    return


def _nothing() -> None:
    """Nothing was launched."""


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes, for a process group that does not know every dtype."""
    return tensor.detach().view(-1).view(torch.uint8)

"""How replicas get their weights and masters the gradients of their replicas: one interface, several transports.

Both operations are collective, and every rank makes each of them in the same order, also with nothing to send. Each
has two fences. The *entry* fence: every rank is done with the old contents of its slots (or has its gradients
complete). The *exit* fence: my slots are filled (or have been read), so that the next user may have them. Neither is
left to whatever communicates next, as Dots-Infra/UltraEP does.

Gradients are float32 (float64 of float64 masters) and added in one order, the home's own first, then its replicas by
rank, so the sum repeats bit for bit on every transport. Slots that were used are zeroed by their owner behind the exit
fence; others are never touched.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..alarm_registry import launch_unlogged
from ..dispatch.collectives import all_to_all
from ..errors import InputError, PlanError, lost_peer
from ..in_flight import InFlight as Launched
from ..streams import CommStream, Launch, comm_stream
from .plan import Plan

Tensors = Sequence[Tensor]
_WEIGHTS, _GRADS = 1, 2  # tags: an operation's messages meet only each other
_BATCH = 16  # replicas whose messages are posted at once


class Copy(NamedTuple):
    """One replica: master `local` of rank `home` is in slot `slot` of rank `rank`."""

    home: int
    local: int
    rank: int
    slot: int


def copies(plan: Plan) -> list[Copy]:
    """All replicas, by expert, then by rank; reads the plan on the host."""
    found = [
        (expert, rank, slot)
        for rank, filled in enumerate(plan.instances.tolist())
        for slot, expert in enumerate(filled)
        if expert >= 0
    ]
    return [Copy(expert // plan.num_local, expert % plan.num_local, rank, slot) for expert, rank, slot in sorted(found)]


def grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """What gradients of masters of a dtype are added in."""
    return torch.promote_types(dtype, torch.float32)


class SlotBuffers:
    """Weights [S, ...] and gradients [S, ...] of a rank's slots, one of each for every parameter of an expert.

    No parameters: nothing of them is in a state dict, an optimizer or a gradient norm.

    Args:
        slots: S.
        like: the masters [L, ...] of any layer.
    """

    def __init__(self, slots: int, like: Tensors) -> None:
        with torch.inference_mode(False):  # made in an evaluation, they must still serve training
            self.weights = tuple(torch.zeros((slots, *m.shape[1:]), dtype=m.dtype, device=m.device) for m in like)
            self.grads = tuple(torch.zeros(w.shape, dtype=grad_dtype(w.dtype), device=w.device) for w in self.weights)


class InFlight:
    """An operation that was launched. `wait` completes it once; a second call does nothing."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        """Until the exit fence is passed.

        Raises:
            PeerError: another rank failed, or did not come in time.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Transport(abc.ABC):
    """Moves weights and gradients between R ranks; this object is rank `rank`'s end.

    Arguments of both operations are lists with one tensor for each parameter of the experts, such as gate-up and down:
    masters [L, ...], slots [S, ...]. A plan is read on the host.
    """

    rank: int
    num_ranks: int
    reads_plan: ClassVar[bool] = True  # on the host
    own_slots: SlotBuffers | None = None  # that it brings along; it serves one micro-batch at a time then

    def weight_sync(self, plan: Plan, masters: Tensors, slots: Tensors) -> InFlight:
        """Copy masters into the slots that the plan gives them, on all ranks. Collective.

        Args:
            plan: the same on every rank.
            masters: [L, ...] each, read until `wait` returns.
            slots: [S, ...] each, of the masters' dtype; written until `wait` returns. Unused slots keep what they hold.

        Raises:
            InputError: tensors that do not fit the plan or each other. PeerError: another rank failed.
        """
        self._check(plan, masters, slots)
        return self._push(plan, masters, slots)

    def grad_reduce(self, plan: Plan, slot_grads: Tensors, master_grads: Tensors) -> InFlight:
        """Add the gradients of replicas to those of their masters, and zero the slots used. Collective.

        Args:
            plan: the same on every rank.
            slot_grads: [S, ...] each, of the dtype that `grad_dtype` gives for the masters'; the used ones are zero
                when `wait` returns.
            master_grads: [L', ...] each, of the same dtype, with the home's own part; complete when `wait` returns.
                L' <= L where the plan counts only L' experts of each rank (see `hot`).

        Raises:
            InputError: tensors that do not fit the plan or each other. PeerError: another rank failed.
        """
        self._check(plan, master_grads, slot_grads, some=True)
        wrong = [t.dtype for t in (*slot_grads, *master_grads) if t.dtype != grad_dtype(t.dtype)]
        if wrong:
            raise InputError(f"gradients are added in float32, got {wrong[0]}; hand in float32 buffers")
        return self._pull(plan, slot_grads, master_grads)

    def agree(self, plan: Plan) -> None:
        """See that all ranks have the same plan: one small exchange of checksums. Collective.

        Raises:
            PlanError: on every rank, naming those that differ from rank 0.
        """
        sums = self._gather(int(plan.checksum()))
        odd = [rank for rank, value in enumerate(sums) if value != sums[0]]
        if odd:
            raise PlanError(
                f"the replica plans of ranks {odd} differ from rank 0's; all ranks must plan from the same load, with "
                "the same slots, smallest quota and planner"
            )

    def close(self) -> None:
        """Free what it holds, before the process group goes."""
        return

    @abc.abstractmethod
    def _push(self, plan: Plan, masters: Tensors, slots: Tensors) -> InFlight: ...

    @abc.abstractmethod
    def _pull(self, plan: Plan, slot_grads: Tensors, master_grads: Tensors) -> InFlight: ...

    @abc.abstractmethod
    def _gather(self, value: int) -> list[int]: ...

    def _check(self, plan: Plan, masters: Tensors, slots: Tensors, *, some: bool = False) -> None:
        if plan.num_ranks != self.num_ranks:
            raise InputError(
                f"a plan for {plan.num_ranks} ranks on a transport of {self.num_ranks}; plan for its group"
            )
        for master, slot in zip(masters, slots, strict=True):
            fits = master.shape[0] == plan.num_local or (some and master.shape[0] < plan.num_local)
            if not fits or master.shape[1:] != slot.shape[1:] or slot.shape[0] < plan.slots:
                raise InputError(
                    f"masters {tuple(master.shape)} and slots {tuple(slot.shape)} do not fit a plan with "
                    f"{plan.num_local} masters and {plan.slots} slots on a rank; make them [L, ...] and [S, ...]"
                )
            if master.dtype != slot.dtype or master.device != slot.device:
                raise InputError(
                    f"masters are {master.dtype} on {master.device}, slots {slot.dtype} on {slot.device}; "
                    "make them alike"
                )


def zero_used(plan: Plan, rank: int, slot_grads: Tensors) -> None:
    """Zero this rank's slots that the plan fills."""
    used = [slot for slot, expert in enumerate(plan.instances[rank].tolist()) if expert >= 0]
    for grads in slot_grads:
        grads[used] = 0


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
        return InFlight(self._launch("weight_sync", _WEIGHTS, batches, slots[0].device))

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
        wait = self._launch("grad_reduce", _GRADS, batches, slot_grads[0].device)

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
            raise lost_peer(f"{what} of replicas", err) from err
        return lambda: self._wait(what, works, batches)

    def _wait(self, what: str, works: list[Any], _batches: list[list[Message]]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as err:
            raise lost_peer(f"{what} of replicas", err) from err

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
    flight = comm.launch(f"{what} of replicas", start, keep=keep)
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

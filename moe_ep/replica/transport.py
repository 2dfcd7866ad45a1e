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
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, PlanError
from .plan import Plan

Tensors = Sequence[Tensor]


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
    where = ""  # layer and micro-batch of the operation that is being launched
    own_slots: SlotBuffers | None = None  # that it brings along; it serves one micro-batch at a time then

    def weight_sync(self, plan: Plan, masters: Tensors, slots: Tensors, *, where: str = "") -> InFlight:
        """Copy masters into the slots that the plan gives them, on all ranks. Collective.

        Args:
            plan: the same on every rank.
            masters: [L, ...] each, read until `wait` returns.
            slots: [S, ...] each, of the masters' dtype; written until `wait` returns. Unused slots keep what they hold.
            where: layer and micro-batch, for messages.

        Raises:
            InputError: tensors that do not fit the plan or each other. PeerError: another rank failed.
        """
        self._check(plan, masters, slots)
        self.where = where
        return self._push(plan, masters, slots)

    def grad_reduce(self, plan: Plan, slot_grads: Tensors, master_grads: Tensors, *, where: str = "") -> InFlight:
        """Add the gradients of replicas to those of their masters, and zero the slots used. Collective.

        Args:
            plan: the same on every rank.
            slot_grads: [S, ...] each, of the dtype that `grad_dtype` gives for the masters'; the used ones are zero
                when `wait` returns.
            master_grads: [L', ...] each, of the same dtype, with the home's own part; complete when `wait` returns.
                L' <= L where the plan counts only L' experts of each rank (see `hot`).
            where: layer and micro-batch, for messages.

        Raises:
            InputError: tensors that do not fit the plan or each other. PeerError: another rank failed.
        """
        self._check(plan, master_grads, slot_grads, some=True)
        wrong = [t.dtype for t in (*slot_grads, *master_grads) if t.dtype != grad_dtype(t.dtype)]
        if wrong:
            raise InputError(f"gradients are added in float32, got {wrong[0]}; hand in float32 buffers")
        self.where = where
        return self._pull(plan, slot_grads, master_grads)

    def named(self, what: str) -> str:
        """An operation and its place, as messages have it; no name that the ranges of a trace have."""
        return f"{what} of replicas ({self.where})" if self.where else f"{what} of replicas"

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

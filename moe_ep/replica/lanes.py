"""Slots of one micro-batch in flight, who holds them, and how they are filled.

A layer's micro-batch needs its slots twice and not for long: in forward from the launch of weight_sync until its
experts are through, in backward from there until its gradients are home. In between other layers have them.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..config import MoEConfig
from ..dispatch.base import Dispatcher
from ..errors import ProtocolError
from .choice import make_transport
from .transport import InFlight, SlotBuffers, Transport


class Phase(enum.StrEnum):
    """What a holder does with its slots."""

    IDLE = "has none"
    FORWARD = "holds them in forward until its experts have run"
    BACKWARD = "holds them in backward until its experts have run"
    THROUGH = "is through with the weights"
    REDUCING = "sends its gradients home"


class Holder(Protocol):
    """Who may hold a lane."""

    where: str
    phase: Phase

    def settle(self) -> None:
        """Complete the way home of the gradients, if they are on it."""
        ...


class SlotLane:
    """One set of slots.

    Args:
        transport: this rank's end; one that has slots of its own serves one lane only.
        buffers: the slots.
    """

    def __init__(self, transport: Transport, buffers: SlotBuffers) -> None:
        self.transport, self.buffers = transport, buffers
        self.content: object = None  # the plan whose weights were brought for a second pass, and are still there
        self._holder: weakref.ref[Holder] | None = None
        self._last: InFlight | None = None

    @property
    def holder(self) -> Holder | None:
        """Who holds it and is not through; None: it is free.

        What is held in backward is free again once no backward runs: it came to its end, or to an exception.
        """
        found = None if self._holder is None else self._holder()
        if found is None or found.phase in (Phase.IDLE, Phase.THROUGH):
            return None
        return None if found.phase is not Phase.FORWARD and not in_backward() else found

    def claim(self, by: Holder) -> None:
        """Take the lane, with whatever an abandoned holder left under way.

        Raises:
            ProtocolError: another one has it and needs it. PeerError: another rank failed.
        """
        other = self.holder
        if other is not None and other is not by:
            if other.phase is not Phase.REDUCING:
                raise ProtocolError(overrun(by.where, f"{other.where} {other.phase.value}"))
            other.settle()
        if self._last is not None:
            self._last.wait()
            self._last = None
        self._holder = weakref.ref(by)

    def launched(self, flight: InFlight) -> InFlight:
        """An operation on these slots; whoever has them next waits for it, should its owner be gone."""
        self._last = flight
        return flight


def in_backward() -> bool:
    """Whether this thread is inside of a backward."""
    return torch._C._current_graph_task_id() != -1


def overrun(where: str, who: str) -> str:
    """The message for a micro-batch that finds no slots."""
    return (
        f"{where}: no replica slots are free: {who}. Run the experts of a micro-batch before the next one is routed, "
        "or say how many interleave (num_micro_batches)"
    )


def held_by(lanes: Sequence[SlotLane]) -> str:
    """Who holds slots, and what for; empty: nobody."""
    holders = [lane.holder for lane in lanes]
    return "; ".join(f"{holder.where} {holder.phase.value}" for holder in holders if holder is not None)


class SlotLanes:
    """The sets of slots of all layers of one dispatcher, made at first use by all ranks alike.

    Args:
        config: of the layers.
        dispatcher: theirs.
    """

    def __init__(self, config: MoEConfig, dispatcher: Dispatcher) -> None:
        self._config, self._dispatcher = config, dispatcher
        self.made: list[SlotLane] = []

    def free(self, where: str, interleaved: int) -> int:
        """The number of a set that nobody holds, to be had from `at`.

        Args:
            where: who asks.
            interleaved: micro-batches that may have one at a time, if they are more than the configuration says.

        Raises:
            ProtocolError: as many are held already. Told to the other ranks by who asks: one that keeps what others
                have dropped is the only one that finds none.
        """
        for number, lane in enumerate(self.made):
            if lane.holder is None:
                return number
        most = 1 if self._config.replica.joint else max(self._config.num_micro_batches, interleaved)
        if len(self.made) >= most:
            raise ProtocolError(overrun(where, held_by(self.made)))
        return len(self.made)

    def at(self, number: int, device: torch.device) -> SlotLane:
        """The set of a number."""
        if number == len(self.made):
            config, dispatcher = self._config, self._dispatcher
            sizes = config.hidden_size, config.expert_intermediate_size
            like = masters_like(config.num_experts // dispatcher.num_ranks, *sizes, dispatcher.dtype, device)
            transport = self._transport(like)
            self.made.append(SlotLane(transport, transport.own_slots or SlotBuffers(config.replica.slots, like)))
        return self.made[number]

    def close(self) -> None:
        """Free the slots; call it before the process group goes."""
        for lane in self.made:
            lane.transport.close()
        self.made.clear()

    def _transport(self, like: Sequence[Tensor]) -> Transport:
        if self.made and self.made[0].transport.own_slots is None:
            return self.made[0].transport  # messages have no memory of their own
        config, dispatcher = self._config.replica, self._dispatcher
        assert dispatcher.group is not None, "one rank has nobody to copy to"
        return make_transport(config.transport, dispatcher.group, config.slots, like, dispatcher.faults)


def masters_like(
    num_local: int, hidden_size: int, inner_size: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Shapes of a rank's masters; no memory."""
    sizes = ((num_local, 2 * inner_size, hidden_size), (num_local, hidden_size, inner_size))
    return [torch.empty(1, dtype=dtype, device=device).expand(size) for size in sizes]

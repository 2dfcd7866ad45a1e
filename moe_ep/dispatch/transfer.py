"""A communication as three autograd nodes, *pack*, *start* and *finish*.

    forward   pack: nothing     start: launch on the comm stream     finish: wait
    backward  finish: launch the transpose     start: nothing        pack: wait

Pack is created where the payload is made, start where the communication is issued, finish where its result is needed.
With one node for all, autograd runs the consumer of each communication's gradient right behind it and backward overlaps
nothing; with nodes of their own, the order of backward mirrors forward, and what was interleaved in forward is
interleaved in backward. Pack apart from start, because the host may issue other computation in between (it has counts
to read), and autograd runs the newest node first: a start that waited would wait before that computation's backward.
No hooks on foreign nodes.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import ProtocolError
from ..in_flight import InFlight, Mark
from ..streams import CommStream
from .collectives import Tensors, all_gather, all_to_all
from .row_transfers import AllToAllRows, GatherRows

__all__ = [
    "AllToAllRows",
    "Flight",
    "GatherRows",
    "Packed",
    "Tensors",
    "Transfer",
    "all_gather",
    "all_to_all",
    "finish",
    "pack",
    "refuse_second_derivatives",
    "start",
]  # all that the stages of a back end need
with torch.inference_mode(False):
    _anchor = torch.empty(0, requires_grad=True, device="cpu")  # what makes a node of every pack


class Transfer(Protocol):
    """A communication and its transpose. All ranks make every call, also with zero rows."""

    def forward(self, payload: Tensors) -> tuple[Tensors, list[Any]]:
        """Allocate the results and start the collectives; returns them with the work handles."""
        ...

    def backward(self, grads: Tensors) -> tuple[Tensors, list[Any]]:
        """The same for the gradients of the results."""
        ...

    def reduce(self, parts: Tensors) -> Tensors:
        """Local work behind the transpose, on the compute stream: gradients of the payload."""
        ...


class Packed:
    """What `pack` knows of a payload, and where its backward finds the flight.

    `flight` is set in backward alone: in forward the flight keeps the payload, which has the node of pack, which has
    this, and Python's collector does not see such a cycle.

    Attributes:
        has_node: gradients are recorded.
        mark: what the launch waits for; None: for all that was issued before it.
    """

    __slots__ = ("flight", "has_node", "mark")

    def __init__(self, has_node: bool) -> None:
        self.has_node = has_node
        self.mark: Mark | None = None
        self.flight: Flight | None = None


class Flight:
    """One transfer of one ticket. Holds tensors only between a launch and its wait."""

    def __init__(self, transfer: Transfer, comm: CommStream, what: str, packed: Packed | None) -> None:
        assert packed is not None, "start without pack"
        self.transfer = transfer
        self.packed = packed
        self._comm = comm
        self._what = what
        self._forward: InFlight | None = None
        self._backward: InFlight | None = None

    def check_packed(self) -> None:
        """Refuse a payload without the node whose backward waits."""
        if not self.packed.has_node:
            raise ProtocolError(
                f"{self._what}: gradients are recorded, but were not when the payload was packed, so backward would "
                "lose them; run all stages of a micro-batch with gradients on, or all with gradients off, also where "
                "an activation checkpoint runs some of them (use_reentrant=False)"
            )

    def launch_forward(self, payload: Tensors) -> Tensors:
        """Send the payload; the results are not valid yet."""
        assert all(t.is_contiguous() for t in payload), "a copy made now would be behind the mark"
        mark, self.packed.mark = self.packed.mark, None
        self._forward = self._comm.launch(self._what, lambda: self.transfer.forward(payload), keep=payload, mark=mark)
        self._tell(self._forward, self._what)
        return self._forward.results

    def wait_forward(self) -> None:
        """Make the results valid on the caller's stream."""
        assert self._forward is not None, "finish without start"
        self._forward.wait()
        self._forward = None

    def launch_backward(self, grads: Tensors) -> None:
        """Send the gradients of the results."""
        sent = tuple(g.contiguous() for g in grads)
        what = f"backward of {self._what}"
        self._backward = self._comm.launch(what, lambda: self.transfer.backward(sent), keep=sent)
        self._tell(self._backward, what)

    def _tell(self, launched: InFlight, what: str) -> None:
        if launched.alarm is not None:
            launched.alarm.launches.note(what)

    def wait_backward(self) -> Tensors:
        """Gradients of the payload."""
        assert self._backward is not None, "backward of pack before backward of finish"
        parts = self._backward.wait()
        self._backward = None
        return self.transfer.reduce(parts)


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Packed, anchor: Tensor, *payload: Tensor) -> Tensors:
        ctx.set_materialize_grads(False)
        ctx.packed = packed
        return payload

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Any, ...]:
        # no gradient is handed in: start's consumer sent it away, and the answer is what came back
        flight, ctx.packed.flight = ctx.packed.flight, None
        assert flight is not None, "backward of pack before backward of start"
        return (None, None, *flight.wait_backward())


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, *payload: Tensor) -> Tensors:
        ctx.set_materialize_grads(False)
        ctx.flight, ctx.num_sent = flight, len(payload)
        # Autograd hangs its node, which owns this flight, on the tensors returned. Were they the ones that the works in
        # flight hold, nobody could ever free a ticket abandoned here: Python's collector does not see that cycle.
        return tuple(t.detach() for t in flight.launch_forward(payload))

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        refuse_second_derivatives()
        ctx.flight.packed.flight = ctx.flight
        return (None,) * (1 + ctx.num_sent)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, *received: Tensor) -> Tensors:
        ctx.flight = flight
        flight.wait_forward()
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        ctx.flight.launch_backward(grads)
        return (None, *grads)


def refuse_second_derivatives() -> None:
    """Raise ProtocolError in a backward that records itself: what travels carries no graph, so it would be wrong."""
    if torch.is_grad_enabled():
        raise ProtocolError(
            "backward with create_graph=True reached a dispatcher: second derivatives do not travel between ranks; "
            "keep the MoE layer out of them"
        )


def pack(*payload: Tensor) -> tuple[Packed, Tensors]:
    """What is to be sent, for `start`, and what its `Flight` has to know.

    Where gradients are recorded at all, all nodes exist whatever the payload asks for: whether this rank's x needs a
    gradient is a local matter, and a backward that ran on some ranks only would leave the others waiting.
    """
    payload = tuple(t.contiguous() for t in payload)
    packed = Packed(has_node=torch.is_grad_enabled())
    if not packed.has_node:
        return packed, payload
    return packed, _Pack.apply(packed, _anchor, *payload)


def start(flight: Flight, *payload: Tensor) -> Tensors:
    """Launch what `pack` gave; the returned tensors are not valid before `finish`.

    Raises:
        ProtocolError: gradients are recorded here, but were not in `pack`.
    """
    if not torch.is_grad_enabled():
        return flight.launch_forward(payload)
    flight.check_packed()
    started: Tensors = _Start.apply(flight, *payload)
    return started


def finish(flight: Flight, *received: Tensor) -> Tensors:
    """Wait; returns the received tensors, valid on the caller's stream.

    Raises:
        ProtocolError: gradients are recorded here, but were not in `pack`.
    """
    if not torch.is_grad_enabled():
        flight.wait_forward()
        return received
    flight.check_packed()
    finished: Tensors = _Finish.apply(flight, *received)
    return finished

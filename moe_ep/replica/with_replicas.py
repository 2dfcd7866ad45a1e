"""Masters and slots as one piece of the autograd graph: forward brings weights to the slots, backward gradients home.

    replicas = WithReplicas(transport, buffers, masters)   early: what is made first, runs last in backward
    replicas.sync(plan)                                    launch weight_sync
    masters, slots = replicas.take()                       wait for it; for the experts
    y = replicas.again(experts(masters, slots))            in backward: bring the weights again before the experts' own

Masters belong to the framework. What reaches them in backward is their complete gradient, so that the hooks of FSDP2,
DDP or Megatron that hang on it see nothing of replicas. As in `dispatch/transfer.py` the reduction is two nodes: the
one made in `take` launches it when the experts' gradients are there, the one made in the constructor waits, behind
everything that was made in between (dispatch, router, attention).

Slot tensors are shared by layers and hold another layer's weights by the time of backward. Autograd may save them: they
carry no version of the buffers that are written in between, and `again` has brought this layer's weights back before
the experts' backward reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ProtocolError
from .plan import Plan
from .transport import InFlight, Transport

Tensors = tuple[Tensor, ...]


class SlotBuffers:
    """Weights [S, ...] and float32 gradients [S, ...] of a rank's slots, one of each for every parameter of an expert.

    No parameters: nothing of them is in a state dict, an optimizer or a gradient norm.

    Args:
        slots: S.
        like: the masters [L, ...] of any layer.
    """

    def __init__(self, slots: int, like: Sequence[Tensor]) -> None:
        self.weights = tuple(torch.zeros((slots, *m.shape[1:]), dtype=m.dtype, device=m.device) for m in like)
        self.grads = tuple(torch.zeros(w.shape, dtype=torch.float32, device=w.device) for w in self.weights)


class WithReplicas:
    """One micro-batch's replicas in one layer.

    Args:
        transport: this rank's end.
        buffers: may be shared with other layers and micro-batches, as long as only one at a time is between `sync` and
            the end of its experts' forward, or between its experts' backward and the end of the reduction.
        masters: [L, ...] each, leaves or not.
    """

    def __init__(self, transport: Transport, buffers: SlotBuffers, masters: Sequence[Tensor]) -> None:
        self._flight = _Flight(transport, buffers)
        # the nodes hold the flight and not this object, which holds their results: no cycle that nobody could collect
        self._masters: Tensors = _Wait.apply(self._flight, *masters)

    def sync(self, plan: Plan) -> None:
        """Launch weight_sync. Collective.

        Raises:
            ProtocolError: a second plan. InputError: buffers or masters that do not fit the plan.
        """
        if self._flight.plan is not None:
            raise ProtocolError("these replicas have a plan already; make new ones for each layer and micro-batch")
        self._flight.plan = plan
        self._flight.launch_weights(self._detached())

    def take(self) -> tuple[Tensors, Tensors]:
        """Masters and slots for the experts, the slots filled.

        Raises:
            ProtocolError: before `sync`, or twice.
        """
        if self._flight.weights is None:
            raise ProtocolError("take needs the sync of a plan before it, and comes once")
        self._flight.wait_weights()
        # aliases without the buffers' version counters, see above
        slots = [weight.data.requires_grad_(torch.is_grad_enabled()) for weight in self._flight.buffers.weights]
        both = _Launch.apply(self._flight, *self._masters, *slots)
        return both[: len(slots)], both[len(slots) :]

    def again(self, y: Tensor) -> Tensor:
        """y, the experts' output; in backward the weights come into the slots again first. Collective there."""
        return _Again.apply(self._flight, y, *self._detached())

    def _detached(self) -> Tensors:
        return tuple(master.detach() for master in self._masters)


class _Flight:
    """What the nodes share: the plan, and what is under way."""

    def __init__(self, transport: Transport, buffers: SlotBuffers) -> None:
        self.transport, self.buffers = transport, buffers
        self.plan: Plan | None = None
        self.weights: InFlight | None = None
        self._grads: InFlight | None = None
        self._totals: Tensors = ()

    def launch_weights(self, masters: Sequence[Tensor]) -> None:
        """Start weight_sync."""
        assert self.plan is not None, "weights before a plan"
        self.weights = self.transport.weight_sync(self.plan, masters, self.buffers.weights)

    def wait_weights(self) -> None:
        """Until the slots are filled."""
        assert self.weights is not None, "wait before launch"
        self.weights.wait()
        self.weights = None

    def launch_grads(self, masters: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
        """Start grad_reduce with the gradients that this rank's experts made."""
        assert self.plan is not None, "gradients before a plan"
        self._totals = tuple(grad.float().clone() for grad in masters)
        used = (self.plan.instances[self.transport.rank] >= 0).nonzero().flatten()
        for buffer, grad in zip(self.buffers.grads, slots, strict=True):
            buffer[used] = grad[used].float()
        self._grads = self.transport.grad_reduce(self.plan, self.buffers.grads, self._totals)

    def wait_grads(self) -> Tensors:
        """The masters' complete gradients, float32."""
        if self._grads is None:
            raise ProtocolError(
                "the masters had a backward and their experts had none; give the experts what take gave"
            )
        self._grads.wait()
        totals, self._totals, self._grads = self._totals, (), None
        return totals


class _Wait(torch.autograd.Function):
    """Made first, so that its backward comes last: waits for the reduction."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, *masters: Tensor) -> Tensors:
        ctx.flight, ctx.dtypes = flight, [m.dtype for m in masters]
        return tuple(master.view_as(master) for master in masters)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        # what is handed in is the home's part alone; the answer is what came back
        totals = ctx.flight.wait_grads()
        return (None, *(total.to(dtype) for total, dtype in zip(totals, ctx.dtypes, strict=True)))


class _Launch(torch.autograd.Function):
    """Made where the experts take their weights: launches the reduction."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, *both: Tensor) -> Tensors:
        ctx.flight = flight
        return tuple(tensor.view_as(tensor) for tensor in both)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        masters, slots = grads[: len(grads) // 2], grads[len(grads) // 2 :]
        ctx.flight.launch_grads(masters, slots)
        return (None, *masters, *(None for _ in slots))


class _Again(torch.autograd.Function):
    """Behind the experts: in backward the weights come again before the experts need them."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, y: Tensor, *masters: Tensor) -> Tensor:
        ctx.flight = flight
        ctx.save_for_backward(*masters)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        masters = ctx.saved_tensors
        ctx.flight.launch_weights(masters)
        ctx.flight.wait_weights()
        return (None, grad, *(None for _ in masters))

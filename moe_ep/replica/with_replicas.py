"""Masters and slots as one piece of the autograd graph: forward brings weights to the slots, backward gradients home.

    replicas = WithReplicas(masters, where)        early: what is made first, runs last in backward
    replicas.sync(plan, lane)                      launch weight_sync
    replicas.join()                                in front of what the experts wait for (else take does it)
    masters, slots = replicas.take()               wait for it; for the experts
    y = replicas.again(experts(replicas.enter(x), masters, slots))
    y = replicas.bring(combine(y))                 behind what comes home; in backward the weights set off here

Masters belong to the framework. What reaches them in backward is their complete gradient, so that the hooks of FSDP2,
DDP or Megatron that hang on it see nothing of replicas; Megatron's `main_grad` gets it in float32 (`main_grad.py`). As
in `dispatch/transfer.py` the reduction is two nodes: the one made by `join` launches it when the experts' gradients are
there, the one made in the constructor waits, behind everything that was made in between (dispatch, router, attention).

In backward the node of `bring` launches the weights once more, that of `again` waits for them (or brings them itself)
before the experts' own, and the node of `enter` says that they are through with them. Slot tensors are shared by layers
and hold another layer's weights meanwhile. Autograd keeps references to them, no copies, and without the version
counters of buffers that are written in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ProtocolError
from .flight import Flight, Tensors
from .lanes import SlotLane
from .main_grad import deliver
from .plan import Plan


class WithReplicas:
    """One layer's replicas in one micro-batch, or in several that share them.

    Args:
        masters: [L, ...] each, leaves or not.
        where: layer and micro-batch, for messages.
        users: micro-batches whose experts run with these replicas. Each calls `take`, `enter` and `again`.
    """

    def __init__(self, masters: Sequence[Tensor], where: str = "replicas", users: int = 1) -> None:
        self._flight = Flight(where, users)
        # the nodes hold the flight and not this object, which holds their results: no cycle that nobody could collect
        self._masters: Tensors = _Wait.apply(self._flight, *masters)
        self._both: Tensors = ()
        self._trained = False

    @property
    def flight(self) -> Flight:
        """What holds the lane."""
        return self._flight

    def sync(self, plan: Plan, lane: SlotLane, *, second_pass: bool = False, trained: bool | None = None) -> None:
        """Launch weight_sync. Collective.

        Args:
            plan: of this micro-batch.
            lane: free, or the flight's own already.
            second_pass: an activation checkpoint runs this for the sake of its backward, which finds the weights there.
            trained: whether any rank's masters ask for gradients, so that all ranks take part in sending them home;
                None: this rank's masters say so for all.

        Raises:
            ProtocolError: a second plan, or a lane that another micro-batch holds.
            InputError: buffers or masters that do not fit the plan.
        """
        if self._flight.plan is not None:
            raise ProtocolError(
                f"{self._flight.where}: these replicas have a plan already; make new ones for each layer and "
                "micro-batch"
            )
        self._trained = any(master.requires_grad for master in self._masters) if trained is None else trained
        self._flight.begin(plan, lane, self._detached(), second_pass)

    def join(self) -> None:
        """Make the node that will launch the reduction; where it stands, says what runs before it in backward."""
        if self._both:
            return
        flight = self._flight
        trained = torch.is_grad_enabled() and self._trained
        # aliases without the buffers' version counters, see above
        slots = [weight.data.requires_grad_(trained) for weight in flight.slots()]
        self._both = _Launch.apply(flight, *self._masters, *slots)

    def take(self) -> tuple[Tensors, Tensors]:
        """Masters and slots for the experts, the slots filled.

        Raises:
            ProtocolError: before `sync`, or by more than the number of users.
        """
        self._flight.take()
        self.join()
        half = len(self._masters)
        return self._both[:half], self._both[half:]

    def enter(self, x: Tensor) -> Tensor:
        """x, the experts' input; its backward comes when they are through with the weights."""
        return _Enter.apply(self._flight, x) if torch.is_grad_enabled() else x

    def again(self, y: Tensor) -> Tensor:
        """y, the experts' output; in backward the weights come into the slots again first. Collective there."""
        self._flight.leave()
        return _Again.apply(self._flight, y, *self._detached()) if torch.is_grad_enabled() else y

    def bring(self, y: Tensor) -> Tensor:
        """y, what the experts' output has become at home; in backward the weights are on their way from here on.

        Where they cannot be, `again` launches them: a second pass is to come, which brings them, or the framework has
        not yet given the masters their memory.
        """
        if not (torch.is_grad_enabled() and self._flight.brings_early):
            return y
        return _Bring.apply(self._flight, y, *self._detached())

    def _detached(self) -> Tensors:
        return tuple(master.detach() for master in self._masters)


class _Wait(torch.autograd.Function):
    """Made first, so that its backward comes last: waits for the reduction."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, *masters: Tensor) -> Tensors:
        ctx.flight, ctx.masters = flight, masters
        return tuple(master.view_as(master) for master in masters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # what is handed in is the home's part alone; that of experts with copies is replaced by what came back
        flight = ctx.flight
        each = zip(ctx.masters, grads, flight.wait_grads(), strict=True)
        return (None, *(deliver(*parts, flight.hot, fresh=flight.fresh_grads) for parts in each))


class _Launch(torch.autograd.Function):
    """Made where the experts' weights are put together: launches the reduction."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, *both: Tensor) -> Tensors:
        ctx.flight = flight
        results = tuple(tensor.view_as(tensor) for tensor in both)
        # frozen masters beside trained ones of other ranks: their experts compute no gradient for them
        ctx.mark_non_differentiable(
            *(t for t, needed in zip(results, ctx.needs_input_grad[1:], strict=True) if not needed)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        masters, slots = grads[: len(grads) // 2], grads[len(grads) // 2 :]
        ctx.flight.launch_grads(masters, slots)
        return (None, *masters, *(None for _ in slots))


class _Enter(torch.autograd.Function):
    """In front of the experts."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, x: Tensor) -> Tensor:
        ctx.flight = flight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.flight.through()
        return None, grads[0]


class _Bring(torch.autograd.Function):
    """Behind the combine: in backward the weights set off."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, y: Tensor, *masters: Tensor) -> Tensor:
        ctx.flight = flight
        ctx.save_for_backward(*masters)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        masters = ctx.saved_tensors
        # FSDP2 takes the memory of weights away and gives it back in front of their module's backward
        if all(master.untyped_storage().size() > 0 for master in masters):
            ctx.flight.bring(masters)
        return (None, grads[0], *(None for _ in masters))


class _Again(torch.autograd.Function):
    """Behind the experts: in backward the weights come again before the experts need them."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, y: Tensor, *masters: Tensor) -> Tensor:
        ctx.flight = flight
        ctx.save_for_backward(*masters)
        return y.detach()  # the same memory and version; of a view that a module returns FSDP2 would warn

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        masters = ctx.saved_tensors
        ctx.flight.return_to(masters)
        return (None, grads[0], *(None for _ in masters))

"""Copies beside experts that a framework computes by itself, with parameters of its own for each expert and matrix.

Such experts (Megatron's) keep to their rows and their weight gradients, fused ones too; nothing about them changes.
`CopiesBeside` is `WithReplicas` without the masters: the graph holds the slots alone, and what comes home in backward
is what the copies add, to `main_grad` where there is one and to autograd's gradient elsewhere. Masters are read one by
one, so they travel by messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ProtocolError
from .flight import Flight, Tensors
from .lease import Lease
from .main_grad import add_to_buffer
from .transport import copies, grad_dtype
from .with_replicas import WithReplicas


class OneByOne:
    """A matrix of L experts as a transport of messages reads [L, ...], in tensors of their own.

    Args:
        tensors: of each expert; None where it has no part in what travels.
        like: shape and device of each.
        dtype: of each.
    """

    def __init__(self, tensors: Sequence[Tensor | None], like: Tensor, dtype: torch.dtype) -> None:
        self.tensors, self.shape = tensors, torch.Size((len(tensors), *like.shape))
        self.dtype, self.device = dtype, like.device

    def __getitem__(self, local: int) -> Tensor:
        found = self.tensors[local]
        assert found is not None, f"expert {local} has no copies"
        return found


class CopiesBeside(WithReplicas):
    """One layer's copies in one micro-batch.

    Args:
        masters: 2 L tensors: the first matrix of each expert, then the second. Leaves that outlive the graph.
        where, users: see WithReplicas.
    """

    def __init__(self, masters: Sequence[Tensor], where: str, users: int = 1) -> None:
        self._masters = tuple(masters)
        self._flight: _BesideFlight = _BesideFlight(where, users, self._masters)
        self._token: Tensor = _Home.apply(self._flight, *masters)
        self._both = ()
        self._trained = False

    def join(self) -> None:
        """See WithReplicas; here there are slots alone."""
        if self._both:
            return
        trained = torch.is_grad_enabled() and self._trained
        slots = [weight.data.requires_grad_(trained) for weight in self._flight.slots()]
        self._both = _Slots.apply(self._flight, self._token, *slots)

    def take(self) -> tuple[Tensors, Tensors]:
        """See WithReplicas; no masters."""
        self._flight.take()
        self.join()
        return (), self._both


class _BesideFlight(Flight):
    def __init__(self, where: str, users: int, masters: Tensors) -> None:
        super().__init__(where, users)
        self._masters = masters

    def launch_parts(self, slots: Sequence[Tensor]) -> None:
        """Backward: start grad_reduce with the gradients that this rank's copies made."""
        assert self.lane is not None and self.plan is not None, "gradients before a plan"
        rank, num_local = self.lane.transport.rank, self.plan.num_local
        copied = {copy.local for copy in copies(self.plan) if copy.home == rank}
        dtype = grad_dtype(self._masters[0].dtype)
        parts = [
            torch.zeros_like(master, dtype=dtype) if number % num_local in copied else None
            for number, master in enumerate(self._masters)
        ]
        self.reduce(self.plan, self._matrices(parts, dtype), slots)

    def parts(self) -> list[Tensor | None]:
        """Backward: what copies add to each master, float32; None: it has no copies."""
        return [part for matrix in self.wait_grads() for part in matrix.tensors]  # type: ignore[attr-defined]

    def _launch_weights(self, masters: Sequence[Tensor]) -> None:
        super()._launch_weights(self._matrices(masters, masters[0].dtype))

    def _matrices(self, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Any:
        """Two of them, in the place of tensors [L, ...]."""
        half = len(tensors) // 2
        return tuple(OneByOne(tensors[at : at + half], self._masters[at], dtype) for at in (0, half))


class _Home(torch.autograd.Function):
    """Made first, so that its backward comes last: waits for the reduction."""

    @staticmethod
    def forward(ctx: Any, flight: _BesideFlight, *masters: Tensor) -> Tensor:
        ctx.flight, ctx.masters = flight, masters
        return masters[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        pairs = zip(ctx.masters, ctx.flight.parts(), strict=True)
        return (None, *(_left_to_autograd(*pair) for pair in pairs))


def _left_to_autograd(master: Tensor, part: Tensor | None) -> Tensor | None:
    return None if part is None or add_to_buffer(master, part) else part.to(master.dtype)


class _Slots(torch.autograd.Function):
    """Made where the experts' weights are put together: launches the reduction."""

    @staticmethod
    def forward(ctx: Any, flight: _BesideFlight, token: Tensor, *slots: Tensor) -> Tensors:
        ctx.flight = flight
        ctx.save_for_backward(token)
        return tuple(slot.view_as(slot) for slot in slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.flight.launch_parts(grads)
        (token,) = ctx.saved_tensors
        return (None, torch.zeros_like(token), *(None for _ in grads))


class LeaseBeside(Lease):
    """A lease of `CopiesBeside`.

    Args:
        masters: see CopiesBeside.
        late: they are complete only when the experts have run, whose hooks gather them; nothing hides the copying then.
        others: see Lease.
    """

    def __init__(self, masters: Sequence[Tensor], *, late: bool, **others: int) -> None:
        super().__init__(None, **others, trained=any(master.requires_grad for master in masters))
        self._own = tuple(masters)
        self._replicas = None if late else self._copies()

    def slots(self) -> Tensors:
        """Weights [S, ...] of both matrices, filled. Behind the experts' own rows.

        Raises:
            ProtocolError: before there is a plan, or once more than there are users.
        """
        if self._replicas is None:
            if self._late is None:
                raise ProtocolError(f"{self.where}: its experts run before it was routed; call ReplicaRuntime.route")
            placed, lane, second_pass, trained = self._late
            self._replicas = self._copies()
            self._replicas.sync(placed, lane, second_pass=second_pass, trained=trained)
        return self._replicas.take()[1]

    def _copies(self) -> CopiesBeside:
        return CopiesBeside(self._own, self.where, self.users)

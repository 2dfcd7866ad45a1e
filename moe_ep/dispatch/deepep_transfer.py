"""DeepEP's dispatch and combine as transfers of `transfer.Flight`: each is the other's transpose along one handle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import MoEError, lost_peer
from .collectives import Tensors
from .deepep_link import Link, Received
from .watchdog import Watchdog


class DispatchTransfer:
    """Rows and weights to the experts' ranks; backward sums both back along the handle.

    Api v1's kernels read the ids while they send, and keep nothing alive: they are held until `take`.
    """

    def __init__(self, link: Link, dog: Watchdog, what: str, ids_TK: Tensor) -> None:
        self._link, self._dog, self._what = link, dog, what
        self._ids: Tensor | None = ids_TK
        self._received: Received | None = None
        self.handle: Any = None

    def forward(self, payload: Tensors) -> tuple[Tensors, list[Any]]:
        """x [T, H], weights [T, K] to source [U, H] and their weights; blocks the host until the counts are there."""
        assert self._ids is not None and self.handle is None, "dispatched twice"
        x_TH, weights_TK = payload
        with issued(self._dog, self._what, x_TH):
            received = self._link.dispatch(x_TH, self._ids, weights_TK)
        self._received, self.handle = received, received.handle
        return (received.source, received.weights), []

    def take(self) -> Received:
        """What came, once; the caller's stream has waited for it."""
        received, self._received, self._ids = self._received, None, None
        assert received is not None, "taken before it came, or twice"
        return received

    def backward(self, grads: Tensors) -> tuple[Tensors, list[Any]]:
        """Gradients of source and weights to those of x [T, H] and weights [T, K]."""
        with issued(self._dog, f"backward of {self._what}", grads[0]):
            dx_TH, dweights_TK = self._link.combine(grads[0], grads[1], self.handle)
        assert dweights_TK is not None, "no weights came back"
        return (dx_TH, dweights_TK), []

    def reduce(self, parts: Tensors) -> Tensors:
        """Nothing to add up."""
        return parts


class CombineTransfer:
    """Rows back to their tokens, summed; backward dispatches again along the handle."""

    def __init__(self, link: Link, dog: Watchdog, what: str, handle: Any) -> None:
        self._link, self._dog, self._what, self._handle = link, dog, what, handle

    def forward(self, payload: Tensors) -> tuple[Tensors, list[Any]]:
        """Rows [U, H] to y [T, H]."""
        with issued(self._dog, self._what, payload[0]):
            y_TH, _ = self._link.combine(payload[0], None, self._handle)
        return (y_TH,), []

    def backward(self, grads: Tensors) -> tuple[Tensors, list[Any]]:
        """Gradient of y [T, H] to that of the rows [U, H]."""
        with issued(self._dog, f"backward of {self._what}", grads[0]):
            return (self._link.dispatch_again(grads[0], self._handle),), []

    def reduce(self, parts: Tensors) -> Tensors:
        """Nothing to add up."""
        return parts


@contextlib.contextmanager
def issued(dog: Watchdog, what: str, tensor: Tensor) -> Iterator[None]:
    """`Watchdog.watch`, with the library's own timeouts and failures turned into a PeerError that names the call."""
    with dog.watch(what, tensor.device) as one:
        try:
            yield
        except (MoEError, torch.OutOfMemoryError):
            raise
        except RuntimeError as err:
            dog.broken = True
            raise lost_peer(dog.describe(one), err) from err

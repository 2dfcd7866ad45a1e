"""DeepEP's dispatch and combine as transfers of `transfer.Flight`: each is the other's transpose along one handle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MoEError, lost_peer
from .deepep_link import Link, Received
from .transfer import Tensors, all_gather
from .watchdog import Watchdog


class Words:
    """What every rank tells every other one along with a dispatch: fault, value, place. Read behind the counts.

    The gather goes out right in front of the dispatch, on the same stream. The host waits for the library's counts
    anyway, and by then the words have arrived.
    """

    def __init__(self, words: Tensor, host: Tensor, group: dist.ProcessGroup) -> None:
        self._words, self._host, self._group = words, host, group
        self._gathered: Tensor | None = None
        self.event: Any = None

    def send(self) -> None:
        """On the comm stream."""
        gathered = self._words.new_empty((self._group.size(), self._words.numel()))
        for work in all_gather(gathered.view(-1), self._words, self._group):
            work.wait()
        self._host.copy_(gathered.view(-1), non_blocking=True)
        if gathered.device.type == "cuda":
            self.event = torch.cuda.Event()
            self.event.record()

    def read(self) -> list[list[int]]:
        """Words of each rank, in rank order."""
        if self.event is not None:
            self.event.synchronize()
        rows: list[list[int]] = self._host.view(self._group.size(), -1).tolist()
        return rows


class DispatchTransfer:
    """Rows and weights to the experts' ranks; backward sums both back along the handle.

    Api v1's kernels read the ids while they send, and keep nothing alive: they are held until `take`.
    """

    def __init__(self, link: Link, dog: Watchdog, what: str, ids_TK: Tensor, words: Words) -> None:
        self._link, self._dog, self._what = link, dog, what
        self._ids: Tensor | None = ids_TK
        self._words: Words | None = words
        self._received: Received | None = None
        self.handle: Any = None

    def forward(self, payload: Tensors) -> tuple[Tensors, list[Any]]:
        """x [T, H], weights [T, K] to source [U, H] and their weights; blocks the host until the counts are there."""
        words, self._words = self._words, None
        assert words is not None and self._ids is not None, "dispatched twice"
        x_TH, weights_TK = payload
        with issued(self._dog, self._what, x_TH):
            words.send()
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

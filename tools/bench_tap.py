"""A dispatcher's communication taken away, or taken alone: what a step would cost without it, and it without a step.

Everything that an in-tree dispatcher sends goes through `CommStream.launch` of `Dispatcher.comm`. A tap stands in its
place. Noting, it lets everything through and writes down what shapes arrived. Silent, it sends nothing and hands over
rows of the noted shapes that stand ready (random values: a GEMM's speed depends on its data), so that all computation
is issued as ever: routing, packing, regrouping, experts, sums, backward. Exchanges of counts still travel, since rows
cannot be laid out without them; with them their wait on the host stays. What is left out are the rows' transfers, the
memory they arrive in, and the waits for them. What was silent can be sent afterwards, back to back.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ep.errors import Unavailable
from moe_ep.in_flight import InFlight, Mark
from moe_ep.streams import CommStream, Launch

_COUNTS = "exchange of "
Form = tuple[tuple[int, ...], torch.dtype]


class TappedComm(CommStream):
    """A comm stream with a tap.

    Attributes:
        iteration: what shapes are noted under, and taken from where silent.
        noting: see above.
    """

    def __init__(self, real: CommStream) -> None:
        self.device, self.group, self.stream, self._real = real.device, real.group, real.stream, real
        self.iteration = -1
        self.noting = self._silent = self._keeping = False
        self._forms: dict[tuple[int, str], list[Form]] = {}
        self._held_back: list[tuple[str, Launch, Sequence[Any]]] = []
        self._stock: dict[torch.dtype, Tensor] = {}

    def mark(self) -> Mark | None:
        """See CommStream."""
        return self._real.mark()

    def hold(self, what: object) -> None:
        """See CommStream."""
        self._real.hold(what)

    def launch(self, what: str, fn: Launch, keep: Sequence[Any] = (), mark: Mark | None = None) -> InFlight:
        """See CommStream."""
        if self._silent and not what.startswith(_COUNTS):
            if self._keeping:
                self._held_back.append((what, fn, keep))
            return InFlight(what, self._stand_in(what), [], None, keep)
        flight = self._real.launch(what, fn, keep, mark)
        if self.noting:
            self._forms[self.iteration, what] = [(tuple(t.shape), t.dtype) for t in flight.results]
        return flight

    @contextlib.contextmanager
    def silenced(self, *, keep: bool = False) -> Iterator[None]:
        """Silent inside. `keep`: what is held back stays until `forget`, to be sent."""
        self._silent, self._keeping = True, keep
        try:
            yield
        finally:
            self._silent = self._keeping = False

    def send_held_back(self) -> None:
        """Send what was silent, in its order."""
        for what, fn, keep in self._held_back:
            self._real.launch(what, fn, keep).wait()

    def forget(self) -> None:
        """Let go of what was silent."""
        self._held_back.clear()

    def _stand_in(self, what: str) -> tuple[Tensor, ...]:
        forms = self._forms.get((self.iteration, what))
        if forms is None:
            raise Unavailable(f"{what} was not seen before, so nothing can stand in for it")
        return tuple(self._rows(*form) for form in forms)

    def _rows(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Readers share the memory; nobody writes what arrives."""
        size, stock = math.prod(shape), self._stock.get(dtype)
        if stock is None or stock.numel() < size:
            generator = torch.Generator(self.device).manual_seed(0)
            stock = torch.randn(size + size // 4, generator=generator, device=self.device).to(dtype)
            self._stock[dtype] = stock
        return stock[:size].view(shape)

"""The two interfaces of DeepEP behind one: dispatch, dispatch again along a handle, combine.

Both are called on the comm stream as the current one and without their asynchronous form: DeepEP then makes its own
stream wait for the comm stream and the comm stream for its own, so tensors belong to the comm stream like those of any
other transfer, and one order of communication holds on all ranks. Two calls never run at once on one buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What one dispatch brought to this rank.

    Attributes:
        source: bfloat16 [U, H], one row a token, in the order (source rank, token); expanded: one row a route, in the
            order (local expert, source rank, token).
        weights: float32 [U, K]; expanded: [U].
        handle: for combine and for dispatching again along the same routes.
        host_counts: routes of each local expert.
        counts: int [L], the same on the device; expanded only.
        ids: int [U, K], local experts, -1 where the route is another rank's or none; None: expanded.
    """

    source: Tensor
    weights: Tensor
    handle: Any
    host_counts: tuple[int, ...]
    counts: Tensor | None = None
    ids: Tensor | None = None


class Link(Protocol):
    """One buffer of one group. Collective: every method but `num_bytes`, on all ranks in one order."""

    num_bytes: int

    def open(self) -> None:
        """Allocate."""
        ...

    def dispatch(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Received:
        """Send tokens to the ranks of their experts; blocks the host until the counts are there."""
        ...

    def dispatch_again(self, x_TH: Tensor, handle: Any) -> Tensor:
        """Send rows along the routes of a handle: [U, H]."""
        ...

    def combine(self, rows_UH: Tensor, weights: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None]:
        """Sum rows [T, H] back to their tokens; weights too, [T, K]."""
        ...

    def close(self) -> None:
        """Free."""
        ...

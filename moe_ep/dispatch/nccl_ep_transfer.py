"""The two communications of NCCL EP's high-throughput mode with their transposes, for `transfer.Flight`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .collectives import Tensors
from .nccl_ep_engine import Engine, Lease

ALIGNMENT = 16  # bytes


class Dispatch:
    """Rows and weights to the experts' ranks; backward brings both gradients home.

    Args:
        engine, lease: of the micro-batch; the lease is held until its graph is gone, for backward.
        num_rows: rows of the result, at least 1: an empty tensor has no address to hand to the library.
        what: for messages.

    Attributes:
        ids: int64 [U, K], local experts of each received row, -1 behind them; only where flat, valid with the results.
    """

    def __init__(self, engine: Engine, lease: Lease, num_rows: int, what: str) -> None:
        self.engine, self.lease, self.num_rows, self.what = engine, lease, num_rows, what
        self.ids: Tensor | None = None

    def forward(self, payload: Tensors) -> tuple[Tensors, list[Any]]:
        """(x [T, H], weights [T, K]) to (rows [N, H], weights [N], or [U, K] where flat)."""
        x_TH, weights_TK = payload
        flat = self.engine.sizes.flat
        rows = x_TH.new_empty(self.num_rows, x_TH.shape[1])
        weights = weights_TK.new_empty((self.num_rows, weights_TK.shape[1]) if flat else (self.num_rows,))
        out: Tensors = (rows, weights)
        if flat:
            shape = (self.num_rows, weights_TK.shape[1])
            self.ids = torch.full(shape, -1, dtype=torch.int64, device=x_TH.device)
            out = (*out, self.ids)
        self.engine.dispatch(self.lease, aligned(x_TH), weights_TK, out, self.what)
        self._shapes = (x_TH.shape, weights_TK.shape)
        return (rows, weights), []

    def backward(self, grads: Tensors) -> tuple[Tensors, list[Any]]:
        """Gradients of rows and weights to gradients of x and of the routing weights."""
        rows, weights = grads
        out = rows.new_empty(self._shapes[0]), weights.new_empty(self._shapes[1])
        self.engine.gather(self.lease, aligned(rows), weights, out, f"backward of {self.what}")
        return out, []

    def reduce(self, parts: Tensors) -> Tensors:
        """Nothing to add up: the library has."""
        return parts


class Combine:
    """Rows home, summed over a token's routes; backward sends the gradient out again.

    Args:
        engine, lease: of the micro-batch.
        num_tokens: rows of the result, at least 1.
        what: for messages.
    """

    def __init__(self, engine: Engine, lease: Lease, num_tokens: int, what: str) -> None:
        self.engine, self.lease, self.num_tokens, self.what = engine, lease, num_tokens, what

    def forward(self, payload: Tensors) -> tuple[Tensors, list[Any]]:
        """Rows [N, H] to y [T, H]."""
        (rows,) = payload
        self._shape = rows.shape
        y_TH = rows.new_empty(self.num_tokens, rows.shape[1])
        self.engine.combine(self.lease, aligned(rows), y_TH, self.what)
        return (y_TH,), []

    def backward(self, grads: Tensors) -> tuple[Tensors, list[Any]]:
        """The gradient of y to the gradient of the rows."""
        (dy_TH,) = grads
        rows = dy_TH.new_empty(self._shape)
        self.engine.scatter(self.lease, aligned(dy_TH), rows, f"backward of {self.what}")
        return (rows,), []

    def reduce(self, parts: Tensors) -> Tensors:
        """Nothing to add up."""
        return parts


def aligned(rows: Tensor) -> Tensor:
    """The same rows at an address that the kernels' 16-byte copies can read; a view may lie anywhere."""
    return rows if rows.data_ptr() % ALIGNMENT == 0 else rows.clone()

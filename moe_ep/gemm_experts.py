"""Experts on a library of grouped GEMMs that takes counts on the host: SwiGLU around its three products."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .activation import scaled, swiglu
from .config import MoEConfig
from .expert_input import ExpertInput
from .experts import SplitExperts, Weights

SIZE_MULTIPLE = 8  # kernels read 16 bytes of a row at a time


class Products(Protocol):
    """Products over L groups of rows; `counts` are host ints, all tensors contiguous, N at least 1.

    A weight gradient over no rows may be left unwritten; whoever calls it writes zeros.
    """

    def forward(self, rows_NA: Tensor, weights_LBA: Tensor, counts: tuple[int, ...]) -> Tensor:
        """rows [N, A] times weights [L, B, A] transposed: [N, B]."""
        ...

    def rows_grad(self, grad_NB: Tensor, weights_LBA: Tensor, counts: tuple[int, ...]) -> Tensor:
        """grad [N, B] times weights: [N, A]."""
        ...

    def weights_grad(self, grad_NB: Tensor, rows_NA: Tensor, counts: tuple[int, ...]) -> Tensor:
        """grad transposed times rows, of each group: [L, B, A]."""
        ...


class GemmExperts(SplitExperts):
    """Base of experts on `Products`.

    SwiGLU and the weighting are plain torch. Kept for backward: rows [N,H], gate-up [N,2I], activation [N,I], and with
    weighting = "output" the down projection's output [N,H] besides. Weight gradients are rounded once to the
    parameters' dtype. Where the dispatcher has no counts on the host, reading them is a host sync.
    """

    fresh_grads: ClassVar[bool] = True

    def products(self) -> Products:
        """The library's products."""
        raise NotImplementedError(f"{type(self).__name__} must define products")

    def compute_set(self, inp: ExpertInput, weights: Weights) -> Tensor:
        """See SplitExperts; here the rows beyond offsets[L] are zero."""
        products, (w_gate_up, w_down) = self.products(), weights
        counts = inp.host_counts if inp.host_counts is not None else tuple(inp.tokens_per_expert.tolist())
        total = sum(counts)
        x_NH, weights_N = inp.rows()[:total], inp.row_weights[:total]
        act = swiglu(_Grouped.apply(products, x_NH, w_gate_up, counts))
        if self.config.weighting == "activation":
            y_NH: Tensor = _Grouped.apply(products, scaled(act, weights_N), w_down, counts)
        else:
            y_NH = scaled(_Grouped.apply(products, act, w_down, counts), weights_N)
        return y_NH if total == inp.capacity else F.pad(y_NH, (0, 0, 0, inp.capacity - total))


def limit_reasons(config: MoEConfig, dtypes: tuple[str, ...]) -> list[str]:
    """Where a configuration exceeds what the kernels take: limit, value, way out."""
    reasons = []
    if config.dtype not in dtypes:
        reasons.append(f"its kernels take {' and '.join(dtypes)}, not {config.dtype}")
    for name in ("hidden_size", "expert_intermediate_size"):
        if getattr(config, name) % SIZE_MULTIPLE:
            reasons.append(f"{name} = {getattr(config, name)} must be a multiple of {SIZE_MULTIPLE}")
    return reasons


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: Products, rows_NA: Tensor, weights_LBA: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(rows_NA, weights_LBA)
        ctx.products, ctx.counts = products, counts
        if rows_NA.shape[0] == 0:
            return rows_NA.new_empty((0, weights_LBA.shape[1]))
        return products.forward(rows_NA.contiguous(), weights_LBA, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, Tensor | None, None]:
        rows_NA, weights_LBA = ctx.saved_tensors
        grad_NB = grads[0].contiguous()
        if grad_NB.shape[0] == 0:
            return None, torch.zeros_like(rows_NA), torch.zeros_like(weights_LBA), None
        d_rows = d_weights = None
        if ctx.needs_input_grad[1]:
            d_rows = ctx.products.rows_grad(grad_NB, weights_LBA, ctx.counts)
        if ctx.needs_input_grad[2]:
            d_weights = ctx.products.weights_grad(grad_NB, rows_NA.contiguous(), ctx.counts)
            for expert, count in enumerate(ctx.counts):
                if count == 0:
                    d_weights[expert].zero_()
        return None, d_rows, d_weights, None

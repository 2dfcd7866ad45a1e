"""`experts = "grouped_gemm"`: SwiGLU on the grouped GEMMs of github.com/tgale96/grouped_gemm.

It takes bfloat16 only, and counts on the host. Where the dispatcher has none there, reading them is a host sync.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import MoEConfig
from .errors import Unavailable
from .experts import GroupedExperts, register_experts
from .permute import ExpertInput

INSTALL = "pip install 'moe-ep[grouped-gemm]' (a source package: it needs a CUDA toolkit)"
SIZE_MULTIPLE = 8  # its CUTLASS kernels read 8 bfloat16 at a time


@register_experts("grouped_gemm")
class GroupedGemmExperts(GroupedExperts):
    """Experts on grouped_gemm 0.3: bfloat16, H and I multiples of 8.

    SwiGLU and the weighting are plain torch. Kept for backward: rows [N,H], gate-up [N,2I], activation [N,I], and with
    weighting = "output" the down projection's output [N,H] besides. Weight gradients are rounded once to bfloat16.

    Raises:
        Unavailable: grouped_gemm or a GPU is missing, or sizes or a dtype that its kernels do not take.
    """

    def __init__(self, config: MoEConfig, num_local: int, first_expert: int, layer_index: int) -> None:
        reasons = limit_reasons(config) or self.machine_reasons()
        if reasons:
            raise Unavailable(
                f"experts = 'grouped_gemm' cannot run here: {'; '.join(reasons)}; or set experts = 'torch'"
            )
        super().__init__(config, num_local, first_expert, layer_index)

    @classmethod
    def findings(cls) -> list[str]:
        """See GroupedExperts."""
        limits = f"grouped_gemm takes bfloat16, and sizes that are multiples of {SIZE_MULTIPLE}"
        return [*([] if _missing() else [f"grouped_gemm {_version()}"]), limits]

    @classmethod
    def machine_reasons(cls) -> list[str]:
        """See GroupedExperts."""
        if _missing():
            return [f"grouped_gemm is not installed; {INSTALL}"]
        return [] if torch.cuda.is_available() else ["grouped_gemm computes on GPUs only, and there is none"]

    def compute(self, inp: ExpertInput) -> Tensor:
        """See GroupedExperts.forward; here the rows beyond offsets[L] are zero."""
        counts = inp.host_counts if inp.host_counts is not None else tuple(inp.tokens_per_expert.tolist())
        total = sum(counts)
        x_NH, weights_N = inp.rows()[:total], inp.row_weights[:total, None]
        gate, up = _Grouped.apply(x_NH, self.w_gate_up, counts).chunk(2, dim=-1)
        act = F.silu(gate) * up
        if self.config.weighting == "activation":
            y_NH: Tensor = _Grouped.apply((act * weights_N).to(act.dtype), self.w_down, counts)
        else:
            y_NH = _Grouped.apply(act, self.w_down, counts)
            y_NH = (y_NH * weights_N).to(y_NH.dtype)
        return y_NH if total == inp.capacity else F.pad(y_NH, (0, 0, 0, inp.capacity - total))


def limit_reasons(config: MoEConfig) -> list[str]:
    """Where a configuration exceeds what the kernels take: limit, value, way out."""
    reasons = []
    if config.dtype != "bfloat16":
        reasons.append(f"its kernels take bfloat16, not {config.dtype}")
    for name in ("hidden_size", "expert_intermediate_size"):
        if getattr(config, name) % SIZE_MULTIPLE:
            reasons.append(f"{name} = {getattr(config, name)} must be a multiple of {SIZE_MULTIPLE}")
    return reasons


class _Grouped(torch.autograd.Function):
    """rows [N, A] of L experts times their weights [L, B, A], transposed: [N, B]."""

    @staticmethod
    def forward(ctx: Any, rows_NA: Tensor, weights_LBA: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(rows_NA, weights_LBA)
        ctx.counts = counts
        if rows_NA.shape[0] == 0:
            return rows_NA.new_empty((0, weights_LBA.shape[1]))
        out: Tensor = _gmm()(rows_NA.contiguous(), weights_LBA, _sizes(counts), trans_b=True)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows_NA, weights_LBA = ctx.saved_tensors
        grad_NB, sizes = grads[0].contiguous(), _sizes(ctx.counts)
        if grad_NB.shape[0] == 0:
            return torch.zeros_like(rows_NA), torch.zeros_like(weights_LBA), None
        d_rows = _gmm()(grad_NB, weights_LBA, sizes, trans_b=False) if ctx.needs_input_grad[0] else None
        d_weights = None
        if ctx.needs_input_grad[1]:
            d_weights = _gmm()(grad_NB, rows_NA.contiguous(), sizes, trans_a=True)
            for expert, count in enumerate(ctx.counts):
                if count == 0:  # a product over no rows may be left unwritten
                    d_weights[expert].zero_()
        return d_rows, d_weights, None


def _sizes(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor(counts, dtype=torch.int64)  # on the host, as the library wants them


@functools.cache
def _gmm() -> Any:
    return importlib.import_module("grouped_gemm.backend").gmm


def _missing() -> bool:
    return importlib.util.find_spec("grouped_gemm") is None


def _version() -> str:
    for name in ("grouped-gemm", "nv-grouped-gemm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of an unknown version"

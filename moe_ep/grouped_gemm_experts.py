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
from torch import Tensor

from .config import MoEConfig
from .errors import Unavailable
from .experts_registry import register_experts
from .gemm_experts import SIZE_MULTIPLE, GemmExperts, Products, limit_reasons

INSTALL = "pip install 'moe-ep[grouped-gemm]' (a source package: it needs a CUDA toolkit)"


@register_experts("grouped_gemm")
class GroupedGemmExperts(GemmExperts):
    """Experts on grouped_gemm 0.3: bfloat16, H and I multiples of 8.

    Raises:
        Unavailable: grouped_gemm or a GPU is missing, or sizes or a dtype that its kernels do not take.
    """

    def __init__(self, config: MoEConfig, num_local: int, first_expert: int, layer_index: int) -> None:
        reasons = limit_reasons(config, ("bfloat16",)) or self.machine_reasons()
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

    def products(self) -> Products:
        """See GemmExperts."""
        return GroupedGemm()


class GroupedGemm:
    """The library's products, see `gemm_experts.Products`."""

    def forward(self, rows_NA: Tensor, weights_LBA: Tensor, counts: tuple[int, ...]) -> Tensor:
        """[N, B]."""
        out: Tensor = _gmm()(rows_NA, weights_LBA, _sizes(counts), trans_b=True)
        return out

    def rows_grad(self, grad_NB: Tensor, weights_LBA: Tensor, counts: tuple[int, ...]) -> Tensor:
        """[N, A]."""
        out: Tensor = _gmm()(grad_NB, weights_LBA, _sizes(counts), trans_b=False)
        return out

    def weights_grad(self, grad_NB: Tensor, rows_NA: Tensor, counts: tuple[int, ...]) -> Tensor:
        """[L, B, A]."""
        out: Tensor = _gmm()(grad_NB, rows_NA, _sizes(counts), trans_a=True)
        return out


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

"""`experts = "te"`: SwiGLU on the grouped GEMM of Transformer Engine, the one behind its GroupedLinear.

Its function `general_grouped_gemm` is not part of Transformer Engine's documented interface: another version than those
of `TRIED` is refused.
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

INSTALL = "pip install 'moe-ep[te]'"
TRIED = ("2.12.0",)
DTYPES = ("bfloat16", "float16")


@register_experts("te")
class TEExperts(GemmExperts):
    """Experts on Transformer Engine 2.12: bfloat16 and float16, H and I multiples of 8.

    Raises:
        Unavailable: Transformer Engine or a GPU is missing, or sizes or a dtype that its kernels do not take.
    """

    def __init__(self, config: MoEConfig, num_local: int, first_expert: int, layer_index: int) -> None:
        reasons = limit_reasons(config, DTYPES) or self.machine_reasons()
        if reasons:
            why = "; ".join(reasons)
            raise Unavailable(f"experts = 'te' cannot run here: {why}; or set experts = 'torch'")
        super().__init__(config, num_local, first_expert, layer_index)

    @classmethod
    def findings(cls) -> list[str]:
        """See GroupedExperts."""
        limits = f"Transformer Engine takes {' and '.join(DTYPES)}, and sizes that are multiples of {SIZE_MULTIPLE}"
        return [*([] if _version() is None else [f"transformer-engine {_version()}"]), limits]

    @classmethod
    def machine_reasons(cls) -> list[str]:
        """See GroupedExperts."""
        version = _version()
        if version is None:
            return [f"Transformer Engine is not installed; {INSTALL}"]
        if version not in TRIED:
            return [
                f"Transformer Engine {version} is installed, and its grouped GEMM is called as in {TRIED[0]}; {INSTALL}"
            ]
        return [] if torch.cuda.is_available() else ["Transformer Engine computes on GPUs only, and there is none"]

    def products(self) -> Products:
        """See GemmExperts."""
        return GroupedLinearGemm()


class GroupedLinearGemm:
    """The library's products, see `gemm_experts.Products`. Its first argument is the second factor."""

    def forward(self, rows_NA: Tensor, weights_LBA: Tensor, counts: tuple[int, ...]) -> Tensor:
        """[N, B]."""
        out = rows_NA.new_empty((rows_NA.shape[0], weights_LBA.shape[1]))
        _run(weights_LBA.unbind(), rows_NA.split(counts), [out], counts, layout="TN", single_output=True)
        return out

    def rows_grad(self, grad_NB: Tensor, weights_LBA: Tensor, counts: tuple[int, ...]) -> Tensor:
        """[N, A]."""
        out = grad_NB.new_empty((grad_NB.shape[0], weights_LBA.shape[2]))
        _run(weights_LBA.unbind(), grad_NB.split(counts), [out], counts, layout="NN", single_output=True, grad=True)
        return out

    def weights_grad(self, grad_NB: Tensor, rows_NA: Tensor, counts: tuple[int, ...]) -> Tensor:
        """[L, B, A]."""
        out = grad_NB.new_empty((len(counts), grad_NB.shape[1], rows_NA.shape[1]))
        parts = rows_NA.split(counts), grad_NB.split(counts)
        _run(*parts, list(out.unbind()), counts, layout="NT", grad=True, use_split_accumulator=True)
        return out


def _run(first: Any, second: Any, out: list[Tensor], counts: tuple[int, ...], **how: Any) -> None:
    none = [None] * len(counts)
    _general_grouped_gemm()(list(first), list(second), out, none, out[0].dtype, m_splits=list(counts), **how)


@functools.cache
def _general_grouped_gemm() -> Any:
    return importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_grouped_gemm


def _version() -> str | None:
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    return importlib.metadata.version("transformer-engine").partition("+")[0]

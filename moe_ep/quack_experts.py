"""`experts = "quack"`: what these experts take, what they lack on a machine, and their kernels compiled early."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from . import quack_library
from .config import MoEConfig
from .errors import Unavailable
from .expert_input import ExpertInput
from .experts import GroupedExperts, Weights
from .experts_registry import register_experts
from .quack_mlp import quack_swiglu

DTYPES = (torch.bfloat16, torch.float16)
SIZE_MULTIPLE = 8  # quack's kernels take strides of whole 16 bytes (div_for_dtype of quack/compile_utils.py)


@register_experts("quack")
class QuackExperts(GroupedExperts):
    """Experts on quack-kernels 0.6: bfloat16 and float16, H and I multiples of 8, GPUs from compute capability 9.0.

    Waits for the host nowhere. Each GEMM is deterministic: a rank's results repeat bit for bit. Weight gradients are
    summed in float32 and rounded once to the parameters' dtype. The first construction in a process loads the kernels
    from quack's cache on disk; where they are not there it compiles them, for a minute.

    Raises:
        Unavailable: quack or a GPU for it is missing, or sizes or a dtype that its kernels do not take.
    """

    fresh_grads: ClassVar[bool] = True

    def __init__(self, config: MoEConfig, num_local: int, first_expert: int, layer_index: int) -> None:
        reasons = limit_reasons(config) or quack_library.machine_reasons()
        if reasons:
            raise Unavailable(f"experts = 'quack' cannot run here: {'; '.join(reasons)}; or set experts = 'torch'")
        compile_kernels(getattr(torch, config.dtype), config.weighting == "activation")
        super().__init__(config, num_local, first_expert, layer_index)

    @classmethod
    def findings(cls) -> list[str]:
        """See GroupedExperts."""
        limits = f"quack takes bfloat16 and float16, and sizes that are multiples of {SIZE_MULTIPLE}"
        return [*quack_library.findings(), limits]

    @classmethod
    def machine_reasons(cls) -> list[str]:
        """See GroupedExperts."""
        return quack_library.machine_reasons()

    def compute(self, inp: ExpertInput) -> Tensor:
        """See GroupedExperts.forward."""
        return self.compute_sets(inp, [(self.w_gate_up, self.w_down)])

    def compute_sets(self, inp: ExpertInput, sets: Sequence[Weights]) -> Tensor:
        """See GroupedExperts; a call for each set and product, on the rows as they come."""
        return quack_swiglu(inp, *sets, weight_activation=self.config.weighting == "activation")

    def reserve_refusal(self, device: torch.device) -> str | None:
        """See GroupedExperts."""
        return quack_library.limit_refusal(device, quack_library.load()[0])


def limit_reasons(config: MoEConfig) -> list[str]:
    """Where a configuration exceeds what the kernels take: limit, value, way out."""
    reasons = []
    if getattr(torch, config.dtype) not in DTYPES:
        reasons.append(f"its fused kernels take bfloat16 and float16, not {config.dtype}")
    for name in ("hidden_size", "expert_intermediate_size"):
        if getattr(config, name) % SIZE_MULTIPLE:
            reasons.append(f"{name} = {getattr(config, name)} must be a multiple of {SIZE_MULTIPLE}")
    return reasons


@functools.cache
def compile_kernels(dtype: torch.dtype, weight_activation: bool, device: str = "cuda") -> None:
    """Run each kernel once on a few rows: none is to be compiled in the middle of a step, where other ranks wait.

    Raises:
        Unavailable: one cannot be compiled or run.
    """
    x, w_gate_up, w_down = (
        torch.zeros(size, dtype=dtype, device=device, requires_grad=True)
        for size in ((8, 64), (1, 2 * 64, 64), (1, 64, 64))
    )
    weights = torch.ones(8, device=device, requires_grad=True)
    index = torch.arange(8, dtype=torch.int32, device=device)
    for row_index, positions in ((None, None), (index, index.view(-1, 1))):
        inp = ExpertInput(
            source=x, row_weights=weights, offsets=8 * index[:2], tokens_per_expert=8 * index[1:2], capacity=8,
            row_index=row_index, positions=positions,
        )  # fmt: skip
        try:
            with torch.no_grad():
                quack_swiglu(inp, (w_gate_up, w_down), weight_activation=weight_activation)
            with torch.enable_grad():
                y = quack_swiglu(inp, (w_gate_up, w_down), weight_activation=weight_activation)
                torch.autograd.grad(y, [x, weights, w_gate_up, w_down], torch.zeros_like(y))
        except Exception as err:  # whatever the CUTLASS DSL, ptxas or the driver have to say
            text = " ".join(str(err).split()) or "no message"
            raise Unavailable(
                f"experts = 'quack' cannot run here: its kernels cannot be compiled or run with "
                f"{quack_library.versions()}: {type(err).__name__}: {text}; set experts = 'torch'"
            ) from err

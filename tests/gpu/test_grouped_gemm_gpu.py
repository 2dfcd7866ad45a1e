"""Experts on grouped_gemm and on Transformer Engine against the oracle: idle experts, no rows, NaN where it can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ep.experts_registry import find_experts
from tests.gpu.test_experts_gpu import COUNTS, build, check, make_input

pytestmark = pytest.mark.gpu(1)


@pytest.mark.parametrize("name", ["grouped_gemm", "te"])
@pytest.mark.parametrize("weighting", ["output", "activation"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_equal_to_the_oracle(name: str, counts: tuple[int, ...], weighting: Any) -> None:
    reasons = find_experts(name).machine_reasons()
    if reasons:
        pytest.skip("; ".join(reasons))
    experts = build(name, len(counts), 64, 32, "bfloat16", weighting)
    check(experts, *make_input(counts, 64, torch.bfloat16, tail=5))


@pytest.mark.parametrize(("name", "dtype"), [("grouped_gemm", "bfloat16"), ("te", "bfloat16"), ("te", "float16")])
def test_parity_with_torch(name: str, dtype: str) -> None:
    """16 experts of Qwen3's size, all of them with rows: either side stays within 4 eps of the truth, so 8 between."""
    reasons = find_experts(name).machine_reasons()
    if reasons:
        pytest.skip("; ".join(reasons))
    counts, kind = tuple(300 + 8 * e for e in range(16)), getattr(torch, dtype)
    inp, dy = make_input(counts, 2048, kind, tail=0)
    results = []
    for which in ("torch", name):
        experts = build(which, len(counts), 2048, 768, dtype)
        generator = torch.Generator("cuda").manual_seed(1)
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.normal_(0, 0.02, generator=generator)
        y = experts(inp)
        results.append([y, *torch.autograd.grad(y, [inp.source, inp.row_weights, *experts.parameters()], dy)])
    for i, (want, got) in enumerate(zip(*results, strict=True)):
        cancels = 4 if i == 2 else 1  # <dy, f> is not bounded by its own norm
        error = (got.float() - want.float()).norm() / want.float().norm()
        assert 0 <= error <= 8 * cancels * torch.finfo(kind).eps

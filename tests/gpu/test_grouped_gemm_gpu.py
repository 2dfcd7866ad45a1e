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

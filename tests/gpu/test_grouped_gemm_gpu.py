"""Experts on grouped_gemm's own kernels against the oracle: idle experts, no rows, NaN in tails and in fresh memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ep.grouped_gemm_experts import GroupedGemmExperts
from tests.gpu.test_experts_gpu import COUNTS, build, check, make_input

pytestmark = pytest.mark.gpu(1)


@pytest.mark.parametrize("weighting", ["output", "activation"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_equal_to_the_oracle(counts: tuple[int, ...], weighting: Any) -> None:
    reasons = GroupedGemmExperts.machine_reasons()
    if reasons:
        pytest.skip("; ".join(reasons))
    experts = build("grouped_gemm", len(counts), 64, 32, "bfloat16", weighting)
    check(experts, *make_input(counts, 64, torch.bfloat16, tail=5))

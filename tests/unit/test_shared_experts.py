"""Shared experts: values against the oracle, gradients, initial values, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep.config import MoEConfig
from moe_ep.errors import InputError, RecipeError
from moe_ep.shared_experts import SharedExperts
from moe_ep.testing.oracle import SwiGLUExperts


def shared_config(**keys: Any) -> MoEConfig:
    keys = {"num_shared_experts": 2, "shared_intermediate_size": 3, "dtype": "float64", "init_std": 0.5, **keys}
    return MoEConfig(hidden_size=4, expert_intermediate_size=4, num_experts=2, top_k=1, **keys)


@pytest.mark.parametrize("gate", (False, True))
def test_shared_experts(gate: bool) -> None:
    shared = SharedExperts(shared_config(shared_expert_gate=gate))
    assert [tuple(p.shape) for p in shared.parameters()] == [(12, 4), (4, 6), (4,)][: 2 + gate]
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    oracle = SwiGLUExperts(shared.w_gate_up.detach()[None], shared.w_down.detach()[None])
    want = torch.stack([oracle.forward(0, row) for row in x.detach()])
    if gate:
        assert shared.w_gate is not None
        want = want / (1 + (-(x.detach() * shared.w_gate.detach()).sum(1, keepdim=True)).exp())
    torch.testing.assert_close(shared(x), want)
    parameters = dict(shared.named_parameters())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(shared, dict(zip(parameters, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *parameters.values()))
    y = shared(torch.zeros(0, 4, dtype=torch.float64))
    y.sum().backward()
    assert all(p.grad is not None and p.grad.count_nonzero() == 0 for p in shared.parameters())


def test_shared_experts_initial_values_and_refusals() -> None:
    one, other = SharedExperts(shared_config(), 1), SharedExperts(shared_config(), 2)
    assert torch.equal(one.w_down, SharedExperts(shared_config(), 1).w_down)
    assert not torch.equal(one.w_down, other.w_down)
    half = SharedExperts(shared_config(dtype="bfloat16", shared_expert_gate=True))
    assert half(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(InputError, match=r"H = 4 in torch.bfloat16 got x"):
        half(torch.ones(2, 4))
    with pytest.raises(RecipeError, match="num_shared_experts >= 1, got 0"):
        SharedExperts(shared_config(num_shared_experts=0, shared_intermediate_size=0))

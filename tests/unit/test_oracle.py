"""The oracle is itself held to autograd on dense experts, to closed forms, and to the definition of "no route"."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_ep.testing.oracle import ConstantExperts, RankInput, SwiGLUExperts, run_oracle

E, K, H, INNER = 5, 3, 4, 6


def make_input(num_tokens: int, seed: int, dtype: torch.dtype = torch.float64) -> RankInput:
    gen = torch.Generator().manual_seed(seed)
    return RankInput(
        x=torch.randn(num_tokens, H, generator=gen, dtype=torch.float64).to(dtype),
        expert_ids=torch.randint(-1, E, (num_tokens, K), generator=gen),
        weights=torch.rand(num_tokens, K, generator=gen),
        dy=torch.randn(num_tokens, H, generator=gen, dtype=torch.float64).to(dtype),
    )


def make_experts(seed: int = 7) -> SwiGLUExperts:
    gen = torch.Generator().manual_seed(seed)
    return SwiGLUExperts(
        torch.randn(E, 2 * INNER, H, generator=gen, dtype=torch.float64),
        torch.randn(E, H, INNER, generator=gen, dtype=torch.float64),
    )


def dense(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """Every expert on every token, weighted by the sum of the slots that chose it."""
    gate, up = torch.einsum("eih,th->tei", w_gate_up, x_TH).chunk(2, dim=-1)
    all_TEH = torch.einsum("ehi,tei->teh", w_down, torch.nn.functional.silu(gate) * up)
    chosen = torch.nn.functional.one_hot(ids_TK + 1, E + 1)[..., 1:].double()
    return torch.einsum("tk,tke,teh->th", weights_TK, chosen, all_TEH)


def test_swiglu_equals_autograd_on_dense_experts() -> None:
    inputs = [make_input(tokens, seed) for seed, tokens in enumerate((4, 0, 7))]
    experts = make_experts()
    result = run_oracle(inputs, experts)
    params = [p.clone().requires_grad_() for p in experts.params()]
    for rank, item in enumerate(inputs):
        x = item.x.clone().requires_grad_()
        weights = item.weights.double().requires_grad_()
        y = dense(x, item.expert_ids, weights, *params)
        (y * item.dy).sum().backward()
        torch.testing.assert_close(result.y[rank], y.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(result.dx[rank], x.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(result.dweights[rank], weights.grad, rtol=1e-12, atol=1e-12)
    for got, param in zip(result.dparams, params, strict=True):
        torch.testing.assert_close(got, param.grad, rtol=1e-12, atol=1e-12)


def test_constant_experts_give_closed_forms() -> None:
    x = torch.tensor([[1.0, -2.0], [3.0, 5.0]])
    item = RankInput(
        x=x,
        expert_ids=torch.tensor([[0, 3], [2, 2]]),
        weights=torch.tensor([[0.25, 0.75], [0.5, 0.125]]),
        dy=torch.tensor([[2.0, 0.0], [1.0, 1.0]]),
    )
    result = run_oracle([item], ConstantExperts())
    assert result.dparams == ()
    # token 0: .25 * 1 + .75 * 4 = 3.25; token 1: (.5 + .125) * 3 = 1.875, the same expert twice counts twice
    assert result.y[0].tolist() == [[3.25, -6.5], [5.625, 9.375]]
    assert result.dx[0].tolist() == [[6.5, 0.0], [1.875, 1.875]]
    assert result.dweights[0].tolist() == [[2.0, 8.0], [24.0, 24.0]]
    assert result.y_abs[0].tolist() == [[3.25, 6.5], [5.625, 9.375]]


def test_absolute_sums_do_not_cancel() -> None:
    item = RankInput(
        x=torch.ones(1, 1), expert_ids=torch.tensor([[0, 0]]), weights=torch.tensor([[1.0, -1.0]]), dy=torch.ones(1, 1)
    )
    result = run_oracle([item], ConstantExperts())
    assert (result.y[0].item(), result.y_abs[0].item()) == (0.0, 2.0)
    assert (result.dx[0].item(), result.dx_abs[0].item()) == (0.0, 2.0)


def test_no_route_is_nothing_whatever_its_weight() -> None:
    item = RankInput(
        x=torch.ones(2, 3),
        expert_ids=torch.tensor([[-1, 1], [-1, -1]]),
        weights=torch.tensor([[float("nan"), 2.0], [float("inf"), 1.0]]),
        dy=torch.ones(2, 3),
    )
    result = run_oracle([item], ConstantExperts())
    assert result.y[0].tolist() == [[4.0] * 3, [0.0] * 3]
    assert result.dx[0].tolist() == [[4.0] * 3, [0.0] * 3]
    assert result.dweights[0].tolist() == [[0.0, 6.0], [0.0, 0.0]]


def test_low_precision_inputs_are_widened_exactly() -> None:
    item = make_input(5, 3, torch.bfloat16)
    wide = RankInput(x=item.x.double(), expert_ids=item.expert_ids, weights=item.weights.double(), dy=item.dy.double())
    narrow_result, wide_result = (run_oracle([one], make_experts()) for one in (item, wide))
    assert torch.equal(narrow_result.y[0], wide_result.y[0])
    assert torch.equal(narrow_result.dweights[0], wide_result.dweights[0])


def test_an_id_beyond_the_experts_is_refused() -> None:
    item = make_input(1, 0)
    bad = RankInput(x=item.x, expert_ids=torch.full((1, K), E), weights=item.weights, dy=item.dy)
    with pytest.raises(IndexError):
        run_oracle([bad], make_experts())

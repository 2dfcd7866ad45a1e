"""Learning rate, AdamW over shards and the gradient norm, on one rank."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from moe_ep.gradients import clip_, global_norm
from recipes.optim import BETAS, EPS, ShardedAdamW, learning_rate, owned_parameters

CPU = torch.device("cpu")


def owned(**named: nn.Parameter):
    return owned_parameters(named.items(), set(), 0)


def test_rate_rises_to_the_peak_then_falls_to_the_floor():
    rates = [learning_rate(step, peak=1.0, floor=0.1, warmup=4, total=12) for step in range(1, 13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[7] == pytest.approx(0.1 + 0.9 / 2)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[3:] == sorted(rates[3:], reverse=True)


@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (5, 5), (10, 4)])
def test_rate_is_finite_at_the_edges(warmup, total):
    rates = [learning_rate(step, peak=1.0, floor=0.0, warmup=warmup, total=total) for step in range(1, total + 1)]
    assert all(0 <= rate <= 1 for rate in rates)


@pytest.mark.parametrize(("norm_type", "expected"), [(1.0, 3 + 4 + 12), (2.0, 13.0), (math.inf, 12.0)])
def test_norm_of_mixed_dtypes_and_empty_shards(norm_type, expected):
    grads = [
        torch.tensor([3.0, 0.0]),
        torch.tensor([-4.0], dtype=torch.bfloat16),
        torch.empty(0, 5),
        torch.tensor(12.0),
    ]
    assert global_norm(grads, norm_type, None, CPU).item() == pytest.approx(expected)


def test_norm_of_nothing_is_zero():
    assert global_norm([], 2.0, None, CPU).item() == 0


def test_clip_scales_down_and_never_up():
    grads = [torch.tensor([3.0]), torch.tensor([4.0])]
    clip_(grads, global_norm(grads, 2.0, None, CPU), 1.0)
    assert [g.item() for g in grads] == pytest.approx([0.6, 0.8], rel=1e-5)
    clip_(grads, global_norm(grads, 2.0, None, CPU), 10.0)
    assert [g.item() for g in grads] == pytest.approx([0.6, 0.8], rel=1e-5)


def test_adamw_follows_its_formula_and_decays_matrices_only():
    matrix, vector = nn.Parameter(torch.full((2, 2), 2.0)), nn.Parameter(torch.full((2,), 2.0))
    optimizer = ShardedAdamW(owned(matrix=matrix, vector=vector), weight_decay=0.5)
    expected = {"matrix": 2.0, "vector": 2.0}
    first = second = 0.0
    for step in (1, 2, 3):
        for param in (matrix, vector):
            param.grad = torch.full_like(param, float(step))
        optimizer.gradients()
        optimizer.step(0.1)
        first = BETAS[0] * first + (1 - BETAS[0]) * step
        second = BETAS[1] * second + (1 - BETAS[1]) * step * step
        move = first / (1 - BETAS[0] ** step) / (math.sqrt(second / (1 - BETAS[1] ** step)) + EPS)
        expected = {
            "matrix": expected["matrix"] * (1 - 0.1 * 0.5) - 0.1 * move,
            "vector": expected["vector"] - 0.1 * move,
        }
    assert matrix[0, 0].item() == pytest.approx(expected["matrix"], rel=1e-5)
    assert vector[0].item() == pytest.approx(expected["vector"], rel=1e-5)
    assert matrix.grad is None


def test_a_parameter_without_gradient_is_stepped_with_zero():
    used, unused = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = ShardedAdamW(owned(used=used, unused=unused), weight_decay=0.0)
    used.grad = torch.ones(2, 2)
    assert [g.sum().item() for g in optimizer.gradients()] == [4.0, 0.0]
    optimizer.step(0.1)
    assert unused.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert used[0, 0].item() == pytest.approx(0.9)


def test_low_precision_keeps_float32_masters_and_sums_gradients_in_float32():
    param = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = ShardedAdamW(owned(param=param), weight_decay=0.0)
    # 1 + 2^-9 is 1 in bfloat16: a bfloat16 sum would lose the small pieces
    for piece in (1.0, 2**-9, 2**-9):
        (param * piece).sum().backward()
    assert optimizer.gradients()[0][0, 0].item() == 1.0 + 2**-8
    for _ in range(8):  # each step is below bfloat16's resolution at 1, eight are not
        param.grad = None
        (param * 1.0).sum().backward()
        optimizer.gradients()
        optimizer.step(1e-3)
    assert param.dtype == torch.bfloat16
    assert param[0, 0].item() == pytest.approx(1 - 8e-3, abs=2**-8)
    assert param[0, 0].item() < 1

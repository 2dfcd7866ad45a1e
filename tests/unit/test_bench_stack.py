"""Sizes of a measured stack's attention."""

from __future__ import annotations

import pytest
import torch

from moe_ep import MoEConfig
from moe_ep.router import build_router
from tools.bench_layer import ScriptedRouter
from tools.bench_stack import parse_attention
from tools.shapes import PRESETS, Shape


@pytest.mark.parametrize(
    ("preset", "sizes"), [("dsv3", "56,7,128,4096"), ("qwen3", "16,2,128,4096"), ("mixtral", "32,4,128,4096")]
)
def test_attention_follows_the_shape(preset: str, sizes: str) -> None:
    assert str(parse_attention("gqa", PRESETS[preset])) == f"gqa:{sizes}"
    assert parse_attention("none", PRESETS[preset]) is None


def test_attention_of_a_small_shape_and_of_stated_sizes() -> None:
    small = Shape(T=24, H=16, I=8, E=4, K=2)
    assert str(parse_attention("gqa", small)) == "gqa:1,1,16,24"
    assert str(parse_attention("gqa:4,2,6,12", small)) == "gqa:4,2,6,12"


def test_a_rounding_of_x_moves_weights_by_a_rounding() -> None:
    """Whatever the router would have chosen: of its own two best here one or the other is the first."""
    router = build_router(MoEConfig(hidden_size=2, expert_intermediate_size=4, num_experts=4, top_k=2), 0)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -2]]))
    scripted, x = ScriptedRouter(router), torch.tensor([[1.0, 1.001], [1.001, 1.0]])
    ids = torch.tensor([[2, 0], [2, 0]])
    scripted.script = [ids]
    routing, _ = scripted(x)
    assert routing.expert_ids is ids and not scripted.script
    assert (routing.weights[0] - routing.weights[1]).abs().max() < 1e-3
    assert routing.weights[:, 1].min() > 0.8  # exp(1) against exp(-1)

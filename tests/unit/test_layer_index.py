"""Layers of one model have numbers of their own: with one number their experts and routers would begin equal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from moe_ep import DominoLayer, DominoStack, MoEConfig, MoELayer, RecipeError, update_routers

CONFIG = MoEConfig(hidden_size=8, expert_intermediate_size=8, num_experts=4, top_k=2)


class Bare(DominoLayer):
    """Attention is nothing."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.moe = MoELayer(CONFIG, layer_index=index)

    def attention(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def bare_layers(*indices: int) -> list[nn.Module]:
    return [Bare(index) for index in indices]


def extended() -> nn.Module:
    stack = DominoStack(bare_layers(0, 1))
    stack.layers.extend(bare_layers(1))
    return stack


def step(model: nn.Module) -> None:
    for layer in [m for m in model.modules() if isinstance(m, MoELayer)]:
        layer(torch.ones(3, 8))
    update_routers(model, None)


EQUAL: dict[str, tuple[Callable[[], object], str]] = {
    "a stack": (lambda: DominoStack(bare_layers(0, 1, 0)), r"layers.0.moe and layers.2.moe .* layer_index = 0"),
    "default": (lambda: step(nn.ModuleList(MoELayer(CONFIG) for _ in range(2))), "0 and 1 both have layer_index = 0"),
    "two stacks": (lambda: step(nn.ModuleList([DominoStack(bare_layers(3)), *bare_layers(3)])), "layer_index = 3"),
    "an extended stack": (lambda: step(extended()), r"layers.1.moe and layers.2.moe both have layer_index = 1"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_two_layers_with_one_number_are_refused(name: str) -> None:
    build, said = EQUAL[name]
    with pytest.raises(RecipeError, match=said):
        build()


def test_layers_with_numbers_of_their_own_differ_and_one_layer_may_stand_twice() -> None:
    first, second = bare_layers(0, 1)
    stack = DominoStack([first, second, first])
    step(stack)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert not any(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("index", [-1, 65536, "3", 1.0])
def test_what_is_no_number_of_a_layer_is_refused(index: object) -> None:
    with pytest.raises(RecipeError, match=rf"layer_index must be an int in \[0, 65536\), got {index!r}; number the"):
        MoELayer(CONFIG, layer_index=index)


def test_fields_in_place_of_a_configuration_are_refused() -> None:
    with pytest.raises(RecipeError, match="config must be a MoEConfig, got dict; write MoEConfig"):
        MoELayer({"hidden_size": 8, "num_experts": 4})

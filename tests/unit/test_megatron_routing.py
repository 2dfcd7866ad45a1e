"""Megatron's routing map and rows between its conventions and ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ep import ExpertInput, InputError, RecipeError

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (moe-ep[megatron])")

from moe_ep.integrations.megatron_dispatcher import expert_arguments, routing_of, with_tail
from moe_ep.integrations.megatron_layer import MegatronMoELayer, expert_output

MAP = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]]).bool()


def test_ids_ascend_and_slots_left_over_have_no_route() -> None:
    probs = torch.arange(16.0).view(4, 4).requires_grad_()
    routing = routing_of(MAP, probs, 2)
    assert routing.expert_ids.tolist() == [[1, 3], [0, -1], [-1, -1], [2, 3]]
    assert routing.weights.tolist() == [[1, 3], [4, 0], [0, 0], [14, 15]]
    assert routing.num_experts == 4
    routing.weights.sum().backward()
    assert torch.equal(probs.grad, MAP.float())


def test_a_token_with_more_experts_than_k_gets_ids_that_are_refused() -> None:
    routing = routing_of(MAP | (torch.arange(4)[:, None] == 1), torch.ones(4, 4), 2)
    assert routing.expert_ids.tolist() == [[1, 3], [4, 4], [-1, -1], [2, 3]]


def test_every_expert_of_a_token_is_fine_where_k_is_all() -> None:
    routing = routing_of(torch.ones(2, 3).bool(), torch.ones(2, 3).bfloat16(), 3)
    assert routing.expert_ids.tolist() == [[0, 1, 2]] * 2
    assert routing.weights.dtype == torch.float32


def test_no_tokens() -> None:
    assert routing_of(MAP[:0], torch.ones(0, 4), 2).expert_ids.shape == (0, 2)


@pytest.mark.parametrize("bad", [MAP.int(), MAP[0], MAP[:, :3]])
def test_a_map_of_another_kind_is_refused(bad: torch.Tensor) -> None:
    with pytest.raises(InputError, match="routing_map must be bool"):
        routing_of(bad, torch.ones(4, 4), 2)


def test_the_tail_is_cut_off_for_megatrons_experts_and_put_back() -> None:
    rows = torch.arange(10.0).view(5, 2)
    given = ExpertInput(
        source=rows,
        row_weights=torch.tensor([1.0, 2.0, 3.0, float("nan"), float("nan")]),
        offsets=torch.tensor([0, 1, 3], dtype=torch.int32),
        tokens_per_expert=torch.tensor([1, 2], dtype=torch.int32),
        capacity=5,
    )
    taken, counts, weights = expert_arguments(given, torch.bfloat16)
    assert torch.equal(taken, rows[:3])
    assert counts.tolist() == [1, 2] and counts.dtype == torch.int64
    assert weights.tolist() == [1, 2, 3] and weights.dtype == torch.bfloat16
    assert with_tail(taken, 5).shape == (5, 2)
    assert with_tail(taken, 3) is taken


@pytest.mark.parametrize(("number", "mtp", "index"), [(1, False, 0), (3, False, 2), (1, True, 4), (2, True, 5)])
def test_layers_of_multi_token_prediction_are_behind_the_decoders(number: int, mtp: bool, index: int) -> None:
    """0.19 counts them from 1 again, and ranks compare the number."""
    layer: Any = SimpleNamespace(config=SimpleNamespace(num_layers=4), is_mtp_layer=mtp)
    assert MegatronMoELayer._index(layer, number) == index


def test_a_bias_that_experts_hand_out_is_refused_and_not_lost() -> None:
    rows, counts, probs = torch.ones(2, 4), torch.tensor([2]), torch.ones(2)
    layer: Any = SimpleNamespace(experts=lambda *given: (given[0], None))
    assert expert_output(layer, rows, counts, probs) is rows
    layer.experts = lambda *given: (given[0], torch.ones(4))
    with pytest.raises(RecipeError, match="set add_bias_linear = False"):
        expert_output(layer, rows, counts, probs)

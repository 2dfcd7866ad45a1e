"""Routing: what it accepts, what it refuses and with which words; counting bad ids."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from moe_ep.errors import InputError
from moe_ep.expert_input import ExpertInput
from moe_ep.flights import MoEAux
from moe_ep.losses import RouterAux
from moe_ep.routing import Routing, count_bad_ids


def make(ids: Tensor, weights: Tensor | None = None, num_experts: int = 300) -> Routing:
    return Routing(
        expert_ids=ids, weights=torch.ones(ids.shape) if weights is None else weights, num_experts=num_experts
    )


@given(
    ids=st.integers(0, 5).flatmap(
        lambda k: st.lists(st.lists(st.integers(-3, 9), min_size=k, max_size=k), min_size=0, max_size=6).map(
            lambda rows: torch.tensor(rows, dtype=torch.int64).reshape(len(rows), k)
        )
    ),
    num_experts=st.integers(1, 8),
)
def test_bad_ids_are_those_below_minus_one_and_from_num_experts_on(ids: Tensor, num_experts: int) -> None:
    routing = make(ids, num_experts=num_experts)
    want = sum(value < -1 or value >= num_experts for value in ids.flatten().tolist())
    assert count_bad_ids(routing).item() == want
    assert (routing.num_tokens, routing.top_k) == tuple(ids.shape)


def test_int32_ids_are_widened_and_keep_their_values() -> None:
    ids = torch.tensor([[299, -1], [256, 0]], dtype=torch.int32)
    routing = make(ids)
    assert routing.expert_ids.dtype == torch.int64
    assert routing.expert_ids.tolist() == [[299, -1], [256, 0]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.bool])
def test_other_id_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=rf"expert_ids must be int64 or int32, got {dtype}; call .long\(\) on them"):
        make(torch.zeros(2, 2, dtype=dtype), torch.ones(2, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_another_dtype_are_refused_not_cast(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=rf"routing weights must be float32, got {dtype}; keep the router in float32"):
        make(torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=dtype))


@pytest.mark.parametrize(
    ("ids_shape", "weights_shape"), [((2, 2), (2, 3)), ((4,), (4,)), ((0, 2), (1, 2)), ((2,), (2, 1))]
)
def test_shapes_that_do_not_fit_are_named(ids_shape: tuple[int, ...], weights_shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"must both be \[T, K\], got \(.*\) and \(.*\)"):
        make(torch.zeros(ids_shape, dtype=torch.int64), torch.ones(weights_shape))


def test_two_devices_are_refused() -> None:
    with pytest.raises(InputError, match="expert_ids are on cpu, weights on meta"):
        make(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, device="meta"))


def test_no_experts_are_refused() -> None:
    with pytest.raises(InputError, match="num_experts must be at least 1, got 0"):
        make(torch.zeros(1, 1, dtype=torch.int64), num_experts=0)


def test_a_routing_cannot_be_changed() -> None:
    routing = make(torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(dataclasses.FrozenInstanceError):
        routing.num_experts = 2  # type: ignore[misc]


def test_weights_keep_their_graph() -> None:
    weights = torch.ones(2, 1, requires_grad=True)
    make(torch.zeros(2, 1, dtype=torch.int64), weights).weights.sum().backward()
    assert weights.grad is not None


def test_values_that_modules_exchange_show_their_tensors_to_frameworks() -> None:
    """FSDP2 gathers a module's weights for backward through hooks on the tensors it finds in the module's output."""
    ids, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    routing = Routing(expert_ids=ids, weights=weights, num_experts=3)
    counts = torch.tensor([2, 0, 0], dtype=torch.int32)
    rows = ExpertInput(
        source=torch.ones(2, 4), row_weights=torch.ones(2), offsets=torch.zeros(4), tokens_per_expert=counts, capacity=2
    )
    zero = torch.zeros(())
    aux = RouterAux(aux_loss=zero, z_loss=zero, loss=torch.ones(()), load=counts, num_tokens=zero)
    layer_aux = MoEAux(
        loss=torch.ones(()), aux_loss=zero, z_loss=zero, load=counts, num_tokens=zero, cross_rank_routes=zero,
        rank_load=counts, replicas=zero,
    )  # fmt: skip
    for value, tensor in ((routing, weights), (rows, rows.source), (aux, aux.loss), (layer_aux, layer_aux.loss)):
        assert any(leaf is tensor for leaf in pytree.tree_leaves(value)), type(value).__name__
        assert type(pytree.tree_map(lambda leaf: leaf, value)) is type(value)

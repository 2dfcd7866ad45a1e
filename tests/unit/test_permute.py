"""Row movement: gather and sum are each other's transpose, sorting is a stable bijection, tails are never read."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_ep.expert_input import ExpertInput
from moe_ep.permute import gather_routes, gather_rows, sum_rows
from moe_ep.sorted_routes import make_offsets, sort_routes

NAN = float("nan")


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, int]:
    """ids [T, K] in [-1, E): T may be 0, K may be 1, experts may be empty or hold everything, duplicates are common."""
    num_experts = draw(st.integers(1, 7))
    top_k = draw(st.integers(1, 4))
    low, high = sorted((draw(st.integers(-1, num_experts - 1)), draw(st.integers(-1, num_experts - 1))))
    rows = draw(st.lists(st.lists(st.integers(low, high), min_size=top_k, max_size=top_k), max_size=8))
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), top_k), num_experts


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers: sums of them are exact in any order, so equality can be demanded."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(routing=routings())
def test_sort_is_stable_by_expert_token_slot(routing: tuple[Tensor, int]) -> None:
    ids, num_experts = routing
    top_k = ids.shape[1]
    want = sorted((e, t, k) for t, row in enumerate(ids.tolist()) for k, e in enumerate(row) if e >= 0)
    routes = sort_routes(ids, num_experts)
    tail = [-1] * (ids.numel() - len(want))
    assert routes.row_token.tolist() == [t for _, t, _ in want] + tail
    assert routes.row_slot.tolist() == [t * top_k + k for _, t, k in want] + tail
    assert routes.counts.tolist() == [sum(e == expert for e, _, _ in want) for expert in range(num_experts)]


@given(routing=routings())
def test_positions_are_the_inverse_of_the_sort(routing: tuple[Tensor, int]) -> None:
    ids, num_experts = routing
    routes = sort_routes(ids, num_experts)
    flat = routes.positions.flatten().tolist()
    placed = {place: slot for slot, place in enumerate(flat) if place >= 0}
    assert sorted(placed) == list(range(int((ids >= 0).sum())))
    assert [placed[n] for n in sorted(placed)] == [slot for slot in routes.row_slot.tolist() if slot >= 0]
    assert [place < 0 for place in flat] == [e < 0 for e in ids.flatten().tolist()]


def test_ids_outside_the_experts_have_no_route() -> None:
    routes = sort_routes(torch.tensor([[5, 0], [-7, 2]]), 2)
    assert routes.counts.tolist() == [1, 0]
    assert routes.positions.tolist() == [[-1, 0], [-1, -1]]
    assert routes.row_token.tolist() == [0, -1, -1, -1]


@given(routing=routings(), seed=st.integers(0, 99))
def test_gather_and_sum_are_transposes(routing: tuple[Tensor, int], seed: int) -> None:
    """<gather(x), g> == <x, sum(g)>, exactly, and each one's backward is the other's forward."""
    ids, num_experts = routing
    routes = sort_routes(ids, num_experts)
    index, places = routes.row_token, routes.positions
    x = integers(ids.shape[0], 3, seed=seed).requires_grad_()
    g = integers(ids.numel(), 3, seed=seed + 1).requires_grad_()
    gathered, summed = gather_rows(x, index, places), sum_rows(g, index, places)
    assert (gathered * g.detach()).sum().item() == (x.detach() * summed).sum().item()
    (dx,) = torch.autograd.grad(gathered, x, g.detach())
    (dg,) = torch.autograd.grad(summed, g, x.detach())
    assert torch.equal(dx, summed.detach())
    assert torch.equal(dg, gathered.detach())


@given(
    routing=routings(), seed=st.integers(0, 99), wanted=st.sampled_from([(True, True), (True, False), (False, True)])
)
def test_rows_and_weights_of_routes_are_gathered_as_each_alone(
    routing: tuple[Tensor, int], seed: int, wanted: tuple[bool, bool]
) -> None:
    ids, num_experts = routing
    routes = sort_routes(ids, num_experts)
    x, weights = integers(ids.shape[0], 3, seed=seed), integers(*ids.shape, seed=seed + 1)
    for tensor, needed in zip((x, weights), wanted, strict=True):
        tensor.requires_grad_(needed)
    both = gather_routes(x, weights, routes)
    apart = (
        gather_rows(x, routes.row_token, routes.positions),
        gather_rows(weights.view(-1), routes.row_slot, routes.positions.view(-1, 1)),
    )
    leaves = [tensor for tensor, needed in zip((x, weights), wanted, strict=True) if needed]
    grads = [integers(*out.shape, seed=seed + 2) for out in apart]
    sums = (sum((out * grad).sum() for out, grad in zip(outs, grads, strict=True)) for outs in (both, apart))
    assert all(torch.equal(one, other) for one, other in zip(both, apart, strict=True))
    for one, other in zip(*(torch.autograd.grad(total, leaves) for total in sums), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        assert all(out.grad_fn is None for out in gather_routes(x, weights, routes))


@given(routing=routings(), seed=st.integers(0, 99))
def test_gather_then_sum_counts_the_routes(routing: tuple[Tensor, int], seed: int) -> None:
    ids, num_experts = routing
    routes = sort_routes(ids, num_experts)
    x = integers(ids.shape[0], 2, seed=seed)
    back = sum_rows(gather_rows(x, routes.row_token, routes.positions), routes.row_token, routes.positions)
    assert torch.equal(back, x * (ids >= 0).sum(1, keepdim=True))


@given(routing=routings(), seed=st.integers(0, 99))
def test_a_poisoned_tail_is_never_read(routing: tuple[Tensor, int], seed: int) -> None:
    ids, num_experts = routing
    routes = sort_routes(ids, num_experts)
    tail = routes.row_token < 0
    rows = integers(ids.numel(), 3, seed=seed)
    poisoned = rows.masked_fill(tail[:, None], NAN)
    args = (routes.row_token, routes.positions)
    assert torch.equal(sum_rows(poisoned, *args), sum_rows(rows, *args))
    x = integers(ids.shape[0], 3, seed=seed).requires_grad_()
    gathered = gather_rows(x, *args)
    assert not gathered[tail].any()
    (dx,) = torch.autograd.grad(gathered, x, poisoned)
    assert dx.isfinite().all()


def test_a_row_that_is_nan_in_x_stays_where_it_is() -> None:
    """A token without routes may hold anything; a token with routes keeps its NaN to itself."""
    routes = sort_routes(torch.tensor([[0], [-1], [1]]), 2)
    x = torch.tensor([[1.0], [NAN], [3.0]])
    rows = gather_rows(x, routes.row_token, routes.positions)
    assert rows.flatten().tolist() == [1.0, 3.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_sums_are_float32_and_rounded_once(dtype: torch.dtype) -> None:
    """1 + 64 times 2^-10: adding in bfloat16 (or float16, in halves of its last place) would lose every small term."""
    small = 2.0**-10 if dtype == torch.bfloat16 else 2.0**-12
    rows = torch.tensor([[1.0]] + [[small]] * 64, dtype=dtype)
    index = torch.zeros(65, dtype=torch.int64)
    places = torch.arange(65).view(1, 65)
    assert sum_rows(rows, index, places).item() == 1 + 64 * small
    x = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    (dx,) = torch.autograd.grad(gather_rows(x, index, places), x, rows)
    assert dx.item() == 1 + 64 * small


def test_the_order_of_a_sum_is_j_ascending() -> None:
    rows = torch.tensor([[1e8], [1.0], [-1e8]])
    index = torch.zeros(3, dtype=torch.int64)
    orders = torch.tensor([[0, 1, 2], [0, 2, 1]])
    assert [sum_rows(rows, index, places.view(1, 3)).item() for places in orders] == [0.0, 1.0]


def test_float64_is_summed_in_float64() -> None:
    rows = torch.tensor([[1.0], [2.0**-40]], dtype=torch.float64)
    assert sum_rows(rows, torch.zeros(2, dtype=torch.int64), torch.tensor([[0, 1]])).item() == 1 + 2.0**-40


def test_expanded_and_transposed_gradients() -> None:
    ids = torch.tensor([[0, 1], [1, 1]])
    routes = sort_routes(ids, 2)
    x = integers(2, 3, seed=1).requires_grad_()
    rows = gather_rows(x, routes.row_token, routes.positions)
    (dx,) = torch.autograd.grad(rows.sum(), x, retain_graph=True)  # a gradient with stride 0
    assert dx.tolist() == [[2.0] * 3] * 2
    (dx,) = torch.autograd.grad(rows.t().contiguous().sum(), x)
    assert dx.tolist() == [[2.0] * 3] * 2


def test_views_of_x_are_gathered_as_they_are() -> None:
    routes = sort_routes(torch.tensor([[1], [0]]), 2)
    base = integers(3, 4, seed=2)
    for x in (base.t()[:2], base[1:], base[::2]):
        got = gather_rows(x, routes.row_token, routes.positions)
        assert torch.equal(got, x.contiguous()[[1, 0]])


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=6), dtype=st.sampled_from([torch.int32, torch.int64]))
def test_offsets_are_prefix_sums_with_the_total_behind(counts: list[int], dtype: torch.dtype) -> None:
    offsets = make_offsets(torch.tensor(counts, dtype=dtype))
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == [sum(counts[:i]) for i in range(len(counts) + 1)]


def test_expert_input_expands_unique_rows_and_leaves_grouped_ones_alone() -> None:
    source = integers(2, 3, seed=3)
    shape = {
        "row_weights": torch.ones(3),
        "offsets": torch.tensor([0, 1, 3], dtype=torch.int32),
        "tokens_per_expert": torch.tensor([1, 2], dtype=torch.int32),
        "capacity": 4,
    }
    grouped = ExpertInput(source=source, **shape)
    assert grouped.rows() is source and grouped.num_local_experts == 2
    index = torch.tensor([1, 0, 1, -1], dtype=torch.int32)
    unique = ExpertInput(source=source, row_index=index, positions=torch.tensor([[1, -1], [0, 2]]), **shape)
    want = torch.cat([source[[1, 0, 1]], torch.zeros(1, 3)])
    assert torch.equal(unique.rows(), want)


def test_empty_everything() -> None:
    routes = sort_routes(torch.zeros(0, 2, dtype=torch.int64), 3)
    x = torch.zeros(0, 4, requires_grad=True)
    rows = gather_rows(x, routes.row_token, routes.positions)
    y = sum_rows(rows, routes.row_token, routes.positions)
    y.sum().backward()
    assert (rows.shape, y.shape) == ((0, 4), (0, 4))
    assert x.grad is not None and x.grad.shape == (0, 4)
    assert routes.counts.tolist() == [0, 0, 0]
    # rows that all lack a source: U = 0 while N is a capacity
    assert gather_rows(x, torch.full((3,), -1), routes.positions).tolist() == [[0.0] * 4] * 3
    assert math.prod(routes.positions.shape) == 0

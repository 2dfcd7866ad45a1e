"""Shapes and routings of benchmarks: parsing, exact balance for every EP size, skew reached by bisection."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep.errors import RecipeError
from moe_ep.load import expert_load, imbalance, rank_load
from moe_ep.replica import plan
from tools.shapes import PRESETS, Shape, Workload, make_workload, parse_shape


def loads(workload: Workload, iteration: int = 0) -> torch.Tensor:
    """Routes from each source to each expert, [R, E]."""
    shape = workload.shape
    return torch.stack([expert_load(workload.ids(r, iteration), shape.E) for r in range(workload.num_ranks)])


def assert_no_repeats(ids_TK: torch.Tensor, num_experts: int) -> None:
    ordered = ids_TK.sort(1).values
    assert (ordered[:, 1:] != ordered[:, :-1]).all()
    assert ordered.min() >= 0 and ordered.max() < num_experts


def spread(load: torch.Tensor) -> int:
    return int((load.amax(-1) - load.amin(-1)).max())


def test_presets_and_numbers() -> None:
    assert parse_shape("dsv3") == (4096, 7168, 2048, 64, 8)
    assert parse_shape("dsv3_full") == PRESETS["dsv3"]._replace(E=256)
    assert parse_shape("64, 32,48,8,2") == Shape(T=64, H=32, I=48, E=8, K=2)


@pytest.mark.parametrize("text", ["dsv4", "1,2,3,4", "1,2,3,4,5,6", "1,2,3,x,5", "0,2,3,4,1", "8,8,8,4,5", ""])
def test_a_bad_shape_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(RecipeError, match=f"shape '{text}'"):
        parse_shape(text)


def test_the_nearest_preset_is_named() -> None:
    with pytest.raises(RecipeError, match="did you mean 'qwen3'"):
        parse_shape("qwen")


@pytest.mark.parametrize("tokens", [8, 100])
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16, 32])
def test_balanced_ranks_differ_by_one_route(num_ranks: int, tokens: int) -> None:
    """256 experts, top-8, up to 32 ranks: E // K = 32 apart, every other rank would get no token."""
    workload = make_workload(Shape(tokens, 1, 1, 256, 8), num_ranks, 1.0, seed=1)
    load_RE = loads(workload)
    load_RR = rank_load(load_RE, num_ranks)
    assert spread(load_RR) <= 1 and spread(load_RR.sum(0)) <= 1 and spread(load_RE) <= 1
    assert workload.check_load(load_RR.sum(0)) == float(imbalance(load_RR.sum(0)))


def test_even_spacing_is_what_the_check_finds() -> None:
    token = torch.arange(8)[:, None]
    ids = (torch.arange(8) * 32 + token) % 256  # sgl-project/sglang#37741
    load_R = rank_load(expert_load(ids, 256), 16)
    assert (load_R[1::2] == 0).all()
    workload = make_workload(Shape(8, 1, 1, 256, 8), 16, 1.0, seed=0)
    with pytest.raises(AssertionError, match="8 apart"):
        workload.check_load(load_R)


@given(
    tokens=st.integers(1, 40),
    num_local=st.integers(1, 6),
    num_ranks=st.integers(1, 5),
    top_k=st.integers(1, 30),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_balance_holds_for_any_sizes(tokens: int, num_local: int, num_ranks: int, top_k: int, seed: int) -> None:
    num_experts = num_local * num_ranks
    shape = Shape(tokens, 1, 1, num_experts, min(top_k, num_experts))
    workload = make_workload(shape, num_ranks, 1.0, seed)
    for rank in range(num_ranks):
        assert_no_repeats(workload.ids(rank, 0), num_experts)
    load_RE = loads(workload)
    load_RR = rank_load(load_RE, num_ranks)
    assert spread(load_RE) <= 1 and spread(load_RR) <= 1 and spread(load_RR.sum(0)) <= 1


@pytest.mark.parametrize("skew", [1.05, 1.5, 1.9, 2.0])
def test_skew_is_reached(skew: float) -> None:
    shape = Shape(2000, 1, 1, 16, 4)
    workload = make_workload(shape, 2, skew, seed=5)
    for iteration in (0, 1):
        load_R = rank_load(loads(workload, iteration).sum(0), 2)
        assert workload.check_load(load_R) == pytest.approx(skew, abs=0.03)
    assert_no_repeats(workload.ids(1, 0), 16)


def test_experts_of_a_rank_differ_in_popularity() -> None:
    load_E = loads(make_workload(Shape(2000, 1, 1, 16, 4), 2, 1.5, seed=5)).sum(0).double()
    assert load_E[:8].max() > 1.2 * load_E[:8].min() and load_E[8:].max() > 1.2 * load_E[8:].min()


def test_skew_over_more_ranks_than_the_bisection_looks_at() -> None:
    workload = make_workload(Shape(1000, 1, 1, 32, 2), 8, 3.0, seed=0)
    assert workload.check_load(rank_load(loads(workload, 2).sum(0), 8)) == pytest.approx(3.0, abs=0.2)


def test_a_load_off_target_is_refused() -> None:
    workload = make_workload(Shape(2000, 1, 1, 16, 4), 2, 1.5, seed=5)
    with pytest.raises(AssertionError, match=r"skew 1\.000 instead of 1\.5"):
        workload.check_load(torch.tensor([8000, 8000]))


@pytest.mark.parametrize(
    ("num_ranks", "skew", "most"), [(2, 2.1, "2"), (2, 0.9, "2"), (8, 4.0, "2"), (1, 1.5, "1"), (2, float("nan"), "2")]
)
def test_an_impossible_skew_is_refused_with_the_limit(num_ranks: int, skew: float, most: str) -> None:
    with pytest.raises(RecipeError, match=rf"skew {skew:g} lies outside \[1, {most}\]"):
        make_workload(Shape(64, 1, 1, 16, 8), num_ranks, skew, seed=0)


def test_ranks_must_divide_the_experts() -> None:
    with pytest.raises(RecipeError, match="E = 8 is not divisible by the 3 ranks"):
        make_workload(Shape(8, 1, 1, 8, 2), 3, 1.0, seed=0)


def test_every_rank_and_iteration_draws_its_own_and_repeats_it() -> None:
    workload = make_workload(Shape(64, 1, 1, 8, 2), 2, 1.0, seed=0)
    draws = [workload.ids(rank, iteration) for rank in range(2) for iteration in range(3)]
    assert all(not torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])
    assert torch.equal(draws[-1], workload.ids(1, 2))
    other_seed = make_workload(Shape(64, 1, 1, 8, 2), 2, 1.0, seed=1)
    assert not torch.equal(other_seed.ids(0, 0), draws[0])


def test_weights_sum_to_one_and_none_vanishes() -> None:
    routing = make_workload(Shape(64, 1, 1, 8, 3), 2, 1.0, seed=0).routing(1, 0)
    torch.testing.assert_close(routing.weights.sum(1), torch.ones(64))
    assert routing.weights.min() > 0.03


@pytest.mark.parametrize(
    ("shape", "hot", "skew"), [("qwen3", 4, 1.7), ("dsv3", 4, 1.6), ("dsv3", 1, 1.2), ("mixtral", 1, 1.7)]
)
def test_an_excess_in_a_few_experts_is_one_that_as_many_copies_even_out(shape: str, hot: int, skew: float) -> None:
    sizes = PRESETS[shape]._replace(T=1024)
    load = loads(make_workload(sizes, 2, skew, seed=0, hot=hot))
    mean = float(load.sum()) / 2
    assert float(imbalance(rank_load(load.sum(0), 2))) == pytest.approx(skew, abs=0.05)
    assert float(plan(load.int(), hot).max_load) / mean < 1.01
    spread_out = loads(make_workload(sizes, 2, skew, seed=0))
    assert shape == "mixtral" or float(plan(spread_out.int(), hot).max_load) / mean > 1.1, "which others are not"


def test_more_than_a_few_experts_can_hold_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"hot-experts = 1 hold 0.125 of the routes at most .* is 0.350 of them more"):
        make_workload(PRESETS["dsv3"], 2, 1.7, seed=0, hot=1)
    with pytest.raises(RecipeError, match="hot-experts = 33 must lie between 1 and the 32 experts of a rank"):
        make_workload(PRESETS["dsv3"], 2, 1.1, seed=0, hot=33)

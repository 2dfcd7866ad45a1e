"""What experts and their registry refuse, and what a name builds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from moe_ep.config import MoEConfig
from moe_ep.errors import InputError, RecipeError, Unavailable
from moe_ep.expert_input import ExpertInput
from moe_ep.experts import GroupedExperts
from moe_ep.experts_registry import build_experts, register_experts

from .small_experts import (
    NAMES,
    experts_for,
    make_input,
)


def test_refusals_of_the_registry() -> None:
    with pytest.raises(RecipeError, match=r"experts = 'toch' is not registered; did you mean 'torch'.*loop"):
        experts_for("toch", 2)
    with pytest.raises(RecipeError, match="'loop' are moe_ep's own"):
        register_experts("loop")(GroupedExperts)
    register_experts("test_twice")(GroupedExperts)
    with pytest.raises(RecipeError, match=r"'test_twice' are already registered, as .*GroupedExperts"):
        register_experts("test_twice")(GroupedExperts)
    config = MoEConfig(hidden_size=4, expert_intermediate_size=4, num_experts=4, top_k=1)
    for num_local, first in ((2, 3), (0, 0), (2, -1)):
        with pytest.raises(RecipeError, match=f"experts {first} to {first + num_local - 1} do not lie within"):
            build_experts(config, num_local, first, 0)
    with pytest.raises(Unavailable, match="float64"):
        experts_for("torch", 2).double()(make_input((1, 1), 16, torch.float64))


def test_a_registered_name_builds_its_class() -> None:
    class Doubled(GroupedExperts):
        def compute(self, inp: ExpertInput) -> Tensor:
            return 2 * inp.rows()

    register_experts("test_doubled")(Doubled)
    inp = make_input((1, 1), 16, torch.float32)
    assert torch.equal(experts_for("test_doubled", 2)(inp), 2 * inp.source)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_that_do_not_fit_are_refused(name: str) -> None:
    """Counts that describe other rows than were handed over would run tokens through a neighbouring expert
    (InternLM/xtuner#2053); weights are never cast silently (sgl-project/sglang#39351)."""
    experts = experts_for(name, 2)
    good = make_input((2, 3), 16, torch.float32)
    int32 = torch.int32
    bad = {
        "2 experts of H = 16 got rows .5, 15.": dict(source=torch.zeros(5, 15)),
        "rows are torch.bfloat16, the experts' weights torch.float32": dict(source=torch.zeros(5, 16).bfloat16()),
        "row weights must be float32, got torch.bfloat16": dict(row_weights=torch.zeros(5).bfloat16()),
        "row weights must be float32, got torch.float64": dict(row_weights=torch.zeros(5).double()),
        "5 expert rows came with row weights .4,.": dict(row_weights=torch.zeros(4)),
        "capacity 6; all three must be N": dict(capacity=6),
        "tokens_per_expert .1, 4., host counts .1, 4. and offsets .0, 2, 5.": dict(
            tokens_per_expert=torch.tensor([1, 4], dtype=int32)
        ),
        "host counts .3, 2.": dict(host_counts=(3, 2)),
        "of 5 rows contradict": dict(
            offsets=torch.tensor([0, 2, 8], dtype=int32), tokens_per_expert=torch.tensor([2, 6], dtype=int32)
        ),
        "for 3 experts": dict(tokens_per_expert=torch.tensor([2, 3, 0], dtype=int32)),
    }
    for message, change in bad.items():
        with pytest.raises(InputError, match=message):
            experts(dataclasses.replace(good, **change))


def test_initial_values_depend_on_the_global_expert_alone() -> None:
    """The loss of step 0 must not depend on how many ranks share the experts (NVIDIA-NeMo/Automodel#2676)."""
    config = MoEConfig(hidden_size=16, expert_intermediate_size=8, num_experts=4, top_k=1, init_std=0.5)
    whole = build_experts(config, 4, 0, 3)
    halves = [build_experts(config, 2, first, 3) for first in (0, 2)]
    low = build_experts(dataclasses.replace(config, dtype="bfloat16"), 1, 2, 3)
    for experts in (whole, *halves, low):
        experts.reset_parameters(7)
    for name in ("w_gate_up", "w_down"):
        value = getattr(whole, name)
        assert torch.equal(value, torch.cat([getattr(half, name) for half in halves]))
        assert torch.equal(value[2:3].bfloat16(), getattr(low, name))
        assert len({row.sum().item() for row in value}) == 4
    before = whole.w_down.detach().clone()
    assert abs(before.std().item() - 0.5) < 0.05
    whole.reset_parameters(8)
    assert not torch.equal(whole.w_down, before)
    assert not torch.equal(build_experts(config, 4, 0, 4).w_down, build_experts(config, 4, 0, 3).w_down)
    with pytest.raises(InputError, match="layer 4096"):
        build_experts(config, 4, 0, 4096)

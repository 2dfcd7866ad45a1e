"""Configuration is refused early, in one sentence with key, value and what would be valid."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ep.config import DispatchConfig, MoEConfig, ReplicaConfig
from moe_ep.config_checks import DTYPES
from moe_ep.errors import RecipeError
from moe_ep.schema import from_mapping, nearest

SIZES: dict[str, Any] = {"hidden_size": 64, "expert_intermediate_size": 32, "num_experts": 8, "top_k": 2}
WHERE = "some.toml [moe]"


def test_the_smallest_configuration_has_the_documented_defaults() -> None:
    config = MoEConfig(**SIZES)
    assert (config.dispatcher, config.experts, config.router) == ("all2all", "torch", "softmax")
    assert (config.weighting, config.kernels, config.dtype) == ("output", "auto", "float32")
    assert (config.aux_loss_coef, config.z_loss_coef, config.bias_update_rate) == (0.0, 0.0, 0.0)


def test_the_dispatcher_sees_its_part() -> None:
    extra = {"dispatcher": "agrs", "max_tokens": 128, "router": "grouped", "num_groups": 2, "num_sms": 8}
    config = MoEConfig(**SIZES, **extra, dtype="bfloat16", capacity_factor=1.5, options=(("expand", True),))
    assert config.dispatch() == DispatchConfig(
        name="agrs", num_experts=8, top_k=2, hidden_size=64, dtype="bfloat16", max_tokens=128, router="grouped",
        num_groups=2, capacity_factor=1.5, num_sms=8, options=(("expand", True),),
    )  # fmt: skip


def test_every_field_that_both_have_is_handed_over() -> None:
    shared = {f.name for f in dataclasses.fields(MoEConfig)} & {f.name for f in dataclasses.fields(DispatchConfig)}
    changed = {
        "num_experts": 16, "top_k": 4, "hidden_size": 96, "dtype": "float64", "max_tokens": 7, "router": "grouped",
        "num_groups": 4, "capacity_factor": 2.0, "num_sms": 3, "kernels": "torch", "num_micro_batches": 2,
        "options": (("a", 1),),
    }  # fmt: skip
    assert set(changed) == shared
    part = MoEConfig(**{**SIZES, **changed}).dispatch()
    assert {name: getattr(part, name) for name in shared} == changed


def test_an_unknown_keyword_names_the_nearest_known_one() -> None:
    with pytest.raises(RecipeError, match=r"MoEConfig: unknown key 'dispatchr'; did you mean 'dispatcher'\? known: "):
        MoEConfig(**SIZES, dispatchr="agrs")
    with pytest.raises(RecipeError, match=r"DispatchConfig: unknown key 'topk'; did you mean 'top_k'\?"):
        DispatchConfig(**{"name": "local", "num_experts": 8, "hidden_size": 64, "topk": 2})
    with pytest.raises(RecipeError, match=r"ReplicaConfig: unknown key 'slot'; did you mean 'slots'\?"):
        dataclasses.replace(ReplicaConfig(), slot=2)  # type: ignore[call-arg]
    with pytest.raises(RecipeError, match=r"replica: unknown key 'slot'; did you mean 'slots'\?"):
        MoEConfig(**SIZES, replica={"slot": 2})
    with pytest.raises(RecipeError, match=r"replica: unknown key 1; known: joint,"):
        MoEConfig(**SIZES, replica={1: 2})


REFUSED = [
    ({"top_k": 9}, "top_k = 9 is larger than num_experts = 8; choose top_k <= num_experts"),
    ({"top_k": 0}, "top_k must be at least 1, got 0"),
    ({"hidden_size": -4}, "hidden_size must be at least 1, got -4"),
    ({"num_experts": 0}, "num_experts must be at least 1, got 0"),
    ({"num_micro_batches": 0}, "num_micro_batches must be at least 1, got 0"),
    ({"num_micro_batches": 64}, "64 micro-batches are more than the 63 that can be interleaved; pass fewer"),
    ({"dtype": "float8"}, "dtype 'float8' is not one of float32, bfloat16, float16, float64"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0; or leave it unset"),
    ({"num_sms": -2}, "num_sms must be at least 1, got -2"),
    ({"aux_loss_coef": -0.1}, "aux_loss_coef must be finite and at least 0, got -0.1"),
    ({"z_loss_coef": math.nan}, "z_loss_coef must be finite and at least 0, got nan"),
    ({"init_std": math.inf}, "init_std must be finite and at least 0, got inf"),
    ({"routed_scale": 0.0}, "routed_scale must be finite and above 0, got 0.0"),
    ({"routed_scale": math.nan}, "routed_scale must be finite and above 0, got nan"),
    ({"aux_loss": "none", "aux_loss_coef": 0.1}, "aux_loss_coef = 0.1 needs aux_loss = 'batch' or 'sequence', got"),
    ({"shared_intermediate_size": 8}, "shared_intermediate_size = 8 needs num_shared_experts >= 1, got 0"),
    ({"num_shared_experts": 1}, "num_shared_experts = 1 needs shared_intermediate_size >= 1, got 0"),
    ({"shared_expert_gate": True}, "shared_expert_gate = true needs num_shared_experts >= 1, got 0"),
    ({"bias_update_rate": 0.1}, "bias_update_rate = 0.1 works with router = 'sigmoid', got 'softmax'"),
    ({"capacity_factor": 0.5}, "capacity_factor must be finite and at least 1 (rows are never dropped), got 0.5"),
    ({"num_groups": 2}, "num_groups = 2 works with router = 'grouped', got 'softmax'"),
    ({"router": "grouped"}, "router = 'grouped' needs num_groups >= 1, got 0"),
    ({"router": "grouped", "num_groups": 3}, "num_groups = 3 must divide num_experts = 8 and top_k = 2"),
    ({"router": "grouped", "num_groups": 2, "top_k": 3}, "num_groups = 2 must divide num_experts = 8 and top_k = 3"),
]


@pytest.mark.parametrize(("change", "text"), REFUSED)
def test_what_no_machine_could_run_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        MoEConfig(**{**SIZES, **change})
    assert text in str(caught.value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_listed_dtype_is_one_of_torch(dtype: str) -> None:
    assert MoEConfig(**SIZES, dtype=dtype).dtype == dtype
    assert getattr(torch, dtype).is_floating_point


def test_a_table_becomes_a_configuration() -> None:
    assert from_mapping(MoEConfig, {**SIZES, "router": "sigmoid", "routed_scale": 2}, WHERE) == MoEConfig(
        **SIZES, router="sigmoid", routed_scale=2.0
    )


TABLES = [
    ({**SIZES, "dispacher": "agrs"}, "some.toml [moe]: unknown key 'dispacher'; did you mean 'dispatcher'?"),
    ({"hidden_size": 64}, "some.toml [moe]: key 'expert_intermediate_size' is missing; it has no default"),
    ({**SIZES, "top_k": "2"}, "some.toml [moe].top_k = '2' must be int, got str"),
    ({**SIZES, "top_k": 2.0}, "some.toml [moe].top_k = 2.0 must be int, got float"),
    ({**SIZES, "top_k": True}, "some.toml [moe].top_k = True must be int, got bool"),
    ({**SIZES, "routed_scale": True}, "some.toml [moe].routed_scale = True must be float, got bool"),
    ({**SIZES, "normalize_weights": 1}, "some.toml [moe].normalize_weights = 1 must be bool, got int"),
    ({**SIZES, "router": "hash"}, "some.toml [moe].router = 'hash' is not one of 'softmax', 'sigmoid', 'grouped'"),
    ({**SIZES, "max_tokens": "many"}, "some.toml [moe].max_tokens = 'many' must be int, got str"),
    ({**SIZES, "top_k": 2**63}, f"some.toml [moe].top_k = {2**63} does not fit into 64 bits"),
    ({**SIZES, "routed_scale": 10**400}, f"some.toml [moe].routed_scale = {10**400} does not fit into 64 bits"),
    ({**SIZES, "options": "x"}, "some.toml [moe]: options = 'x' must be a dict"),
    ({**SIZES, "top_k": 9}, "some.toml [moe]: top_k = 9 is larger than num_experts = 8"),
]


@pytest.mark.parametrize(("table", "text"), TABLES)
def test_a_bad_table_names_where_key_value_and_what_is_valid(table: dict[str, Any], text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        from_mapping(MoEConfig, table, WHERE)
    assert str(caught.value).startswith(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    number: float = 1.0
    either: int | str | None = None
    choice: Literal["a", "b"] = "a"
    items: tuple[Any, ...] = ()


def test_optional_unions_lists_and_whole_numbers_for_floats() -> None:
    made = from_mapping(Sample, {"number": 3, "either": "x", "choice": "b", "items": [1, [2]]}, "t")
    assert made == Sample(number=3.0, either="x", choice="b", items=(1, [2]))
    assert isinstance(made.number, float)
    assert from_mapping(Sample, {"either": None}, "t").either is None


def test_a_union_that_nothing_fits_says_every_reason() -> None:
    with pytest.raises(RecipeError) as caught:
        from_mapping(Sample, {"either": 1.5}, "t")
    assert str(caught.value) == "t.either = 1.5 must be int, got float; or t.either = 1.5 must be str, got float"


def test_the_nearest_name_comes_first() -> None:
    assert nearest("al2all", ["local", "all2all", "agrs"]) == "did you mean 'all2all'? known: agrs, all2all, local"
    assert nearest("xyz", ["local"]) == "known: local"
    assert nearest("xyz", []) == "known: none"


@given(
    experts=st.integers(1, 64),
    top_k=st.integers(1, 64),
    groups=st.integers(1, 8),
)
def test_a_grouped_router_is_taken_exactly_when_every_group_can_give_its_share(
    experts: int, top_k: int, groups: int
) -> None:
    table = {**SIZES, "num_experts": experts, "top_k": top_k, "router": "grouped", "num_groups": groups}
    fits = experts % groups == 0 and top_k % groups == 0 and top_k <= experts
    if fits:
        assert from_mapping(MoEConfig, table, WHERE).num_groups == groups
    else:
        with pytest.raises(RecipeError):
            from_mapping(MoEConfig, table, WHERE)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(weighting="activations"), "weighting = 'activations' is not one of 'output', 'activation'"),
        (dict(aux_loss="sequences"), "aux_loss = 'sequences' is not one of"),
        (dict(kernels="fast"), "kernels = 'fast' is not one of"),
        (dict(normalize_weights="false"), "normalize_weights = 'false' must be bool, got str"),
        (dict(max_tokens=6.5), "max_tokens = 6.5 must be int, got float"),
        (dict(top_k=2.0), "top_k = 2.0 must be int, got float"),
        (dict(dtype=torch.bfloat16), "dtype = torch.bfloat16 must be str, got dtype; write its name, 'bfloat16'"),
        (
            dict(replica=dict(slots=1, min_quota=2**31)),
            "replica: min_quota must lie in [1, 2^31), got 2147483648: rows are counted in 32 bits",
        ),
        (dict(replica=2), "replica = 2 must be ReplicaConfig, got int; give a dict of its fields: slots, planner,"),
        (dict(init_std="x"), "init_std = 'x' must be float, got str"),
        (dict(options="expand"), "options = 'expand' must be a dict, such as {'expand': True}, or (key, value) pairs"),
        (dict(options=("expand", True)), "options = ('expand', True) must be a dict"),
        (dict(options={1: True}), "options: key 1 must be str, got int"),
        (dict(options=(("a", 1), ("a", 2))), "options: key 'a' comes twice"),
        (dict(options={"a": {}}), "options: a = {} must be a plain value, got dict"),
    ],
)
def test_a_configuration_made_in_code_is_held_to_its_types(changes: dict[str, object], text: str) -> None:
    sizes: dict[str, Any] = dict(hidden_size=8, expert_intermediate_size=8, num_experts=4, top_k=2)
    with pytest.raises(RecipeError, match=re.escape(text)):
        MoEConfig(**(sizes | changes))


@pytest.mark.parametrize("make", [dict, lambda pairs: tuple(reversed(pairs)), lambda pairs: [list(p) for p in pairs]])
def test_options_are_a_dict_or_pairs_in_any_order(make: Any) -> None:
    pairs = [("api", "v2"), ("expand", True), ("sizes", [1, 2])]
    sizes: dict[str, Any] = dict(hidden_size=8, num_experts=4, top_k=2)
    config = MoEConfig(**sizes, expert_intermediate_size=8, options=make(pairs))
    assert config.options == (("api", "v2"), ("expand", True), ("sizes", (1, 2)))
    assert hash(config.dispatch()) == hash(DispatchConfig(name="all2all", **sizes, options=make(pairs)))

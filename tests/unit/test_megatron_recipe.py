"""A recipe in Megatron's terms, and what of it has none; needs no Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_ep import RecipeError
from recipes.megatron_recipe import config_fields, load

RECIPE = """
[run]
name = "small"
[model]
vocab_size = 257
hidden_size = 16
num_layers = 3
num_attention_heads = 2
num_kv_heads = 1
head_dim = 8
num_experts = 4
top_k = 2
expert_intermediate_size = 24
intermediate_size = 32
first_dense_layers = 1
num_shared_experts = 2
shared_intermediate_size = 8
[moe]
weighting = "activation"
aux_loss_coef = 0.01
[train]
steps = 4
micro_batch_size = 1
sequence_length = 16
gradient_accumulation = 2
"""
CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(RECIPE)
    return file


def test_sizes_and_routing_are_megatrons_fields(path: Path) -> None:
    fields = config_fields(load(path, ["moe.z_loss_coef=0.001", "model.dtype=bfloat16"]), CPU)
    expected = dict(
        num_layers=3, hidden_size=16, num_attention_heads=2, num_query_groups=1, kv_channels=8, ffn_hidden_size=32,
        moe_ffn_hidden_size=24, num_moe_experts=4, moe_router_topk=2, moe_shared_expert_intermediate_size=16,
        moe_layer_freq=[0, 1, 1], moe_router_score_function="softmax", moe_router_pre_softmax=False,
        moe_router_topk_scaling_factor=None, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01,
        moe_z_loss_coeff=0.001, params_dtype=torch.bfloat16, bf16=True, calculate_per_token_loss=True,
        expert_tensor_parallel_size=1, moe_token_dispatcher_type="alltoall", use_cpu_initialization=True,
    )  # fmt: skip
    assert {name: fields[name] for name in expected} == expected


def test_other_routers_and_recompute(path: Path) -> None:
    changes = ["moe.router=sigmoid", "moe.bias_update_rate=0.01", "moe.aux_loss=sequence", "moe.routed_scale=2.5"]
    fields = config_fields(load(path, [*changes, "train.recompute=layer"]), torch.device("cuda"))
    assert fields["moe_router_score_function"] == "sigmoid"
    assert fields["moe_router_enable_expert_bias"] and fields["moe_router_bias_update_rate"] == 0.01
    assert fields["moe_router_load_balancing_type"] == "seq_aux_loss"
    assert fields["moe_router_topk_scaling_factor"] == 2.5
    assert fields["recompute_granularity"] == "full"
    assert not fields["use_cpu_initialization"]
    assert config_fields(load(path, ["moe.normalize_weights=false"]), CPU)["moe_router_pre_softmax"] is True


REFUSED = {
    "moe.weighting=output": "moe.weighting = 'output' is not what Megatron's experts do",
    "moe.experts=loop": "Megatron brings its own",
    "moe.router=grouped": "num_groups",
    "megatron.dispatcher=nativ": "'nativ' is not one of 'moe_ep', 'native'",
    "megatron.dispacher=native": "did you mean 'dispatcher'",
    "megatro.dispatcher=native": "did you mean 'megatron'",
    "checkpoint.every=2": "[checkpoint] is not served",
    "metrics.trace_steps=[1, 2]": "metrics.trace_steps is not served",
    "metrics.routing_trace=x": "metrics.routing_trace is not served",
    "megatron.grouped_gemm=true": "needs transformer_engine = true",
    "moe.dispatcher=al2all": "did you mean 'all2all'",
    "model.first_dense_layers=3": "no layer with experts",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_megatron_has_no_term_for_is_refused(path: Path, override: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(path, [override])
    assert REFUSED[override] in str(caught.value) and str(path) in str(caught.value)


def test_combinations_are_refused(path: Path) -> None:
    for overrides, said in (
        (["megatron.dispatcher=native", "train.intra_layer_micro_batch=2"], "needs a dispatcher of moe_ep"),
        (["moe.router=sigmoid", "moe.normalize_weights=false"], "Megatron always divides"),
        (["moe.router=grouped", "moe.num_groups=2"], "has another meaning in Megatron"),
        (
            ["replica.slots=2", "parallel.ep_size=2", "megatron.dispatcher=native"],
            "replica.slots = 2 needs a dispatcher of moe_ep",
        ),
        (["megatron.transformer_engine=true", "parallel.backend=gloo"], "needs a GPU"),
    ):
        with pytest.raises(RecipeError, match=said):
            load(path, overrides)


def test_the_recipe_for_two_gpus_is_valid() -> None:
    loaded = load(Path(__file__).resolve().parents[2] / "recipes" / "megatron_2gpu.toml")
    fields = config_fields(loaded, torch.device("cuda"))
    assert fields["moe_grouped_gemm"] and fields["expert_model_parallel_size"] == 2
    assert loaded.flat()["megatron.dispatcher"] == "moe_ep"

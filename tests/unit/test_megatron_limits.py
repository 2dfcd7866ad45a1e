"""What of Megatron's configuration is refused, by its flag's name; needs no Megatron."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from moe_ep import RecipeError
from moe_ep.integrations.megatron_limits import (
    DOMINO_LIMITS,
    LAYER_LIMITS,
    RECOMPUTE_LIMITS,
    REPLICA_LIMITS,
    TRIED,
    check_version,
    known_options,
    refuse,
    refuse_recompute,
    scaled_for_pieces,
)

PLAIN: dict[str, Any] = dict(
    moe_token_dispatcher_type="alltoall", expert_tensor_parallel_size=1, tensor_model_parallel_size=1,
    cuda_graph_impl="none", moe_expert_capacity_factor=None, hidden_dropout=0.0, recompute_granularity="selective",
    recompute_modules=["core_attn"], moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None, calculate_per_token_loss=False,
    gated_linear_unit=True, add_bias_linear=False, delay_wgrad_compute=False, fp8=None,
    pipeline_model_parallel_size=1, context_parallel_size=1,
)  # fmt: skip
WRONG: dict[str, Any] = {
    "moe_token_dispatcher_type": "flex",
    "expert_tensor_parallel_size": 2,
    "expert_gtp_weight_remat_size": 2,
    "gtp_weight_remat_size": 2,
    "moe_flex_dispatcher_num_sms": 24,
    "moe_deepep_num_sms": 24,
    "moe_hybridep_num_sms": 24,
    "moe_hybridep_num_sms_preprocessing": 24,
    "moe_hybridep_num_blocks_permute": 24,
    "moe_hybridep_num_blocks_unpermute": 24,
    "moe_expert_capacity_factor": 1.25,
    "moe_expert_rank_capacity_factor": 1.5,
    "cuda_graph_impl": "local",
    "transformer_impl": "inference_optimized",
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
    "hidden_dropout": 0.1,
    "moe_latent_size": 64,
    "mtp_num_layers": 1,
    "mlp_chunks_for_training": 2,
    "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"],
    "moe_router_force_biased": 0.5,
    "fp8": "hybrid",
    "fp4": "e2m1",
    "gated_linear_unit": False,
}


def config(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**PLAIN, **changes})


def test_a_plain_configuration_is_served() -> None:
    refuse(config(), (*LAYER_LIMITS, *DOMINO_LIMITS, *REPLICA_LIMITS), "it")
    refuse_recompute(config(), "it")
    scaled_for_pieces(config(), "it")


@pytest.mark.parametrize(
    "limit", (*LAYER_LIMITS, *DOMINO_LIMITS, *RECOMPUTE_LIMITS, *REPLICA_LIMITS), ids=lambda limit: limit.flag
)
def test_each_flag_is_refused_by_its_name(limit: Any) -> None:
    value = WRONG.get(limit.flag, True)
    with pytest.raises(RecipeError) as caught:
        refuse(config(**{limit.flag: value}), (limit,), "this layer")
    assert str(caught.value).startswith(f"{limit.flag} = {value!r} is not supported by this layer: ")


def test_what_is_refused_of_pieces_copies_and_recompute() -> None:
    """The layer's own list is held against the flags of the installed Megatron-Core, in tests/ranks."""
    assert {limit.flag for limit in DOMINO_LIMITS} == {
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("gtp_weight_remat_size", "hidden_dropout", "moe_latent_size", "mtp_num_layers", "mlp_chunks_for_training"),
        *("fp8", "fp4", "cpu_offloading", "fine_grained_activation_offloading", "fp32_residual_connection"),
    }
    assert {limit.flag for limit in REPLICA_LIMITS} == {
        *("gated_linear_unit", "add_bias_linear", "fp8", "fp4", "use_transformer_engine_op_fuser"),
    }
    assert {limit.flag for limit in RECOMPUTE_LIMITS} == {
        *("moe_router_fusion", "moe_router_load_balancing_type", "moe_router_force_biased", "use_te_rng_tracker"),
        "distribute_saved_activations",
    }


def test_recompute_of_what_keeps_one_state_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"recompute_modules = \['layernorm'\].*these work: core_attn, .*moe"):
        refuse_recompute(config(recompute_modules=["core_attn", "moe", "layernorm"]), "it")
    with pytest.raises(RecipeError, match=r"recompute_modules = \['moe_act'\].*beside 'moe'"):
        refuse_recompute(config(recompute_modules=["core_attn", "moe", "moe_act"]), "it")
    refuse_recompute(config(recompute_granularity=None, recompute_modules=["layernorm"]), "it")


def test_recompute_of_whole_layers_is_refused_where_routes_cannot_be_replayed() -> None:
    whole = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    refuse_recompute(config(**whole, moe_router_load_balancing_type="aux_loss"), "it")
    for changes, said in (
        (dict(recompute_num_layers=2), "recompute_num_layers = 2 .*set it to 1"),
        (dict(moe_router_fusion=True), "moe_router_fusion = True .*recompute with it"),
        (dict(moe_router_load_balancing_type="sinkhorn"), "moe_router_load_balancing_type = 'sinkhorn'"),
    ):
        with pytest.raises(RecipeError, match=said):
            refuse_recompute(config(**{**whole, **changes}), "it")
    refuse_recompute(config(moe_router_fusion=True), "it")


@pytest.mark.parametrize("flag", ["moe_aux_loss_coeff", "moe_z_loss_coeff"])
def test_losses_that_would_grow_with_the_pieces_are_refused(flag: str) -> None:
    with pytest.raises(RecipeError, match=rf"{flag} = 0.01.*calculate_per_token_loss"):
        scaled_for_pieces(config(**{flag: 0.01}), "it")
    scaled_for_pieces(config(**{flag: 0.01}, calculate_per_token_loss=True), "it")


def test_a_version_never_tried_warns_with_those_that_were() -> None:
    with pytest.warns(UserWarning, match=rf"Megatron-Core 0\.12\.3 was never tried.*{', '.join(TRIED)}"):
        check_version("0.12.3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in TRIED:
            check_version(version)


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"unknown option 'dispacher'.*did you mean 'dispatcher'"):
        known_options(["dispacher"], ["dispatcher", "max_tokens"])

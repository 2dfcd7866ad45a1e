"""The flags of the installed Megatron-Core: each is refused by its name, or somebody has said who serves it."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import pytest

from moe_ep import Capabilities, MoEError, RecipeError, register_dispatcher
from moe_ep.dispatch.all2all import All2All
from moe_ep.integrations.megatron_limits import DOMINO_LIMITS, LAYER_LIMITS, RECOMPUTE_LIMITS, TRIED
from moe_ep.testing.ranks import RankPool
from tests.ranks import megatron_cpu as cpu
from tests.unit.test_megatron_limits import WRONG

megatron = pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (moe-ep[megatron])")

ABSENT = {
    "0.16.1": {
        "overlap_dispatch_backward_with_experts_wgrad", "moe_expert_rank_capacity_factor", "moe_paged_stash",
        "moe_pad_experts_for_cuda_graph_inference", "mlp_chunks_for_training", "moe_router_force_biased",
        "expert_gtp_weight_remat_size", "gtp_weight_remat_size", "high_priority_a2a_comm_stream",
        "moe_flex_dispatcher_num_sms", "moe_hybridep_num_sms_preprocessing", "moe_hybridep_num_blocks_permute",
        "moe_hybridep_num_blocks_unpermute", "moe_hybridep_pad_uneven_dispatch_inputs", "moe_ncclep_zero_copy",
        "moe_permute_fusion_into_hybridep", "moe_ncclep_static_shape",
    },
    "0.19.2": {"moe_extended_tp"},
}  # fmt: skip
BY_MEGATRON = {
    "router": (
        *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps", "moe_enable_routing_replay"),
        *("moe_router_bias_update_rate", "moe_router_dtype", "moe_router_enable_expert_bias", "moe_router_topk"),
        *("moe_router_force_load_balancing", "moe_router_group_topk", "moe_router_num_groups", "moe_per_layer_logging"),
        *("moe_router_pre_softmax", "moe_router_quantile_balancing_ema", "moe_router_score_function"),
        *("moe_router_topk_limited_devices", "moe_router_topk_scaling_factor", "moe_grad_scale_func"),
        *("num_moe_experts", "moe_router_fusion", "moe_router_force_biased", "moe_router_load_balancing_type"),
    ),
    "experts": (
        *("moe_apply_probs_on_input", "moe_ffn_hidden_size", "moe_grouped_gemm", "moe_mlp_glu_interleave_size"),
        *("moe_single_grouped_bias", "moe_single_grouped_weight", "moe_use_legacy_grouped_gemm", "moe_latent_size"),
        *("moe_shared_expert_gate", "moe_shared_expert_intermediate_size", "moe_shared_expert_glu_interleave_size"),
        "use_grouped_gemm_for_shared_expert",
    ),
    "layout": ("moe_layer_freq", "moe_layer_recompute", "expert_model_parallel_size"),
    "only beside another flag, which is refused": (
        *("moe_token_drop_policy", "moe_flex_dispatcher_backend", "moe_paged_stash_page_size"),
        *("moe_paged_stash_buffer_size_factor_cpu", "moe_paged_stash_buffer_size_factor_cuda"),
        *("inference_moe_token_dispatcher_type", "inference_moe_disable_fused_quant_kernels"),
        "expert_tensor_parallel_num_weight_shards",
    ),
    "our kernels instead, said in the documentation": ("moe_permute_fusion",),
}


@register_dispatcher("wandering_all2all")
class Wandering(All2All):
    """Says that its results may differ from run to run."""

    name: ClassVar[str] = "wandering_all2all"
    capabilities: ClassVar[Capabilities] = replace(All2All.capabilities, deterministic=False)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120) as ranks:
        yield ranks


def fields() -> set[str]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return {field.name for field in dataclasses.fields(TransformerConfig)}


def test_each_refused_flag_is_one_of_this_version() -> None:
    if megatron.__version__ not in TRIED:
        pytest.skip(f"the flags of Megatron-Core {megatron.__version__} are not listed")
    named = {limit.flag for limit in (*LAYER_LIMITS, *DOMINO_LIMITS, *RECOMPUTE_LIMITS)}
    assert named - fields() == ABSENT[megatron.__version__]


def test_no_flag_of_experts_is_overlooked() -> None:
    """A new version's flag belongs into one of the lists."""
    refused = {limit.flag for limit in LAYER_LIMITS}
    served = [name for names in BY_MEGATRON.values() for name in names]
    assert len(served) == len(set(served)) and not refused & set(served)
    of_experts = {name for name in fields() if re.search("moe|expert|ep_overlap|a2a", name)}
    assert of_experts - refused - set(served) == set()


def test_each_is_refused_where_the_layer_or_block_is_built(pool: RankPool) -> None:
    here = fields()
    for layer, block, wandering in pool.run(refused, timeout_s=200):
        assert layer.keys() == {limit.flag for limit in LAYER_LIMITS} & here
        assert block.keys() == {limit.flag for limit in DOMINO_LIMITS} & here
        for flag, (kind, text) in [*layer.items(), *block.items()]:
            assert kind is RecipeError and text.startswith(f"{flag} = "), text
        assert wandering[0] is RecipeError and "deterministic_mode = True" in wandering[1]


def refused(group: Any, rank: int) -> Any:
    from moe_ep.integrations.megatron import moe_spec, use_domino

    def attempt(fn: Any) -> Any:
        try:
            fn()
        except MoEError as err:
            return type(err), str(err)
        return None, "nothing was raised"

    def layer_with(dispatcher: str, flag: str, value: Any) -> Any:
        config = cpu.small_config()
        spec = moe_spec(cpu.layer_spec(config).layer_specs[0].submodules.mlp, dispatcher=dispatcher)
        setattr(config, flag, value)  # Megatron itself would not take some of them
        return attempt(lambda: spec.module(config=config, submodules=spec.submodules, layer_number=1, **spec.params))

    def block_with(flag: str, value: Any) -> Any:
        model = cpu.build("all2all")
        setattr(model.config, flag, value)
        return attempt(lambda: use_domino(model, 2))

    with cpu.on_cpu(), cpu.parallel(2):
        here = fields()
        layer = {n.flag: layer_with("all2all", n.flag, WRONG.get(n.flag, True)) for n in LAYER_LIMITS if n.flag in here}
        block = {n.flag: block_with(n.flag, WRONG.get(n.flag, True)) for n in DOMINO_LIMITS if n.flag in here}
        return layer, block, layer_with("wandering_all2all", "deterministic_mode", True)


def test_a_version_never_tried_warns_where_a_layer_is_built(pool: RankPool) -> None:
    for said in pool.run(warned):
        (text,) = said
        assert text.startswith(f"Megatron-Core 0.99.1 was never tried with moe_ep; these were: {', '.join(TRIED)}")


def warned(group: Any, rank: int) -> list[str]:
    from moe_ep.integrations import megatron_layer

    with cpu.on_cpu(), cpu.parallel(2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mock.patch.object(megatron_layer, "megatron_version", lambda: "0.99.1"):
            cpu.build("all2all")
    return [text for text in (str(each.message) for each in caught) if "never tried" in text]

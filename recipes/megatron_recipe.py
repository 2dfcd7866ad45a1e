"""A recipe of this project as Megatron-Core's TransformerConfig; nothing here imports Megatron.

The sections are those of `recipes.recipe`, and `[megatron]` for what only Megatron has. What a section says is either
turned into Megatron's terms or refused; nothing is passed over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from moe_ep.schema import require
from recipes.recipe import SECTIONS, Recipe, recipe_of, section_of
from recipes.recipe_tables import check_sections_known, override, read_tables
from recipes.sections import CheckpointSection


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronSection:
    """What only Megatron has.

    Attributes:
        dispatcher: "moe_ep": `moe.dispatcher` is one of ours; "native": Megatron's own alltoall, to compare with.
        transformer_engine: build layers from Transformer Engine (GPUs only), else from Megatron's plain modules.
        grouped_gemm: experts as grouped GEMMs (needs transformer_engine), else one after the other.
        optimizer: "adamw": torch's, over Megatron's gradient buffers; "distributed": Megatron's distributed optimizer
            (GPUs only).
    """

    dispatcher: Literal["moe_ep", "native"] = "moe_ep"
    transformer_engine: bool = False
    grouped_gemm: bool = False
    optimizer: Literal["adamw", "distributed"] = "adamw"

    def __post_init__(self) -> None:
        require(
            self.transformer_engine or not self.grouped_gemm,
            "grouped_gemm = true needs transformer_engine = true: Megatron's plain experts run one after the other",
        )


@dataclass(frozen=True, slots=True)
class MegatronRecipe:
    """The common sections and Megatron's."""

    recipe: Recipe
    megatron: MegatronSection

    def flat(self) -> dict[str, Any]:
        """`section.key` -> value."""
        own = {f"megatron.{key}": value for key, value in dataclasses.asdict(self.megatron).items()}
        return {**self.recipe.flat(), **own}

    @property
    def native(self) -> bool:
        """Whether Megatron's own dispatcher runs."""
        return self.megatron.dispatcher == "native"


def load(path: str | Path, overrides: Sequence[str] = ()) -> MegatronRecipe:
    """Read, override and validate; see `recipes.recipe.load_recipe`.

    Raises:
        RecipeError: one message with file, key, value and what would be valid.
    """
    known = {**SECTIONS, "megatron": MegatronSection}
    tables = read_tables(Path(path))
    check_sections_known(tables, known, str(path))
    for text in overrides:
        override(tables, text, str(path), known)
    section = section_of(MegatronSection, tables.pop("megatron", {}), f"{path} [megatron]")
    loaded = MegatronRecipe(recipe_of(tables, (), str(path)), section)
    _check(loaded)
    return loaded


def _check(loaded: MegatronRecipe) -> None:
    """Refuse what Megatron's layer has no term for."""
    recipe, moe, train = loaded.recipe, loaded.recipe.moe, loaded.recipe.train
    grouped = train.intra_layer_micro_batch
    refused = [
        (not recipe.has_moe, "model.first_dense_layers leaves no layer with experts", "lower it"),
        (moe.experts != "torch", f"moe.experts = {moe.experts!r} names experts of moe_ep, and Megatron brings its own",
         "leave it out; megatron.grouped_gemm chooses among Megatron's"),
        (moe.weighting != "activation", f"moe.weighting = {moe.weighting!r} is not what Megatron's experts do",
         "set it to 'activation'"),
        (moe.router == "grouped", "moe.router = 'grouped' has another meaning in Megatron (groups are chosen, too)",
         "use 'softmax' or 'sigmoid'"),
        (moe.router == "sigmoid" and not moe.normalize_weights,
         "moe.normalize_weights = false cannot be had with router = 'sigmoid': Megatron always divides",
         "set it to true"),
        (loaded.native and recipe.replica.slots > 0,
         f"replica.slots = {recipe.replica.slots} needs a dispatcher of moe_ep",
         "set it to 0, or megatron.dispatcher to 'moe_ep'"),
        (recipe.checkpoint != CheckpointSection(), "[checkpoint] is not served by this program",
         "leave the section out, or train with megatron.training and use_moe_ep"),
        (recipe.metrics.trace_steps is not None, "metrics.trace_steps is not served by this program", "leave it out"),
        (recipe.metrics.routing_trace is not None, "metrics.routing_trace is not served by this program",
         "leave it out"),
        (loaded.native and grouped > 1, f"train.intra_layer_micro_batch = {grouped} needs a dispatcher of moe_ep",
         "set it to 1, or megatron.dispatcher to 'moe_ep'"),
        (recipe.parallel.backend == "gloo" and loaded.megatron.transformer_engine,
         "megatron.transformer_engine = true needs a GPU, and parallel.backend = 'gloo' is the CPU", "set it to false"),
    ]  # fmt: skip
    for broken, what, way_out in refused:
        require(not broken, f"{recipe.source}: {what}; {way_out}")


def config_fields(loaded: MegatronRecipe, device: torch.device) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig.

    Losses are sums over tokens, divided by the global number of tokens (`calculate_per_token_loss`), so that neither
    the number of micro-batches nor how many of them run together changes a gradient.
    """
    return {
        **_sizes(loaded),
        **_routing(loaded),
        **_execution(loaded, device),
    }


def _sizes(loaded: MegatronRecipe) -> dict[str, Any]:
    model = loaded.recipe.model
    shared = model.num_shared_experts * model.shared_intermediate_size
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.intermediate_size or model.expert_intermediate_size,
        "moe_ffn_hidden_size": model.expert_intermediate_size,
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.top_k,
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_shared_expert_gate": model.shared_expert_gate,
        "moe_layer_freq": [int(i >= model.first_dense_layers) for i in range(model.num_layers)],
        "layernorm_epsilon": model.rms_norm_eps,
        "init_method_std": model.init_std,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": model.torch_dtype,
        "bf16": model.torch_dtype == torch.bfloat16,
    }


def _routing(loaded: MegatronRecipe) -> dict[str, Any]:
    moe = loaded.recipe.moe
    kinds = {"batch": "aux_loss", "sequence": "seq_aux_loss", "none": "none"}
    sigmoid = moe.router == "sigmoid"
    return {
        "moe_router_dtype": "fp32",
        "moe_router_score_function": moe.router,
        "moe_router_pre_softmax": not sigmoid and not moe.normalize_weights,
        "moe_router_topk_scaling_factor": moe.routed_scale if moe.routed_scale != 1 else None,
        "moe_router_enable_expert_bias": moe.bias_update_rate > 0,
        "moe_router_bias_update_rate": moe.bias_update_rate,
        "moe_router_load_balancing_type": kinds[moe.aux_loss] if moe.aux_loss_coef else "none",
        "moe_aux_loss_coeff": moe.aux_loss_coef,
        "moe_z_loss_coeff": moe.z_loss_coef or None,
        "moe_router_force_load_balancing": moe.force_balance,
    }


def _execution(loaded: MegatronRecipe, device: torch.device) -> dict[str, Any]:
    recipe, on_gpu, engine = loaded.recipe, device.type == "cuda", loaded.megatron.transformer_engine
    modes: dict[str, dict[str, Any]] = {
        "none": {},
        "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        "layer": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }
    return {
        "expert_model_parallel_size": recipe.parallel.ep_size,
        "expert_tensor_parallel_size": 1,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": loaded.megatron.grouped_gemm,
        "moe_permute_fusion": engine and loaded.native,  # of Megatron's dispatcher; ours moves rows by itself
        "calculate_per_token_loss": True,
        "deterministic_mode": recipe.train.deterministic,
        "use_cpu_initialization": not on_gpu,
        "bias_activation_fusion": on_gpu,
        "bias_dropout_fusion": on_gpu,
        "masked_softmax_fusion": on_gpu,
        "gradient_accumulation_fusion": False,  # needs Apex or Transformer Engine's own buffers
        **modes[recipe.train.recompute],
    }

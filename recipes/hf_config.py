"""`config.json` of Qwen3MoeForCausalLM: reading what transformers 4 and 5 write, writing what both read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from moe_ep.config import MoEConfig
from moe_ep.errors import CheckpointError, RecipeError

from .model_config import ModelConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Keys whose other values would be another computation than ours.
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "rope_scaling": None,
    "attention_dropout": 0.0,
}
# Our name of each size, and the names that transformers has given it.
_SIZES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "intermediate_size": ("intermediate_size",),
    "num_layers": ("num_hidden_layers",),
    "num_attention_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "num_experts": ("num_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok",),
    "expert_intermediate_size": ("moe_intermediate_size",),
    "rms_norm_eps": ("rms_norm_eps",),
}


def read_hf_config(folder: Path) -> tuple[ModelConfig, bool]:
    """The model that `config.json` describes, in float32, and whether its router normalises the weights of the top-k.

    Raises:
        CheckpointError: no such file, another architecture, or a value that this model does not have.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as err:
        raise CheckpointError(f"{path} cannot be read: {err}; name a folder of save_pretrained") from err
    if values.get("model_type") != "qwen3_moe":
        raise CheckpointError(f"{path}: model_type = {values.get('model_type')!r}, only 'qwen3_moe' can be imported")
    for key, only in _ONLY.items():
        if values.get(key, only) != only:
            raise CheckpointError(f"{path}: {key} = {values[key]!r}, this model computes {key} = {only!r} only")
    sizes = {ours: _one_of(values, theirs, path) for ours, theirs in _SIZES.items()}
    dense = _dense_layers(values, path)
    if dense == 0:
        sizes["intermediate_size"] = 0  # theirs always has a size, here of no layer
    head_dim = values.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    try:
        config = ModelConfig(
            **sizes,
            head_dim=head_dim,
            first_dense_layers=dense,
            rope_theta=_rope_theta(values, path),
            tie_embeddings=values.get("tie_word_embeddings", False),
        )
    except RecipeError as err:
        raise CheckpointError(f"{path}: {err}") from err
    return config, values.get("norm_topk_prob", False)


def _one_of(values: dict[str, Any], names: tuple[str, ...], path: Path) -> Any:
    for name in names:
        if name in values:
            return values[name]
    raise CheckpointError(f"{path}: key {' or '.join(names)} is missing")


def _dense_layers(values: dict[str, Any], path: Path) -> int:
    step, named = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers") or []
    dense = [i for i in range(values["num_hidden_layers"]) if i in named or (i + 1) % step != 0]
    if dense != list(range(len(dense))):
        raise CheckpointError(f"{path}: layers {dense} are dense; this model has its dense layers first (0, 1, ...)")
    return len(dense)


def _rope_theta(values: dict[str, Any], path: Path) -> float:
    rope = values.get("rope_parameters") or {"rope_theta": values.get("rope_theta")}
    if rope.get("rope_type", "default") != "default":
        raise CheckpointError(f"{path}: rope_type = {rope['rope_type']!r}, this model computes 'default' only")
    if rope.get("rope_theta") is None:
        raise CheckpointError(f"{path}: key rope_theta is missing")
    return float(rope["rope_theta"])


def config_to_hf(config: ModelConfig, moe: MoEConfig, max_positions: int, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json`; `num_experts` and `rope_theta` in the places that transformers 4 knows and 5 converts.

    No `router_aux_loss_coef`: transformers pools the layers before it takes its loss, which is K times ours besides, so
    no number of theirs means the same as ours.
    """
    sizes = {theirs[0]: getattr(config, ours) for ours, theirs in _SIZES.items()}
    # transformers builds no dense layer from it, but it wants a size
    sizes["intermediate_size"] = config.intermediate_size or config.expert_intermediate_size
    return {
        **sizes,
        **_ONLY,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": config.head_dim,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.first_dense_layers)),
        "rope_theta": config.rope_theta,
        "norm_topk_prob": moe.normalize_weights,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": max_positions,
        "initializer_range": config.init_std,
        "dtype": str(dtype).removeprefix("torch."),
    }

"""Section `[model]` of a recipe: the sizes of the decoder, and which of them cannot be."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from moe_ep.bounds import POSITIVE, Range, check_ranges
from moe_ep.config import MoEConfig
from moe_ep.config_checks import DTYPES
from moe_ep.schema import require

SHARED_WITH_MOE = (
    "hidden_size", "expert_intermediate_size", "num_experts", "top_k", "num_shared_experts",
    "shared_intermediate_size", "shared_expert_gate", "dtype", "init_std",
)  # fmt: skip

_RANGES = {
    "rope_theta": Range(at_least=1),
    "rms_norm_eps": Range(at_least=1e-12, at_most=1),  # below, float32 rounds it away beside any activation
    "init_std": POSITIVE,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Section `[model]` of a recipe.

    Attributes:
        vocab_size: V.
        hidden_size: H.
        num_layers: decoder layers; the first `first_dense_layers` of them have one dense SwiGLU of `intermediate_size`.
        num_attention_heads, num_kv_heads, head_dim: query heads, key/value heads, size of a head (even).
        num_experts, top_k, expert_intermediate_size: of the layers with experts.
        num_shared_experts, shared_intermediate_size, shared_expert_gate: see MoEConfig.
        rope_theta: base of the rotary positions.
        rms_norm_eps: of all norms.
        tie_embeddings: use the embedding as output projection.
        dtype: of parameters and activations; the router stays in float32.
        init_std: standard deviation of all initial matrices.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    expert_intermediate_size: int
    intermediate_size: int = 0
    num_shared_experts: int = 0
    shared_intermediate_size: int = 0
    shared_expert_gate: bool = False
    first_dense_layers: int = 0
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    dtype: str = "float32"
    init_std: float = 0.02

    def __post_init__(self) -> None:
        _check(self)

    def moe(self, **moe_section: Any) -> MoEConfig:
        """The configuration of this model's MoE layers, completed by the keys of a recipe's `[moe]` section."""
        return MoEConfig(**{name: getattr(self, name) for name in SHARED_WITH_MOE}, **moe_section)

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch names it."""
        return getattr(torch, self.dtype)


def _check(config: ModelConfig) -> None:
    _check_sizes(config)
    _check_dense_layers(config)
    check_ranges(config, _RANGES)
    require(config.dtype in DTYPES, f"dtype {config.dtype!r} is not one of {', '.join(DTYPES)}")
    config.moe()  # the sizes that it shares with the MoE layers


def _check_sizes(config: ModelConfig) -> None:
    sizes = ("vocab_size", "hidden_size", "num_layers", "num_attention_heads", "num_kv_heads", "head_dim")
    for name in sizes:
        require(getattr(config, name) >= 1, f"{name} must be at least 1, got {getattr(config, name)}")
    require(
        config.num_attention_heads % config.num_kv_heads == 0,
        f"num_kv_heads = {config.num_kv_heads} must divide num_attention_heads = {config.num_attention_heads}",
    )
    require(config.head_dim % 2 == 0, f"head_dim = {config.head_dim} must be even: positions rotate pairs of values")


def _check_dense_layers(config: ModelConfig) -> None:
    require(
        0 <= config.first_dense_layers <= config.num_layers,
        f"first_dense_layers = {config.first_dense_layers} must lie between 0 and num_layers = {config.num_layers}",
    )
    require(
        config.first_dense_layers == 0 or config.intermediate_size >= 1,
        f"first_dense_layers = {config.first_dense_layers} needs intermediate_size >= 1, "
        f"got {config.intermediate_size}",
    )
    require(
        config.first_dense_layers > 0 or config.intermediate_size == 0,
        f"intermediate_size = {config.intermediate_size} is of the dense layers only, and first_dense_layers = 0: "
        "leave it out, or set expert_intermediate_size for the experts",
    )

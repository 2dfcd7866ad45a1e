"""The names of Qwen3MoeForCausalLM's weights and what each of them is in our model. No file is touched here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .model import Decoder, DecoderLayer
from .model_config import ModelConfig

LAYER_NAMES = {
    "input_norm.weight": "input_layernorm.weight",
    "post_norm.weight": "post_attention_layernorm.weight",
    **{f"attn.{p}_proj.weight": f"self_attn.{p}_proj.weight" for p in "qkvo"},
    **{f"attn.{p}_norm.weight": f"self_attn.{p}_norm.weight" for p in "qk"},
}
FUSED = ("gate_up_proj", "down_proj")


def expected_names(config: ModelConfig, *, fused: bool) -> set[str]:
    """Every name of the file(s), over all ranks."""
    names = {"model.embed_tokens.weight", "model.norm.weight"} | ({"lm_head.weight"} - tied_names(config))
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        names |= {f"{prefix}.{theirs}" for theirs in LAYER_NAMES.values()}
        if layer < config.first_dense_layers:
            names |= {f"{prefix}.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
            continue
        names.add(f"{prefix}.mlp.gate.weight")
        if fused:
            names |= {f"{prefix}.mlp.experts.{p}" for p in FUSED}
        else:
            names |= {_expert(layer, e, p) for e in range(config.num_experts) for p in ("gate", "up", "down")}
    return names


def tied_names(config: ModelConfig) -> set[str]:
    """Names that may stand in a file and hold nothing new."""
    return {"lm_head.weight"} if config.tie_embeddings else set()


def _expert(layer: int, expert: int, projection: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"


def expert_place(model: Decoder) -> tuple[int, int]:
    """(this rank's number in its expert-parallel group, R): it holds the experts from number * E/R on."""
    return (0, 1) if model.group is None else (dist.get_rank(model.group), dist.get_world_size(model.group))


def named_tensors(model: Decoder, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(their name, view into our parameter) of everything this rank holds, in an order that all ranks share."""
    yield "model.embed_tokens.weight", whole(model.embed.weight)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        for ours, theirs in LAYER_NAMES.items():
            yield f"model.layers.{index}.{theirs}", whole(layer.get_parameter(ours))
        yield from _dense(index, layer, whole) if layer.moe is None else _experts(index, layer, model, whole)
    yield "model.norm.weight", whole(model.norm.weight)
    if model.lm_head is not None:
        yield "lm_head.weight", whole(model.lm_head.weight)


def _dense(index: int, layer: DecoderLayer, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    assert layer.mlp is not None
    gate, up = whole(layer.mlp.gate_up.weight).chunk(2)
    down = whole(layer.mlp.down.weight)
    for name, tensor in (("gate", gate), ("up", up), ("down", down)):
        yield f"model.layers.{index}.mlp.{name}_proj.weight", tensor


def _experts(
    index: int, layer: DecoderLayer, model: Decoder, whole: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    assert layer.moe is not None
    yield f"model.layers.{index}.mlp.gate.weight", whole(layer.moe.router.weight)
    gate_up, down = whole(layer.moe.experts.w_gate_up), whole(layer.moe.experts.w_down)
    rank, ranks = expert_place(model)
    num_local = model.config.num_experts // ranks
    assert gate_up.shape[0] == down.shape[0] == num_local, (gate_up.shape, down.shape, num_local)
    for local in range(num_local):
        gate, up = gate_up[local].chunk(2)
        for name, tensor in (("gate", gate), ("up", up), ("down", down[local])):
            yield _expert(index, rank * num_local + local, name), tensor


def fused_place(name: str, model: Decoder) -> tuple[str, Any]:
    """Where the tensor `name` lies in a fused file: name and index; ("", None) for what is no expert."""
    if ".experts." not in name:
        return "", None
    prefix, rest = name.split(".experts.")
    expert, projection, _ = rest.split(".")
    half = model.config.expert_intermediate_size
    if projection == "down_proj":
        return f"{prefix}.experts.down_proj", int(expert)
    rows = slice(0, half) if projection == "gate_proj" else slice(half, 2 * half)
    return f"{prefix}.experts.gate_up_proj", (int(expert), rows)

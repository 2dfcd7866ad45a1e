"""A decoder of the Qwen3-MoE architecture: RMSNorm, grouped-query attention, SwiGLU, experts through `MoELayer`.

Letters: B sequences of one rank's micro-batch, T tokens of one sequence, H hidden size, V vocabulary.

Every initial value is a function of (seed, name of the parameter), and for experts of the global expert id, so that a
run on four ranks starts from the same model as a run on one.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_ep.bounds import POSITIVE, Range, check_ranges
from moe_ep.config import MoEConfig
from moe_ep.config_checks import DTYPES
from moe_ep.domino import DominoLayer, launch
from moe_ep.flights import MoEAux
from moe_ep.layer import MoELayer
from moe_ep.schema import require
from moe_ep.step import moe_layers

from .attention import Attention, Rotary
from .data import IGNORE

Group = dist.ProcessGroup | None


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
        return MoEConfig(**{name: getattr(self, name) for name in _SHARED_WITH_MOE}, **moe_section)

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch names it."""
        return getattr(torch, self.dtype)


_SHARED_WITH_MOE = (
    "hidden_size", "expert_intermediate_size", "num_experts", "top_k", "num_shared_experts",
    "shared_intermediate_size", "shared_expert_gate", "dtype", "init_std",
)  # fmt: skip

_RANGES = {
    "rope_theta": Range(at_least=1),
    "rms_norm_eps": Range(at_least=1e-12, at_most=1),  # below, float32 rounds it away beside any activation
    "init_std": POSITIVE,
}


def _check(config: ModelConfig) -> None:
    sizes = ("vocab_size", "hidden_size", "num_layers", "num_attention_heads", "num_kv_heads", "head_dim")
    for name in sizes:
        require(getattr(config, name) >= 1, f"{name} must be at least 1, got {getattr(config, name)}")
    require(
        config.num_attention_heads % config.num_kv_heads == 0,
        f"num_kv_heads = {config.num_kv_heads} must divide num_attention_heads = {config.num_attention_heads}",
    )
    require(config.head_dim % 2 == 0, f"head_dim = {config.head_dim} must be even: positions rotate pairs of values")
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
    check_ranges(config, _RANGES)
    require(config.dtype in DTYPES, f"dtype {config.dtype!r} is not one of {', '.join(DTYPES)}")
    config.moe()  # the sizes that it shares with the MoE layers


class DenseMLP(nn.Module):
    """SwiGLU of a layer without experts: x [..., H] -> [..., H]; `gate_up` holds the gate half first."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * intermediate_size, bias=False, dtype=dtype)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class DecoderLayer(DominoLayer):
    """One layer, whole or in the pieces that Domino interleaves: x [B, T, H], valid [B, T]; see DominoLayer.

    `moe` is the MoELayer, None in a dense layer; `shared` is the dense MLP or the shared experts.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig, index: int, rotary: Rotary, group: Group = None) -> None:
        super().__init__()
        size, eps, dtype = config.hidden_size, config.rms_norm_eps, config.torch_dtype
        self.input_norm = nn.RMSNorm(size, eps=eps, dtype=dtype)
        self.attn = Attention(
            size, config.num_attention_heads, config.num_kv_heads, config.head_dim, eps, rotary, dtype
        )
        self.post_norm = nn.RMSNorm(size, eps=eps, dtype=dtype)
        dense = index < config.first_dense_layers
        self.mlp = DenseMLP(size, config.intermediate_size, dtype) if dense else None
        self.moe = None if dense else MoELayer(moe, group, layer_index=index)

    def attention(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(h, n), [B, T, H] each: the residual stream after attention, and its norm, which experts and MLP read."""
        h = x + self.attn(self.input_norm(x))
        return h, self.post_norm(h)

    def shared(self, n: Tensor) -> Tensor | None:
        """Output of the dense MLP or of the shared experts, [B, T, H]; None where the layer has neither."""
        return super().shared(n) if self.mlp is None else self.mlp(n)


class Decoder(nn.Module):
    """ids int64 [B, T] -> (logits [B, T, V] in the model's dtype, one MoEAux for each layer with experts).

    Tied embeddings use one table at both ends: keep it in the root's FSDP unit.

    Args:
        config: sizes.
        moe: of the layers with experts; made by `config.moe(...)`.
        group: the expert-parallel process group; None: all experts on this rank.

    Raises:
        RecipeError: `moe` and `config` disagree about a size that both name.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig, group: Group = None) -> None:
        super().__init__()
        for name in _SHARED_WITH_MOE:
            ours, theirs = getattr(config, name), getattr(moe, name)
            require(ours == theirs, f"{name} is {ours} in the model and {theirs} in its MoE layers; use config.moe()")
        self.config, self.moe_config, self.group = config, moe, group
        rotary = Rotary(config.head_dim, config.rope_theta)
        size, dtype = config.hidden_size, config.torch_dtype
        self.embed = nn.Embedding(config.vocab_size, size, dtype=dtype)
        self.layers = nn.ModuleList(DecoderLayer(config, moe, i, rotary, group) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = None if config.tie_embeddings else nn.Linear(size, config.vocab_size, bias=False, dtype=dtype)

    def head(self, x_BTH: Tensor) -> Tensor:
        """Logits [B, T, V] of the last layer's output."""
        weight = self.embed.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(self.norm(x_BTH), weight)

    @overload
    def forward(self, ids_BT: Tensor, valid_BT: Tensor | None = None) -> tuple[Tensor, list[MoEAux]]: ...

    @overload
    def forward(
        self, ids_BT: Sequence[Tensor], valid_BT: Sequence[Tensor | None] | None = None
    ) -> tuple[list[Tensor], list[list[MoEAux]]]: ...

    def forward(self, ids_BT: Any, valid_BT: Any = None) -> Any:
        """See the class. `valid_BT` bool: padding (False) is routed nowhere and counted nowhere.

        M micro-batches in a sequence run interleaved (see `moe_ep.domino`), with a list of each in return.
        """
        if not isinstance(ids_BT, Tensor):
            return self._interleaved(ids_BT, valid_BT)
        (logits,), (auxes,) = self._interleaved([ids_BT], [valid_BT])
        return logits, auxes

    def _interleaved(
        self, ids: Sequence[Tensor], valid: Sequence[Tensor | None] | None
    ) -> tuple[list[Tensor], list[list[MoEAux]]]:
        pending, auxes = launch(self.layers, [self.embed(each) for each in ids], valid)
        return [self.head(output.resolve()) for output in pending], auxes

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Set every parameter, from (seed, its name) alone; call it before FSDP shards the model."""
        for name, parameter in self.named_parameters():
            assert not isinstance(parameter, DTensor), f"{name} is sharded already"
            if ".moe." in name:
                continue
            if name.endswith("norm.weight"):
                parameter.fill_(1)
            else:
                parameter.copy_(named_normal(seed, name, parameter.shape, self.config.init_std))
        for layer in moe_layers(self):
            layer.reset_parameters(seed)


def named_normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> Tensor:
    """Float32 normal values on the CPU, a function of the arguments alone: the same on every rank and device."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator) * std


def loss_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Sum of the cross-entropies in nats, float32 [], over the targets that are not IGNORE (0 where there are none).

    A sum and no mean: dividing by the *global* number of tokens makes gradients plain sums over pieces and ranks.
    """
    flat = logits_BTV.flatten(0, -2).float()
    return F.cross_entropy(flat, targets_BT.flatten(), ignore_index=IGNORE, reduction="sum")

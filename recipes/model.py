"""A decoder of the Qwen3-MoE architecture: RMSNorm, grouped-query attention, SwiGLU, experts through `MoELayer`.

Letters: B sequences of one rank's micro-batch, T tokens of one sequence, H hidden size, V vocabulary.

Every initial value is a function of (seed, name of the parameter), and for experts of the global expert id, so that a
run on four ranks starts from the same model as a run on one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_ep.config import MoEConfig
from moe_ep.domino import DominoLayer, launch
from moe_ep.flights import MoEAux
from moe_ep.layer import MoELayer
from moe_ep.schema import require
from moe_ep.step import moe_layers

from .attention import Attention, Rotary
from .data import IGNORE
from .model_config import SHARED_WITH_MOE, ModelConfig

Group = dist.ProcessGroup | None


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
        for name in SHARED_WITH_MOE:
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

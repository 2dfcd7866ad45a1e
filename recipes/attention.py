"""Causal attention of the Qwen3 family: grouped queries, one RMSNorm per head on queries and keys, rotary positions.

Knows nothing of experts and ranks, and keeps no cache of keys: this is for training.
Letters: B sequences, T tokens of one sequence, H hidden size, N query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Rotary:
    """Cosine and sine tables of rotary positions (Su et al., "RoFormer", in the half-rotated form of GPT-NeoX).

    A plain object and no module: the tables are a function of (theta, D) alone, so they belong in no checkpoint and
    in no parameter group. The layers of a model share one, which keeps the tables of the last length asked for.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        self.head_dim = head_dim
        self.theta = theta
        self._key: tuple[int, torch.device, torch.dtype] | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def tables(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine, [length, D] each, computed in float32; the sine with the sign of what is turned."""
        if self._tables is None or self._key != (length, device, dtype):
            # a table first made under inference_mode could not be used by a training step afterwards
            with torch.inference_mode(False), torch.no_grad():
                exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim
                inverse = 1.0 / (self.theta**exponent)
                angle = torch.arange(length, dtype=torch.float32, device=device)[:, None] * inverse[None, :]
                cos, sin = angle.cos(), angle.sin()
                self._tables = (torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype))
            self._key = (length, device, dtype)
        return self._tables

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x [..., T, D] by its positions 0..T-1, in x's dtype."""
        cos, sin = self.tables(x.shape[-2], x.device, x.dtype)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([second, first], dim=-1) * sin


class Attention(nn.Module):
    """x [B, T, H] -> [B, T, H]; token t sees tokens 0..t of its own sequence.

    Args:
        hidden_size: H.
        num_heads, num_kv_heads: N and G, G divides N.
        head_dim: D, even.
        eps: of both norms.
        rotary: shared by the layers.
        dtype: of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        rotary: Rotary,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.rotary = rotary
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False, dtype=dtype)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False, dtype=dtype)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False, dtype=dtype)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False, dtype=dtype)
        self.q_norm = nn.RMSNorm(head_dim, eps=eps, dtype=dtype)
        self.k_norm = nn.RMSNorm(head_dim, eps=eps, dtype=dtype)

    def _heads(self, flat: Tensor) -> Tensor:
        return flat.unflatten(-1, (-1, self.head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        q_BNTD = self.rotary(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2))
        k_BGTD = self.rotary(self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2))
        v_BGTD = self._heads(self.v_proj(x)).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q_BNTD, k_BGTD, v_BGTD, is_causal=True, enable_gqa=q_BNTD.shape[1] != k_BGTD.shape[1]
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))

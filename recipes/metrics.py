"""What a step did: sums over micro-batches and ranks, floating-point operations, memory.

Sums of one step travel in one all-reduce, as float64: token and route counts stay exact up to 2^53.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ep.flights import MoEAux
from moe_ep.load import imbalance, rank_load
from recipes.model_config import ModelConfig

# Dense bf16 TFLOP/s without sparsity, from the vendor's data sheets; matched against the device's name.
PEAK_TFLOPS = {"B200": 2250.0, "H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """One step over all micro-batches and ranks.

    Attributes:
        tokens: tokens with a target.
        loss: mean cross-entropy, nats per token, balancing losses excluded.
        aux_loss, z_loss: unscaled, token-weighted means over pieces, averaged over the MoE layers; None without any.
        load: int64 [layers, E], routes of each MoE layer to each expert.
        rank_rows: int64 [layers, R], routes that each rank of an expert-parallel group computed, replicas included.
        replicas: float64 [layers], copies in use, the mean over micro-batches (and expert-parallel groups).
        cross_rank_routes: routes that left their rank, all layers.
        stop: some rank was told to stop.
    """

    tokens: int
    loss: float
    aux_loss: float | None
    z_loss: float | None
    load: Tensor
    rank_rows: Tensor
    replicas: Tensor
    cross_rank_routes: int
    stop: bool


class Tally:
    """Adds up micro-batches on the device, without a host sync.

    Args:
        num_layers: MoE layers, in the model's order.
        num_experts: E.
        device: of the losses.
        num_ranks: R.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device, num_ranks: int = 1) -> None:
        self.head = torch.zeros(3, dtype=torch.float64, device=device)  # tokens, loss, crossing routes
        self.losses = torch.zeros(2, num_layers, dtype=torch.float64, device=device)
        self.load = torch.zeros(num_layers, num_experts, dtype=torch.float64, device=device)
        self.rank_rows = torch.zeros(num_layers, num_ranks, dtype=torch.float64, device=device)
        self.replicas = torch.zeros(num_layers + 1, dtype=torch.float64, device=device)  # the pieces last

    @torch.no_grad()
    def add(self, tokens: int, loss_sum: Tensor, auxes: Sequence[MoEAux]) -> None:
        """One micro-batch: its tokens, the sum of their losses, and what its layers say."""
        self.head[0] += tokens
        self.head[1] += loss_sum.detach()
        self.replicas[-1] += 1
        for layer, aux in enumerate(auxes):
            self.losses[0, layer] += aux.aux_loss * aux.num_tokens
            self.losses[1, layer] += aux.z_loss * aux.num_tokens
            self.load[layer] += aux.load
            self.rank_rows[layer] += aux.rank_load
            self.replicas[layer] += aux.replicas
            self.head[2] += aux.cross_rank_routes

    def pack(self, stop: bool) -> Tensor:
        """Everything as one float64 vector, ready to be summed over ranks."""
        flag = self.head.new_tensor([float(stop)])
        loads = self.load.flatten(), self.rank_rows.flatten(), self.replicas
        return torch.cat([self.head, flag, self.losses.flatten(), *loads])

    def unpack(self, packed: Tensor) -> StepSums:
        """The means and counts in a summed vector; the one host read of a step."""
        layers = self.load.shape[0]
        sizes = [4, 2 * layers, self.load.numel(), self.rank_rows.numel(), layers, 1]
        head, losses, load, rank_rows, replicas, pieces = packed.cpu().split(sizes)
        tokens, loss, crossing, stop = head.tolist()
        aux = losses.view(2, layers).sum(1) / (max(tokens, 1) * max(layers, 1))
        return StepSums(
            tokens=int(tokens),
            loss=loss / max(tokens, 1),
            aux_loss=aux[0].item() if layers else None,
            z_loss=aux[1].item() if layers else None,
            load=load.view(self.load.shape).to(torch.int64),
            rank_rows=rank_rows.view(self.rank_rows.shape).to(torch.int64),
            replicas=replicas * self.rank_rows.shape[1] / pieces.clamp_min(1),  # each rank counts its own
            cross_rank_routes=int(crossing),
            stop=stop > 0,
        )


def load_fields(sums: StepSums, ep_size: int) -> dict[str, Any]:
    """The fields of a row that come from the loads."""
    return {
        "expert_imbalance": imbalance(sums.load).tolist(),
        "rank_imbalance_before": imbalance(rank_load(sums.load, ep_size)).tolist(),
        "rank_imbalance_after": imbalance(sums.rank_rows).tolist(),
        "replicas": sums.replicas.tolist(),
        "cross_rank_routes": sums.cross_rank_routes,
    }


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Floating-point operations of forward and backward for one token: 6 per weight it meets, and causal attention."""
    heads = config.num_attention_heads * config.head_dim
    attention = config.hidden_size * (2 * heads + 2 * config.num_kv_heads * config.head_dim)
    sparse = config.hidden_size * (
        3 * config.top_k * config.expert_intermediate_size
        + 3 * config.num_shared_experts * config.shared_intermediate_size
        + config.num_experts
    )
    dense = 3 * config.hidden_size * config.intermediate_size
    num_dense = config.first_dense_layers
    weights = config.num_layers * attention + num_dense * dense + (config.num_layers - num_dense) * sparse
    weights += config.vocab_size * config.hidden_size
    return 6.0 * weights + 6.0 * config.num_layers * heads * sequence_length


def peak_tflops(device: torch.device, dtype: str) -> float | None:
    """What the device can do in this precision; None where that is not known."""
    if device.type != "cuda" or dtype not in ("bfloat16", "float16"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def peak_mib(device: torch.device) -> float:
    """Most memory so far, MiB: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20

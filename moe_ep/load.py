"""Load statistics: pure functions of expert ids and load vectors. Nothing here knows a router, a dispatcher or a group.

Every result stays on the ids' device and no function reads a value on the host, so the counts may be taken inside
a training step. Experts are laid out in contiguous blocks: rank r owns experts r*E/R to (r+1)*E/R.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutStats:
    """What one rank's micro-batch asks of the links; all int64 [] on the ids' device.

    Worked example: 2 ranks of 2 experts, this is rank 0, a row has 8 bytes, ids [[0, 2], [2, 3], [1, -1]].
    There are 5 routes; 3 of them (0->2, 1->2, 1->3) leave the rank. Token 1 sends one message for its two
    routes, so there are 4 messages: (0, own), (0, rank 1), (1, rank 1), (2, own), of which 2 cross.
    route_bytes = 5*8 = 40 and dedup_bytes = 2*8 = 16.

    Attributes:
        routes: (token, k) slots that name an expert; the same expert twice in one token is two routes.
        cross_rank_routes: routes whose expert lives on another rank.
        messages: distinct (token, destination rank) pairs, the own rank among the destinations.
        route_bytes: routes * row_bytes, the size of all expert rows.
        dedup_bytes: row_bytes * the messages to other ranks: what must cross links when each token goes to each
            rank at most once. Where no token has two experts on one rank this is cross_rank_routes * row_bytes.
    """

    routes: Tensor
    cross_rank_routes: Tensor
    messages: Tensor
    route_bytes: Tensor
    dedup_bytes: Tensor


def expert_load(expert_ids_TK: Tensor, num_experts: int) -> Tensor:
    """Routes of each expert: int64 [E] of int64 or int32 [T, K]; ids outside [0, E) are no routes.

    Raises:
        InputError: ids of another dtype.
    """
    ids = _check_ids(expert_ids_TK).reshape(-1)
    key = ids.clamp(-1, num_experts).remainder(num_experts + 1)  # what is no route goes to place E
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    # not bincount: it reads its output size on the host
    return counts.scatter_add_(0, key, torch.ones_like(key))[:num_experts]


def rank_load(load_E: Tensor, num_ranks: int) -> Tensor:
    """Sum the load of each rank's experts: [..., R] of [..., E].

    Raises:
        InputError: R does not divide E.
    """
    experts_per_rank = _experts_per_rank(load_E.shape[-1], num_ranks)
    return load_E.reshape(*load_E.shape[:-1], num_ranks, experts_per_rank).sum(-1)


def imbalance(load: Tensor) -> Tensor:
    """max/mean over the last dimension: float64 [...] of [..., E] or [..., R].

    1 is balanced, the number of entries is the worst. A load of all zeros counts as balanced.
    Over layers, average it and not the loads: layers that are imbalanced in opposite ways would cancel.
    """
    wide = load.double()
    mean = wide.mean(-1)
    return torch.where(mean > 0, wide.amax(-1) / mean.clamp_min(torch.finfo(torch.float64).tiny), 1.0)


def layout_stats(expert_ids_TK: Tensor, num_experts: int, num_ranks: int, rank: int, row_bytes: int) -> LayoutStats:
    """Count routes, messages and bytes of one rank's micro-batch, without a host sync.

    Args:
        expert_ids_TK: int64 or int32 [T, K], global ids; ids outside [0, E) are no routes.
        num_experts: E.
        num_ranks: R, must divide E.
        rank: this rank, in [0, R).
        row_bytes: bytes of one row of x, H * element size.

    Raises:
        InputError: wrong dtype or shape of ids, R does not divide E, or rank outside [0, R).
    """
    ids = _check_ids(expert_ids_TK)
    experts_per_rank = _experts_per_rank(num_experts, num_ranks)
    if not 0 <= rank < num_ranks:
        raise InputError(f"rank must lie in [0, {num_ranks}), got {rank}; pass the rank within the EP group")
    valid = (ids >= 0) & (ids < num_experts)
    dest = torch.where(valid, ids // experts_per_rank, num_ranks)
    sent = torch.zeros((ids.shape[0], num_ranks + 1), dtype=torch.bool, device=ids.device)
    messages_R = sent.scatter_(1, dest, True)[:, :num_ranks].sum(0)
    routes, messages = valid.sum(), messages_R.sum()
    return LayoutStats(
        routes=routes,
        cross_rank_routes=routes - (dest == rank).sum(),
        messages=messages,
        route_bytes=routes * row_bytes,
        dedup_bytes=(messages - messages_R[rank]) * row_bytes,
    )


def _check_ids(expert_ids_TK: Tensor) -> Tensor:
    if expert_ids_TK.dtype not in (torch.int32, torch.int64):
        raise InputError(f"expert_ids must be int64 or int32, got {expert_ids_TK.dtype}; call .long() on them")
    if expert_ids_TK.dim() != 2:
        raise InputError(f"expert_ids must be [T, K], got {tuple(expert_ids_TK.shape)}; flatten leading dimensions")
    return expert_ids_TK.long()


def _experts_per_rank(num_experts: int, num_ranks: int) -> int:
    if num_ranks < 1 or num_experts % num_ranks:
        raise InputError(
            f"num_ranks = {num_ranks} must divide num_experts = {num_experts}; choose a divisor of {num_experts}"
        )
    return num_experts // num_ranks

"""The integers of a permutation: which row each route becomes, where received rows go, where each expert's begin.

In plain torch or, where the caller allows it and the integers are on a GPU, by kernels of `moe_ep.kernels`; both give
the same integers, and neither waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .ops import routes_module

Movement = tuple[Tensor, Tensor, Tensor | None]  # where rows come from, where they go, how many there are


@dataclass(slots=True, kw_only=True)  # not frozen: that costs as much as an op of torch, in every dispatch
class SortedRoutes:
    """Routes in the order of their experts, inside an expert by (token, k): the result of `sort_routes`.

    Attributes:
        row_token: int32 [T*K], token of each sorted route; -1 in the tail that holds the routes with id -1.
        row_slot: int32 [T*K], flat slot t*K + k of each sorted route; -1 in the tail.
        positions: int32 [T, K], sorted place of each route, -1 where there is no route.
        counts: int64 [E], routes of each expert.
        offsets: int32 [E+1], first sorted place of each expert, and the number of routes behind.
        bound: int32 [1], where the tail begins: the last of the offsets.
        num_bad: int64 [], ids outside [-1, E), where the kernels counted them on the way; else None.
    """

    row_token: Tensor
    row_slot: Tensor
    positions: Tensor
    counts: Tensor
    offsets: Tensor
    bound: Tensor
    num_bad: Tensor | None = None

    @property
    def by_token(self) -> Movement:
        """From tokens to sorted routes."""
        return self.row_token, self.positions, self.bound

    @property
    def by_slot(self) -> Movement:
        """From flat slots to sorted routes."""
        return self.row_slot, self.positions.view(-1, 1), self.bound


def sort_routes(expert_ids_TK: Tensor, num_experts: int, *, kernels: bool = False) -> SortedRoutes:
    """Sort the routes of a micro-batch by expert, stably, without a host sync. Ids outside [0, E) have no route."""
    if kernels and expert_ids_TK.is_cuda:
        return _sort_by_kernels(expert_ids_TK, num_experts)
    num_tokens, top_k = expert_ids_TK.shape
    flat = expert_ids_TK.reshape(-1)
    valid = (flat >= 0) & (flat < num_experts)
    key = torch.where(valid, flat, num_experts)
    order = key.argsort(stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, key, torch.ones_like(key))
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=flat.device)
    in_order = valid[order]
    offsets = make_offsets(counts[:num_experts])
    return SortedRoutes(
        row_token=torch.where(in_order, order // max(top_k, 1), -1).int(),
        row_slot=torch.where(in_order, order, -1).int(),
        positions=torch.where(valid, place, -1).int().view(num_tokens, top_k),
        counts=counts[:num_experts],
        offsets=offsets,
        bound=offsets[num_experts:],
    )


def _sort_by_kernels(expert_ids_TK: Tensor, num_experts: int) -> SortedRoutes:
    found = routes_module().sort_routes(expert_ids_TK, num_experts, 1)
    row_token, row_slot, positions, counts, offsets, num_bad = found
    return SortedRoutes(
        row_token=row_token,
        row_slot=row_slot,
        positions=positions,
        counts=counts,
        offsets=offsets,
        bound=offsets[num_experts:],
        num_bad=num_bad,
    )


def regroup(
    counts_RL: Tensor, num_rows: int, *, kernels: bool = False
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """How received rows (source, local expert) become expert rows (local expert, source).

    Args:
        counts_RL: int64 [R, L], rows from each source for each local expert.
        num_rows: their sum, known on the host, so that no sync is needed.
        kernels: let the CUDA kernels do it where the counts are on a GPU.

    Returns:
        order int32 [N]: expert row n is received row order[n]; places int32 [N]: its inverse; both None where L = 1 or
        R = 1, since the received order is the expert order then. offsets int32 [L+1] and tokens_per_expert int32 [L].

    Example: two sources, two experts, counts [[1, 2], [1, 0]]: received rows are experts 0, 1, 1 | 0,
    so order = [0, 3, 1, 2], places = [0, 2, 3, 1], offsets = [0, 2, 4].
    """
    num_ranks, num_local = counts_RL.shape
    in_order = num_local == 1 or num_ranks == 1
    if kernels and counts_RL.is_cuda:  # one kernel for all four, whether or not the first two are needed
        order, places, offsets, tokens = routes_module().regroup_rows(counts_RL, num_rows, 1)
        return (None, None, offsets, tokens) if in_order else (order, places, offsets, tokens)
    counts_L = counts_RL.sum(0)
    offsets, tokens = make_offsets(counts_L), counts_L.to(torch.int32)
    if in_order:
        return None, None, offsets, tokens
    experts = torch.arange(num_local, device=counts_RL.device).repeat(num_ranks)
    expert = experts.repeat_interleave(counts_RL.reshape(-1), output_size=num_rows)
    order = expert.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(num_rows, device=order.device)
    return order.int(), places.int(), offsets, tokens


def make_offsets(counts_L: Tensor) -> Tensor:
    """Exclusive prefix sums with the total behind: int32 [L+1] of int [L]."""
    offsets = torch.zeros(counts_L.shape[0] + 1, dtype=torch.int32, device=counts_L.device)
    torch.cumsum(counts_L, 0, dtype=torch.int32, out=offsets[1:])
    return offsets

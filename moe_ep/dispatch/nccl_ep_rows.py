"""Between our contract and the rows of NCCL EP: ids and rows as the library takes them, and what it hands over."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..permute import ExpertInput, SortedRoutes, gather_rows, make_offsets
from ..routing import NO_ROUTE, Routing
from .nccl_ep_sizes import Sizes


def library_routes(routing: Routing, num_local: int, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Ids int64 [T, K] as the library counts experts, and weights [T, K]; at least one token, which then has no route.

    An id that is no expert's is no route, whatever its weight: a bad one raises elsewhere, and must not get as far as
    the library's memory.
    """
    ids_TK = routing.expert_ids
    valid = (ids_TK >= 0) & (ids_TK < routing.num_experts)
    ids_TK = torch.where(valid, ids_TK + ids_TK // num_local * (sizes.local_experts - num_local), NO_ROUTE)
    weights_TK = torch.where(valid, routing.weights, 0)
    num_tokens, top_k = max(ids_TK.shape[0], 1), ids_TK.shape[1]
    return pad(ids_TK, num_tokens, top_k, NO_ROUTE).contiguous(), pad(weights_TK, num_tokens, top_k)


def flat_input(
    rows: Tensor, weights_UK: Tensor, routes: SortedRoutes, host_counts: tuple[int, ...], kernels: bool
) -> ExpertInput:
    """Unique rows [U, H], in the order (source rank, token), with the index that expands and groups them."""
    num_rows = sum(host_counts)
    slots = routes.positions.reshape(-1, 1)
    index = routes.row_slot[:num_rows]
    return ExpertInput(
        source=rows,
        row_index=routes.row_token[:num_rows],
        positions=routes.positions,
        row_weights=gather_rows(weights_UK.reshape(-1), index, slots, bound=routes.bound, kernels=kernels),
        offsets=routes.offsets,
        tokens_per_expert=routes.counts.to(torch.int32),
        capacity=num_rows,
        host_counts=host_counts,
        kernels=kernels,
    )


def grouped_input(
    rows: Tensor, weights_N: Tensor, counts_L: Tensor, host_counts: tuple[int, ...] | None, kernels: bool
) -> ExpertInput:
    """Expert rows [N, H] as the library grouped them; counts beyond N, of rows that were dropped, are cut off."""
    offsets = make_offsets(counts_L)
    if host_counts is None:
        offsets = offsets.clamp_max(rows.shape[0])
    return ExpertInput(
        source=rows,
        row_weights=weights_N,
        offsets=offsets,
        tokens_per_expert=offsets.diff(),
        capacity=rows.shape[0],
        host_counts=host_counts,
        kernels=kernels,
    )


def pad(tensor: Tensor, rows: int, width: int, value: int = 0) -> Tensor:
    """The same with rows and columns of `value` behind."""
    missing = rows - tensor.shape[0], width - tensor.shape[1]
    return tensor if missing == (0, 0) else F.pad(tensor, (0, missing[1], 0, missing[0]), value=value)


def cut(tensor: Tensor, rows: int, width: int) -> Tensor:
    """The first rows and columns in memory of their own, the tensor itself where it has no more."""
    return tensor if tuple(tensor.shape) == (rows, width) else tensor[:rows, :width].contiguous()

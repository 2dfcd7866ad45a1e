"""The order of rows that DeepEP hands over: integers only, on the device, no host sync."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..permute import sort_routes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """Index of received rows in the order (local expert, source rank, token, k).

    Attributes:
        row_index: int32 [N], received row of each expert row.
        weight_index: int32 [N], place in the received weights, flattened.
        positions: int32 [U, J], expert rows of each received row, -1 where none.
        weight_positions: int32 [numel of the weights, 1], expert row of each received weight, -1 where none.
        counts: int64 [L].
    """

    row_index: Tensor
    weight_index: Tensor
    positions: Tensor
    weight_positions: Tensor
    counts: Tensor


def rows_in_order(ids_UK: Tensor, num_local: int, num_rows: int) -> ExpertRows:
    """Received rows stand in the order (source rank, token), so a stable sort by expert does it.

    Args:
        ids_UK: int [U, K], local expert ids, -1 where the route is another rank's or none.
        num_local: L.
        num_rows: N, which the host knows.
    """
    routes = sort_routes(ids_UK, num_local)
    return ExpertRows(
        row_index=routes.row_token[:num_rows],
        weight_index=routes.row_slot[:num_rows],
        positions=routes.positions,
        weight_positions=routes.positions.reshape(-1, 1),
        counts=routes.counts,
    )


def slot_order(slots_UK: Tensor, source_U: Tensor, counts_L: Tensor, num_rows: int) -> Tensor:
    """Order (local expert, source rank, token) of rows that are grouped by expert, inside one in order of arrival.

    Args:
        slots_UK: int [U, K], the expanded row of each route of a received token, -1 where none.
        source_U: int [U], source rank * max_tokens + token, distinct.
        counts_L: int [L], rows of each local expert.
        num_rows: their sum, known on the host.

    Returns:
        int64 [N]: row n in order is expanded row order[n].
    """
    source = torch.zeros(num_rows + 1, dtype=torch.int64, device=slots_UK.device)  # the last takes what has no slot
    slots = torch.where(slots_UK >= 0, slots_UK, num_rows).long()
    source.scatter_(0, slots.reshape(-1), source_U.long()[:, None].expand(slots.shape).reshape(-1))
    experts = torch.arange(counts_L.numel(), device=counts_L.device)
    expert = experts.repeat_interleave(counts_L, output_size=num_rows)
    return ((expert << 40) + source[:num_rows]).argsort()


def inverse(order_N: Tensor) -> Tensor:
    """The permutation that undoes another, int64 [N]."""
    places = torch.empty_like(order_N)
    places[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    return places

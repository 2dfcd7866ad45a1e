"""What a library hands over as what experts compute on: unique rows, one a token and rank, or expert rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..expert_input import ExpertInput
from ..permute import gather_rows, sum_rows
from ..sorted_routes import SortedRoutes, make_offsets


def unique_input(
    rows_UH: Tensor, weights_UK: Tensor, routes: SortedRoutes, host_counts: tuple[int, ...], kernels: bool
) -> ExpertInput:
    """Received rows with the index that expands and groups them, and the weight of each expert row.

    Args:
        rows_UH: in the order (source rank, token).
        weights_UK: float32, as they came along; those of slots without a route here are not looked at.
        routes: of the received rows to local experts.
        host_counts: routes of each local expert.
        kernels: let the CUDA kernels do it where rows are on a GPU.
    """
    num_rows = sum(host_counts)
    slots = routes.positions.reshape(-1, 1)
    index = routes.row_slot[:num_rows]
    return ExpertInput(
        source=rows_UH,
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


def sum_routes(y_NH: Tensor, routes: SortedRoutes, kernels: bool) -> Tensor:
    """Expert rows [N, H] to the received rows [U, H] that they came of: float32 with k ascending, rounded once."""
    index = routes.row_token[: y_NH.shape[0]]
    return sum_rows(y_NH, index, routes.positions, bound=routes.bound, kernels=kernels)

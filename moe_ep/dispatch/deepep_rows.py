"""The order that rows of DeepEP's api v2 are put into: integers only, on the device, no host sync."""

from __future__ import annotations

import torch
from torch import Tensor


def slot_order(slots_UK: Tensor, source_U: Tensor, counts_L: Tensor, num_rows: int) -> Tensor:
    """Order (local expert, source rank, token) of rows that are grouped by expert, inside one in order of arrival.

    Args:
        slots_UK: int [U, K], the expanded row of each route of a received token, -1 where none.
        source_U: int [U], source rank * max_tokens + token, distinct.
        counts_L: int [L], rows of each local expert.
        num_rows: their sum, known on the host.

    Returns:
        int32 [N]: row n in order is expanded row order[n].
    """
    source = torch.zeros(num_rows + 1, dtype=torch.int64, device=slots_UK.device)  # the last takes what has no slot
    slots = torch.where(slots_UK >= 0, slots_UK, num_rows).long()
    source.scatter_(0, slots.reshape(-1), source_U.long()[:, None].expand(slots.shape).reshape(-1))
    experts = torch.arange(counts_L.numel(), device=counts_L.device)
    expert = experts.repeat_interleave(counts_L, output_size=num_rows)
    return ((expert << 40) + source[:num_rows]).argsort().int()


def inverse(order_N: Tensor) -> Tensor:
    """The permutation that undoes another, int32 [N]."""
    places = torch.empty_like(order_N)
    places[order_N.long()] = torch.arange(order_N.numel(), dtype=order_N.dtype, device=order_N.device)
    return places

"""MOE_EP_DEBUG: the rows that experts are handed are those that the routings of all ranks name, counted anew."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ProtocolError
from ..expert_input import ExpertInput
from ..order import Order


def check_counts(where: str, name: str, order: Order, expert_ids: Tensor, num_experts: int, rows: ExpertInput) -> None:
    """Hold an ExpertInput against itself and against the routings of all ranks; a host sync. Collective.

    Nothing is looked at while a CUDA graph is captured: nothing can be read then.

    Args:
        where: such as "layer 3, micro-batch 0".
        name: of the dispatcher, for the message.
        order: of the dispatcher's group.
        expert_ids: this rank's routes [T, K], -1 = no route.
        num_experts: E.
        rows: what this rank's experts are about to compute on.

    Raises:
        ProtocolError: on every rank, with what is wrong on the first one where something is.
        PeerError: a rank did not come in time.
    """
    if expert_ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    ids = expert_ids.reshape(-1)
    routes = ids[(ids >= 0) & (ids < num_experts)]  # the others are a fault, which has its own way to be told
    named = torch.bincount(routes, minlength=num_experts).tolist()
    mine = named, rows.tokens_per_expert.tolist(), _inconsistency(rows)
    everybody = order.gather(f"counts of {where}", mine)
    totals = [sum(counts) for counts in zip(*(named for named, _, _ in everybody), strict=True)]
    first = 0
    for rank, (_, received, problem) in enumerate(everybody):
        wanted = totals[first : first + len(received)]
        first += len(received)
        if problem is None and received != wanted:
            problem = f"experts from {first - len(received)} on get {received} rows, the routings name {wanted}"
        if problem is not None:
            raise ProtocolError(f"{where}: dispatcher {name!r} hands over wrong counts on rank {rank}: {problem}")


def _inconsistency(rows: ExpertInput) -> str | None:
    """What an ExpertInput says against itself."""
    offsets, counts = rows.offsets.tolist(), rows.tokens_per_expert.tolist()
    num_rows, capacity, num_source = offsets[-1], rows.capacity, rows.source.shape[0]
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    if offsets != ends:
        return f"offsets are {offsets}, the counts add up to {ends}"
    if num_rows > capacity:
        return f"{num_rows} rows in a capacity of {capacity}"
    if rows.host_counts is not None and list(rows.host_counts) != counts:
        return f"the host has counts {list(rows.host_counts)}, the device {counts}"
    if rows.row_index is None:
        return None if num_source >= num_rows else f"{num_rows} rows, of which {num_source} are there"
    index = rows.row_index
    outside = int(((index[:num_rows] < 0) | (index[:num_rows] >= num_source)).sum())
    if outside:
        return f"{outside} row indices lie outside the {num_source} rows received"
    return None if bool((index[num_rows:] == -1).all()) else "row indices behind the last row are not -1"

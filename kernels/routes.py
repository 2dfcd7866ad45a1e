"""Integers of a dispatch: the place of every route when sorted by expert, and how received rows are regrouped.

Worked example of `sort_routes`. Two tokens, K = 2, ids [[1, 0], [1, -1]], two experts, alignment 1. Sorted stably the
routes are (token 0, slot 1), (0, 0), (1, 0), so row_token = [0, 0, 1, -1], row_slot = [1, 0, 2, -1] (flat slots
t*K + k), positions = [[1, 0], [2, -1]], counts = [1, 2], offsets = [0, 1, 3]. With alignment 2 expert 0 gets a row of
padding: row_token = [0, -1, 0, 1, -1, -1], offsets = [0, 2, 4].

Worked example of `regroup_rows`. Two sources, two experts, counts [[1, 2], [1, 0]]: received rows are for experts
0, 1, 1 | 0, so expert row n is received row order[n] with order = [0, 3, 1, 2]; places = [0, 2, 3, 1] is its inverse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .library import launch, library
from .registry import register

MAX_GROUPS = 8192  # experts of a sort, (rank, expert) pairs of a regroup: kMaxGroups of common.cuh
MAX_FAULTS = 4  # of a message: kMaxFaults of message.cu
Tensors = tuple[Tensor, ...]


def _padded(counts: Tensor, alignment: int) -> Tensor:
    return (counts + alignment - 1) // alignment * alignment


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def sort_routes_reference(ids: Tensor, num_experts: int, alignment: int) -> Tensors:
    """Reference of `sort_routes`, by a stable sort."""
    flat, top_k = ids.reshape(-1), max(ids.shape[1], 1)
    valid = (flat >= 0) & (flat < num_experts)
    slots = valid.nonzero().view(-1)
    slots = slots[flat[slots].argsort(stable=True)]
    counts = torch.bincount(flat[valid], minlength=num_experts)
    offsets = _starts(_padded(counts, alignment))
    expert = flat[slots]
    place = torch.arange(slots.numel(), device=ids.device) + (offsets[:-1] - _starts(counts)[:-1])[expert]
    row_slot = flat.new_full((flat.numel() + num_experts * (alignment - 1),), -1)
    row_slot[place] = slots
    positions = torch.full_like(flat, -1)
    positions[slots] = place
    row_token = torch.where(row_slot >= 0, row_slot // top_k, -1)
    num_bad = (~valid & (flat != -1)).sum()
    return row_token.int(), row_slot.int(), positions.view(ids.shape).int(), counts, offsets.int(), num_bad


def regroup_rows_reference(counts: Tensor, num_rows: int, alignment: int) -> Tensors:
    """Reference of `regroup_rows`."""
    num_ranks, num_local = counts.shape
    tokens = _padded(counts.sum(0), alignment)
    offsets = _starts(tokens)
    expert = torch.arange(num_local, device=counts.device).repeat(num_ranks).repeat_interleave(counts.reshape(-1))
    from_order = expert.argsort(stable=True)
    shift = offsets[:-1] - _starts(counts.sum(0))[:-1]
    place = torch.arange(expert.numel(), device=counts.device) + shift[expert[from_order]]
    order = counts.new_full((num_rows + num_local * (alignment - 1),), -1)
    order[place] = from_order
    places = counts.new_full((num_rows,), -1)
    places[from_order] = place
    return order.int(), places.int(), offsets.int(), tokens.int()


def count_message_reference(
    counts: Tensor, faults: list[Tensor], codes: list[int], value: int, place: int, num_ranks: int
) -> Tensor:
    """Reference of `count_message`."""
    code, last = counts.new_zeros(()), counts.new_full((), value)
    for number, met in zip(codes, faults, strict=True):
        code, last = torch.where(met > 0, number, code), torch.where(met > 0, met, last)
    words = torch.stack([code, last, torch.full_like(code, place)]).expand(num_ranks, 3)
    message = counts.new_zeros((2, num_ranks, counts.numel() // num_ranks + 3))
    message[0] = torch.cat([counts.view(num_ranks, -1), words], dim=1)
    return message


def _sort_routes(ids: Tensor, num_experts: int, alignment: int) -> Tensors:
    ids = ids.contiguous()
    row_token, row_slot, positions, counts, offsets, num_bad = _fake_sort_routes(ids, num_experts, alignment)
    workspace = offsets.new_empty(library(ids.device.index).sort_workspace(ids.numel(), num_experts))
    outputs = (row_token, row_slot, positions, counts, offsets, num_bad)
    sizes = (ids.numel(), ids.shape[1], num_experts, alignment, row_token.numel())
    launch("moe_ep_sort_routes", ids, ids, workspace, *outputs, *sizes)
    return outputs


def _regroup_rows(counts: Tensor, num_rows: int, alignment: int) -> Tensors:
    counts = counts if counts.stride(1) == 1 else counts.contiguous()
    outputs = _fake_regroup_rows(counts, num_rows, alignment)
    sizes = (num_rows, outputs[0].numel())
    launch("moe_ep_regroup_rows", counts, counts, counts.stride(0), *counts.shape, alignment, *outputs, *sizes)
    return outputs


def _count_message(
    counts: Tensor, faults: list[Tensor], codes: list[int], value: int, place: int, num_ranks: int
) -> Tensor:
    message = _fake_count_message(counts, faults, codes, value, place, num_ranks)
    missing = MAX_FAULTS - len(faults)
    pointers, numbers = [*faults, *[None] * missing], [*codes, *[0] * missing]
    sizes = (value, place, num_ranks, counts.numel() // num_ranks)
    launch("moe_ep_write_message", counts, counts, len(faults), *pointers, *numbers, *sizes, message)
    return message


def _fake_sort_routes(ids: Tensor, num_experts: int, alignment: int) -> Tensors:
    capacity = ids.numel() + num_experts * (alignment - 1)
    row_token = ids.new_empty(capacity, dtype=torch.int32)
    positions = torch.empty_like(ids, dtype=torch.int32, memory_format=torch.contiguous_format)
    offsets, counts = row_token.new_empty(num_experts + 1), ids.new_empty(num_experts)
    return row_token, torch.empty_like(row_token), positions, counts, offsets, ids.new_empty(())


def _fake_regroup_rows(counts: Tensor, num_rows: int, alignment: int) -> Tensors:
    num_local = counts.shape[1]
    places = counts.new_empty(num_rows, dtype=torch.int32)
    order = places.new_empty(num_rows + num_local * (alignment - 1))
    return order, places, places.new_empty(num_local + 1), places.new_empty(num_local)


def _fake_count_message(
    counts: Tensor, faults: list[Tensor], codes: list[int], value: int, place: int, num_ranks: int
) -> Tensor:
    return counts.new_empty((2, num_ranks, counts.numel() // num_ranks + 3))


# ids int64 [T, K] -> row_token, row_slot int32 [T*K + E*(alignment - 1)], -1 where no route is; positions int32 [T, K];
# counts int64 [E]; offsets int32 [E + 1], padding included; num_bad int64 []: ids outside [-1, E), which are no routes
sort_routes = register(
    "sort_routes(Tensor ids, int num_experts, int alignment) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=sort_routes_reference,
    kernel=_sort_routes,
    fake=_fake_sort_routes,
)
# counts int64 [R, L] that add up to num_rows -> order int32 [num_rows + L*(alignment - 1)], places int32 [num_rows],
# offsets int32 [L + 1] and tokens int32 [L], padding included
regroup_rows = register(
    "regroup_rows(Tensor counts, int num_rows, int alignment) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=regroup_rows_reference,
    kernel=_regroup_rows,
    fake=_fake_regroup_rows,
)
# counts int64 [E], what goes with them to each of R ranks -> int64 [2, R, E/R + 3]: [0] to send, [1] to receive into.
# Row r is the counts of rank r's experts, then (code, value, place). faults are int64 [] counts of what went wrong, at
# most MAX_FAULTS in rising order of precedence, each with its code; without any, (0, `value`, place) travels.
count_message = register(
    "count_message(Tensor counts, Tensor[] faults, int[] codes, int value, int place, int num_ranks) -> Tensor",
    reference=count_message_reference,
    kernel=_count_message,
    fake=_fake_count_message,
)

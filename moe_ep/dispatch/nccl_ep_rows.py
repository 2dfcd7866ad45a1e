"""Between our contract and the rows of NCCL EP: ids and rows as the library takes them, and what it hands over."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..expert_input import ExpertInput
from ..permute import gather_rows
from ..routing import NO_ROUTE, Routing
from ..sorted_routes import sort_routes

NUMBER_BYTES = 16  # behind a low-latency row; an int32 in front of padding


def library_routes(routing: Routing, num_local: int, local_experts: int) -> tuple[Tensor, Tensor]:
    """Ids int64 [T, K] where each rank counts `local_experts`, and weights [T, K]; a token without route where T = 0.

    An id that is no expert's is no route, whatever its weight: a bad one raises elsewhere, and must not get as far as
    the library's memory.
    """
    ids_TK = routing.expert_ids
    valid = (ids_TK >= 0) & (ids_TK < routing.num_experts)
    if local_experts > num_local:
        ids_TK = ids_TK + ids_TK // num_local * (local_experts - num_local)
    ids_TK = torch.where(valid, ids_TK, NO_ROUTE)
    weights_TK = torch.where(valid, routing.weights, 0)
    num_tokens, top_k = max(ids_TK.shape[0], 1), ids_TK.shape[1]
    return pad(ids_TK, num_tokens, top_k, NO_ROUTE).contiguous(), pad(weights_TK, num_tokens, top_k)


def pad(tensor: Tensor, rows: int, width: int, value: int = 0) -> Tensor:
    """The same with rows and columns of `value` behind."""
    missing = rows - tensor.shape[0], width - tensor.shape[1]
    return tensor if missing == (0, 0) else F.pad(tensor, (0, missing[1], 0, missing[0]), value=value)


def cut(tensor: Tensor, rows: int, width: int) -> Tensor:
    """The first rows and columns in memory of their own, the tensor itself where it has no more."""
    return tensor if tuple(tensor.shape) == (rows, width) else tensor[:rows, :width].contiguous()


def number_rows(x_TH: Tensor, row: int) -> Tensor:
    """Rows [T, row] with their number, an int32, at the first multiple of 16 bytes behind x, and zeros around it."""
    wide = pad(x_TH, x_TH.shape[0], row).contiguous()
    assert wide is not x_TH, "no room for the number"
    at = number_place(x_TH.shape[1], x_TH.element_size())
    wide.view(torch.int32)[:, at] = torch.arange(x_TH.shape[0], dtype=torch.int32, device=x_TH.device)
    return wide


def number_place(hidden: int, element_bytes: int) -> int:
    """Where a row's number stands, counted in int32."""
    return -(-hidden * element_bytes // NUMBER_BYTES) * NUMBER_BYTES // 4


def arrange(
    arrived: tuple[Tensor, ...], hidden: int, num_local: int, kernels: bool
) -> tuple[ExpertInput, Tensor, Tensor]:
    """Slots [R, C] in any order to expert rows in the order (expert, source rank, token, k), without a host sync.

    Args:
        arrived: rows [R, C, row], numbered by `number_rows`; weights float32 [R, C, K]; ids int32 [R, C, K], local
            experts, -1 for none; tokens int32 [R], filled slots of each source. The other slots hold anything.
        hidden: H.
        num_local: L.
        kernels: let the CUDA kernels move rows.

    Returns:
        what the experts see, its index int32 [N] of slots, and the expert rows of each slot, int32 [R*C, K].
    """
    rows, weights, ids, tokens_R = arrived
    num_ranks, block, top_k = ids.shape
    num_slots = num_ranks * block
    filled = torch.arange(block, device=ids.device) < tokens_R[:, None]
    number = rows.view(torch.int32)[:, :, number_place(hidden, rows.element_size())]
    source = torch.arange(num_ranks, device=ids.device)[:, None] * block
    order = torch.where(filled, source + number, num_slots).reshape(-1).argsort(stable=True)
    kept = torch.where(filled[:, :, None], ids, NO_ROUTE).reshape(num_slots, top_k)[order]
    routes = sort_routes(kept.long(), num_local, kernels=kernels)
    most = num_slots * min(top_k, num_local)
    row_token, row_slot = routes.row_token[:most], routes.row_slot[:most]
    index = torch.where(row_token >= 0, order[row_token.clamp_min(0)], NO_ROUTE).int()
    positions = torch.empty_like(routes.positions)
    positions[order] = routes.positions
    in_order = weights.reshape(num_slots, top_k)[order].reshape(-1)
    slots = routes.positions.reshape(-1, 1)
    inp = ExpertInput(
        source=rows.reshape(num_slots, -1)[:, :hidden].contiguous(),
        row_index=index,
        positions=positions,
        row_weights=gather_rows(in_order, row_slot, slots, bound=routes.bound, kernels=kernels),
        offsets=routes.offsets,
        tokens_per_expert=routes.counts.to(torch.int32),
        capacity=most,
        kernels=kernels,
    )
    return inp, index, positions

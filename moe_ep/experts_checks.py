"""What experts refuse of the rows that they are handed, and of the SMs that they are to leave free."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import InputError, Unavailable
from .expert_input import ExpertInput
from .sms import num_sms

if TYPE_CHECKING:
    from .experts import GroupedExperts


def check_input(inp: ExpertInput, num_local: int, w_down: Tensor) -> None:
    """Refuse rows, weights or counts that do not fit num_local experts of w_down's [..., H, I] and dtype.

    Raises:
        InputError: what was got, and what must be.
    """
    hidden_size = w_down.shape[1]
    source, weights, dtype = inp.source, inp.row_weights, w_down.dtype
    if source.dim() != 2 or source.shape[1] != hidden_size or inp.num_local_experts != num_local:
        raise InputError(
            f"{num_local} experts of H = {hidden_size} got rows {tuple(source.shape)} for {inp.num_local_experts} "
            "experts; build them with the dispatcher's sizes"
        )
    if source.dtype != dtype:
        raise InputError(f"expert rows are {source.dtype}, the experts' weights {dtype}; cast x or set dtype alike")
    if weights.dtype != torch.float32 and not (weights.dtype == dtype == torch.float64):
        raise InputError(f"row weights must be float32, got {weights.dtype}; keep routing weights in float32")
    num_rows = source.shape[0] if inp.row_index is None else inp.row_index.shape[0]
    if tuple(weights.shape) != (num_rows,) or inp.capacity != num_rows:
        raise InputError(
            f"{num_rows} expert rows came with row weights {tuple(weights.shape)} and capacity {inp.capacity}; all "
            "three must be N"
        )
    if source.device.type == "cpu" or os.environ.get("MOE_EP_DEBUG") == "1":
        _check_counts(inp)


def check_reserve(experts: GroupedExperts, reserve_sms: int, device: torch.device) -> None:
    """Refuse to leave SMs free where that would have no effect, or where the GPU has not as many.

    Raises:
        Unavailable: the experts cannot.
        InputError: not a number of SMs below all.
    """
    reason = experts.reserve_refusal(device)
    if reason is not None:
        raise Unavailable(f"reserve_sms = {reserve_sms} would have no effect: {reason}; set it to 0")
    if not 0 < reserve_sms < num_sms(device):
        raise InputError(f"reserve_sms = {reserve_sms} must lie in [0, {num_sms(device)}), the SMs of this GPU")


def _check_counts(inp: ExpertInput) -> None:
    offsets, counts = inp.offsets.tolist(), inp.tokens_per_expert.tolist()
    sums = [sum(counts[:local]) for local in range(len(counts) + 1)]
    host_counts = counts if inp.host_counts is None else list(inp.host_counts)
    if offsets != sums or host_counts != counts or min(counts) < 0 or sums[-1] > inp.capacity:
        raise InputError(
            f"tokens_per_expert {counts}, host counts {host_counts} and offsets {offsets} of {inp.capacity} rows "
            "contradict each other: rows would run through a neighbouring expert; this is a dispatcher's fault"
        )

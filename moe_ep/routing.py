"""Where each token goes: the value that a router makes and a dispatcher reads.

Legend of the shape suffixes used in the whole package (`x_TH` is a [T, H] tensor):

    T  tokens of one rank's micro-batch       H  hidden size           I  expert inner size
    E  experts                                K  top-k                 R  expert-parallel ranks
    L  = E/R local experts                    U  unique rows received  N  expert rows (routes) computed here
    S  routes sent by this rank (replica code: slots of a rank)        M  micro-batches in flight
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .errors import InputError

NO_ROUTE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Routes of one micro-batch.

    Attributes:
        expert_ids: int64 [T, K], a *global* expert id or -1 for "no route". int32 is accepted and widened.
            The same expert twice in one token is two routes.
        weights: float32 [T, K], differentiable. The weight of a -1 slot is ignored and gets a zero gradient.
        num_experts: E, the number of experts over all ranks.
        bad_tokens: int64 [] on the same device, how many tokens had non-finite logits (their ids are -1), or
            None where the router checked on the host and found none.

    Raises:
        InputError: wrong shape, dtype or device. Values of ids are checked by the dispatcher, where every
            rank can learn of the fault (see `check_expert_ids`).
    """

    expert_ids: Tensor
    weights: Tensor
    num_experts: int
    bad_tokens: Tensor | None = None

    def __post_init__(self) -> None:
        ids, weights = self.expert_ids, self.weights
        if ids.dtype not in (torch.int32, torch.int64):
            raise InputError(f"expert_ids must be int64 or int32, got {ids.dtype}; call .long() on them")
        if weights.dtype != torch.float32:
            raise InputError(f"routing weights must be float32, got {weights.dtype}; keep the router in float32")
        if ids.dim() != 2 or ids.shape != weights.shape:
            raise InputError(
                f"expert_ids and weights must both be [T, K], got {tuple(ids.shape)} and {tuple(weights.shape)}"
            )
        if ids.device != weights.device:
            raise InputError(f"expert_ids are on {ids.device}, weights on {weights.device}; put both on one device")
        if self.num_experts < 1:
            raise InputError(f"num_experts must be at least 1, got {self.num_experts}")
        if ids.dtype != torch.int64:
            object.__setattr__(self, "expert_ids", ids.long())

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.expert_ids.shape[0]

    @property
    def top_k(self) -> int:
        """K."""
        return self.expert_ids.shape[1]


# FSDP2 looks for tensors in what a module takes and returns; before torch 2.13 it does not look into dataclasses
pytree.register_dataclass(Routing)


def count_bad_ids(routing: Routing) -> Tensor:
    """Number of ids outside [-1, E), int64 [] on the ids' device (no host sync)."""
    ids = routing.expert_ids
    return ((ids < NO_ROUTE) | (ids >= routing.num_experts)).sum()

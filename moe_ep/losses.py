"""The two auxiliary losses of one router and the value that reports them, for one piece (one rank's micro-batch).

Both are means over the piece's valid tokens, so a trainer that weights each piece by its share of the global valid
tokens gets the same total however the pieces are spread over ranks or accumulated. Each layer calls these on its own:
pooling layers first would let opposite imbalances cancel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from .config import MoEConfig
from .errors import InputError
from .load import expert_load
from .ops import balance_module


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAux:
    """What a router hands back beside the routing; tensors on the rows' device.

    Attributes:
        aux_loss, z_loss: float32 [], unscaled and detached, for logs; 0 where the coefficient is 0.
        loss: float32 [], aux_loss_coef * aux_loss + z_loss_coef * z_loss, differentiable; a constant 0 outside any
            graph where both coefficients are 0. A mean over this piece's valid tokens: weight it by num_tokens.
        load: int64 [E], routes of this micro-batch per expert.
        num_tokens: int64 [], valid tokens.
    """

    aux_loss: Tensor
    z_loss: Tensor
    loss: Tensor
    load: Tensor
    num_tokens: Tensor


pytree.register_dataclass(RouterAux)  # for FSDP2, see Routing


class _BalanceLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs_TE: Tensor, load_E: Tensor, alive_T: Tensor, top_k: int) -> Tensor:
        loss, slope_E = balance_module().balance_loss(probs_TE, load_E, alive_T, top_k)
        ctx.save_for_backward(slope_E, alive_T)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return balance_module().balance_backward(*ctx.saved_tensors, grads[0]), None, None, None


def balance_loss(
    probs_TE: Tensor,
    expert_ids_TK: Tensor,
    alive_T: Tensor,
    *,
    num_sequences: int = 1,
    load_E: Tensor | None = None,
    kernels: bool = False,
) -> Tensor:
    """Load-balancing loss E * sum_e f_e * P_e of each sequence, averaged over sequences by their valid tokens.

    f_e is the share of the sequence's routes that expert e got, counted from the ids that were really chosen (a second
    top-k would disagree for grouped, biased or replayed routing), without gradient; P_e is e's mean probability.
    Balanced routing gives 1, all tokens on the same K experts up to E/K. With num_sequences = 1 the whole piece is one
    sequence (batch level). Switch Transformer (arXiv:2101.03961) equations 4-6 with f divided by K; DeepSeek-V3
    (arXiv:2412.19437) equations 17-20 for the sequence level.

    Args:
        probs_TE: float32 [T, E], rows sum to 1; differentiable.
        expert_ids_TK: int64 [T, K], -1 in the rows that are not alive.
        alive_T: bool [T], tokens that count.
        num_sequences: B; the T tokens are B sequences of T/B tokens, one behind the other.
        load_E: int64 [E], routes of the ids, where somebody has counted them; saves a count where B = 1.
        kernels: let the CUDA kernels do it where B = 1 and load_E is there.

    Returns:
        float32 []; 0 (still part of the graph) where no token is alive.

    Raises:
        InputError: num_sequences does not divide T.
    """
    num_tokens, num_experts = probs_TE.shape
    top_k = expert_ids_TK.shape[1]
    length = sequence_length(num_tokens, num_sequences)
    if kernels and num_sequences == 1 and load_E is not None and num_experts <= balance_module().MAX_EXPERTS:
        loss: Tensor = _BalanceLoss.apply(probs_TE, load_E, alive_T, top_k)
        return loss
    if num_sequences > 1:
        load_E = None
        first = num_experts * torch.arange(num_sequences, device=probs_TE.device).repeat_interleave(
            length, output_size=num_tokens
        )
        expert_ids_TK = torch.where(expert_ids_TK >= 0, expert_ids_TK + first[:, None], -1)
    counts = expert_load(expert_ids_TK, num_sequences * num_experts) if load_E is None else load_E
    counts_BE = counts.view(num_sequences, num_experts)
    tokens_B = alive_T.view(num_sequences, length).sum(1)
    mass_BE = (probs_TE * alive_T[:, None]).view(num_sequences, length, num_experts).sum(1)
    # tokens_B * loss_B: one of the two divisions by tokens_B cancels against the weight of the sequence
    weighted_B = (counts_BE * mass_BE).sum(1) * (num_experts / top_k) / tokens_B.clamp_min(1)
    return weighted_B.sum() / tokens_B.sum().clamp_min(1)


def z_loss(logits_TE: Tensor, alive_T: Tensor) -> Tensor:
    """Mean over alive tokens of logsumexp(logits)^2: float32 [], 0 where no token is alive (ST-MoE, arXiv:2202.08906).

    Args:
        logits_TE: float32 [T, E], finite in every row; differentiable.
        alive_T: bool [T], tokens that count.
    """
    square_T = logits_TE.logsumexp(-1).square() * alive_T
    return square_T.sum() / alive_T.sum().clamp_min(1)


def sequence_length(num_tokens: int, num_sequences: int) -> int:
    """T/B.

    Raises:
        InputError: B does not divide T.
    """
    if num_sequences < 1 or num_tokens % num_sequences:
        raise InputError(
            f"num_sequences = {num_sequences} must divide the {num_tokens} tokens; "
            "pad sequences to one length and mark the padding in valid_T"
        )
    return num_tokens // num_sequences


def router_aux(
    config: MoEConfig, aux: Tensor | None, z: Tensor | None, load_E: Tensor, num_tokens: Tensor
) -> RouterAux:
    """Scale and add the losses; None is a loss that is off and leaves no node in the graph."""
    zero = torch.zeros((), dtype=torch.float32, device=load_E.device)
    terms = [coef * term for term, coef in ((aux, config.aux_loss_coef), (z, config.z_loss_coef)) if term is not None]
    loss = functools.reduce(torch.add, terms) if terms else zero
    return RouterAux(
        aux_loss=zero if aux is None else aux.detach(),
        z_loss=zero if z is None else z.detach(),
        loss=loss,
        load=load_E,
        num_tokens=num_tokens,
    )

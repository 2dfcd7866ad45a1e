"""The balancing loss of a micro-batch in one launch, and its gradient in another; some twenty small ops otherwise.

    balance_loss       E / K * sum_e load_e * mass_e / n^2 over the n tokens that count, mass_e their probability of e
    balance_backward   gradient of the probabilities

Worked example: probs [[.5, .5], [.9, .1]], load [2, 0], both tokens alive, K = 1: mass [1.4, .6], slope [1, 0] (2 / 1 *
2 / 4), loss 1.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .library import launch, library
from .registry import register

MAX_EXPERTS = 1024  # kMaxColumns of balance.cu times the lanes of a warp


def balance_loss_reference(probs: Tensor, load: Tensor, alive: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Reference of `balance_loss`."""
    counted = alive.sum().clamp_min(1).double()
    slope = (load.double() * (probs.shape[1] / top_k) / counted / counted).to(probs.dtype)
    return ((probs * alive[:, None]).sum(0) * slope).sum(), slope


def balance_backward_reference(slope: Tensor, alive: Tensor, grad: Tensor) -> Tensor:
    """Reference of `balance_backward`."""
    return alive[:, None] * (slope * grad)


def _balance_loss(probs: Tensor, load: Tensor, alive: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    probs, load, alive = probs.contiguous(), load.contiguous(), alive.contiguous()
    loss, slope = _fake_balance_loss(probs, load, alive, top_k)
    words = library(probs.get_device()).balance_workspace(probs.shape[1])
    workspace = probs.new_empty(words)
    launch("moe_ep_balance_loss", probs, probs, load, alive, workspace, loss, slope, *probs.shape, top_k)
    return loss, slope


def _balance_backward(slope: Tensor, alive: Tensor, grad: Tensor) -> Tensor:
    d_probs = _fake_balance_backward(slope, alive, grad)
    launch("moe_ep_balance_backward", slope, slope, alive.contiguous(), grad.contiguous(), d_probs, *d_probs.shape)
    return d_probs


def _fake_balance_loss(probs: Tensor, load: Tensor, alive: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    return probs.new_empty(()), probs.new_empty(probs.shape[1])


def _fake_balance_backward(slope: Tensor, alive: Tensor, grad: Tensor) -> Tensor:
    return torch.empty((alive.shape[0], slope.shape[0]), dtype=slope.dtype, device=slope.device)


# probs float32 [T, E], load int64 [E], alive bool [T] -> loss float32 [], slope float32 [E]: what the loss grows by
# with the probability of an expert, of one token. E at most MAX_EXPERTS.
balance_loss = register(
    "balance_loss(Tensor probs, Tensor load, Tensor alive, int top_k) -> (Tensor, Tensor)",
    reference=balance_loss_reference,
    kernel=_balance_loss,
    fake=_fake_balance_loss,
)
# slope float32 [E], alive bool [T], gradient of the loss float32 [] -> d_probs float32 [T, E]
balance_backward = register(
    "balance_backward(Tensor slope, Tensor alive, Tensor grad) -> Tensor",
    reference=balance_backward_reference,
    kernel=_balance_backward,
    fake=_fake_balance_backward,
)

"""What one Mixture-of-Experts layer computes, forward and backward, route by route in float64.

The oracle walks over (rank, token, k) itself, with all experts in one process and every derivative written out by hand.
It knows no dispatcher, no permutation and no autograd, so that it shares no mistake with what it judges.

    y[r, t]          = sum_k w[r, t, k] * f_id(x[r, t])                    over the slots with id >= 0
    d x[r, t]        = sum_k J_id(x)^T (w * dy[r, t])
    d w[r, t, k]     = <dy[r, t], f_id(x[r, t])>
    d parameters[e]  = sum over all ranks' routes to e

Beside y and d x it returns the sums of the *absolute values* of their terms: rounding bounds are multiples of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Params = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInput:
    """What one rank feeds into the layer and into its backward.

    Attributes:
        x: [T, H], any float dtype.
        expert_ids: int [T, K], global ids, -1 for no route.
        weights: float32 [T, K].
        dy: [T, H], the gradient that arrives at y.
    """

    x: Tensor
    expert_ids: Tensor
    weights: Tensor
    dy: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleResult:
    """All results in float64; lists are by rank.

    Attributes:
        y, dx: [T, H] each.
        dweights: [T, K] each, zero where there is no route.
        dparams: one tensor per parameter, over all E experts.
        y_abs, dx_abs: [T, H] each, the sums over k of the absolute values of the terms of y and dx.
    """

    y: list[Tensor]
    dx: list[Tensor]
    dweights: list[Tensor]
    dparams: Params
    y_abs: list[Tensor]
    dx_abs: list[Tensor]


class OracleExperts(Protocol):
    """Experts as the oracle needs them: one row at a time, float64."""

    def params(self) -> Params:
        """The parameters, each [E, ...] float64; may be empty."""
        ...

    def forward(self, expert: int, x_H: Tensor) -> Tensor:
        """f_expert(x), [H]."""
        ...

    def backward(self, expert: int, x_H: Tensor, df_H: Tensor, dparams: Params) -> Tensor:
        """d x [H] for the gradient `df` of f; adds the parameters' share to `dparams` in place."""
        ...


class ConstantExperts:
    """f_e(x) = (e + 1) x: no parameters, and every mix-up of rows, ids or weights shows in closed form."""

    def params(self) -> Params:
        """None."""
        return ()

    def forward(self, expert: int, x_H: Tensor) -> Tensor:
        """(expert + 1) x."""
        return (expert + 1) * x_H

    def backward(self, expert: int, x_H: Tensor, df_H: Tensor, dparams: Params) -> Tensor:
        """(expert + 1) df."""
        return (expert + 1) * df_H


class SwiGLUExperts:
    """f_e(x) = W_down[e] (silu(W_gate[e] x) * W_up[e] x).

    Args:
        w_gate_up: float64 [E, 2I, H], the gate half first.
        w_down: float64 [E, H, I].
    """

    def __init__(self, w_gate_up: Tensor, w_down: Tensor) -> None:
        self.w_gate_up = w_gate_up.double()
        self.w_down = w_down.double()

    def params(self) -> Params:
        """(w_gate_up, w_down)."""
        return self.w_gate_up, self.w_down

    def forward(self, expert: int, x_H: Tensor) -> Tensor:
        """One row through one expert."""
        gate, up = (self.w_gate_up[expert] @ x_H).chunk(2)
        return self.w_down[expert] @ (gate * gate.sigmoid() * up)

    def backward(self, expert: int, x_H: Tensor, df_H: Tensor, dparams: Params) -> Tensor:
        """silu'(g) = s (1 + g (1 - s)) with s = sigmoid(g)."""
        gate, up = (self.w_gate_up[expert] @ x_H).chunk(2)
        sig = gate.sigmoid()
        dinner = self.w_down[expert].T @ df_H
        dgate_up = torch.cat([dinner * up * sig * (1 + gate * (1 - sig)), dinner * gate * sig])
        dparams[0][expert] += torch.outer(dgate_up, x_H)
        dparams[1][expert] += torch.outer(df_H, gate * sig * up)
        return self.w_gate_up[expert].T @ dgate_up


def run_oracle(inputs: Sequence[RankInput], experts: OracleExperts) -> OracleResult:
    """Forward and backward of one layer over all ranks' tokens.

    Args:
        inputs: one entry per rank, token counts may differ and may be 0.
        experts: all E experts.

    Raises:
        IndexError: an id that the experts' parameters do not hold.
    """
    dparams = tuple(torch.zeros_like(p) for p in experts.params())
    ranks = [_run_rank(rank_input, experts, dparams) for rank_input in inputs]
    return OracleResult(
        y=[rank[0] for rank in ranks],
        dx=[rank[1] for rank in ranks],
        dweights=[rank[2] for rank in ranks],
        dparams=dparams,
        y_abs=[rank[3] for rank in ranks],
        dx_abs=[rank[4] for rank in ranks],
    )


def _run_rank(rank_input: RankInput, experts: OracleExperts, dparams: Params) -> tuple[Tensor, ...]:
    """(y, dx, dweights, y_abs, dx_abs) of one rank's tokens; adds to `dparams` in place."""
    x_TH, dy_TH = rank_input.x.detach().double(), rank_input.dy.detach().double()
    weights_TK = rank_input.weights.detach().double()
    y, dx, y_abs, dx_abs = (torch.zeros_like(x_TH) for _ in range(4))
    dweights = torch.zeros_like(weights_TK)
    for t, ids in enumerate(rank_input.expert_ids.tolist()):
        for k, expert in enumerate(ids):
            if expert < 0:
                continue
            weight = weights_TK[t, k]
            row = experts.forward(expert, x_TH[t])
            drow = experts.backward(expert, x_TH[t], weight * dy_TH[t], dparams)
            y[t] += weight * row
            y_abs[t] += (weight * row).abs()
            dx[t] += drow
            dx_abs[t] += drow.abs()
            dweights[t, k] = dy_TH[t] @ row
    return y, dx, dweights, y_abs, dx_abs

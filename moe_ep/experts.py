"""What all routed experts have in common: SwiGLU over the rows of a dispatcher, scaled by the row weights.

Parameters have one layout everywhere: `w_gate_up` [L, 2I, H], the gate half first, and `w_down` [L, H, I], so that
expert l computes (silu(x Wg^T) * (x Wu^T)) Wd^T with Wg = w_gate_up[l, :I], Wu = w_gate_up[l, I:], Wd = w_down[l].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from .autocast import no_autocast
from .config import MoEConfig
from .eager import eager
from .expert_input import ExpertInput, split_input
from .experts_checks import check_input, check_reserve
from .initial import generator_for, normal_
from .schema import require
from .sms import leave_free

Weights = tuple[Tensor, Tensor]  # w_gate_up [L, 2I, H], w_down [L, H, I]


class Replicas(Protocol):
    """Copies of other ranks' experts that one micro-batch uses beside the masters, this rank's own experts."""

    def take(self, masters: Weights, *, fresh_grads: bool = False) -> tuple[Weights, Weights]:
        """Masters [L, ...] and slots [S, ...], filled; what comes out is what the experts compute with.

        `fresh_grads`: see GroupedExperts.
        """
        ...

    def enter(self, x: Tensor) -> Tensor:
        """The experts' input, tied to the copies: what is behind it in backward does not need them any more."""
        ...

    def again(self, y: Tensor) -> Tensor:
        """The experts' output, tied to the copies: in backward they are there again before the experts' own."""
        ...


class GroupedExperts(nn.Module):
    """Base of all routed experts of one rank: parameters, initial values and the checks of `forward`.

    Args:
        config: sizes, dtype, weighting and init_std of the layer.
        num_local: L, the experts of this rank.
        first_expert: global id of the first of them.
        layer_index: place of the layer in the model; initial values depend on it.

    Attributes:
        fresh_grads: backward makes the gradients of the weights in memory that nothing else refers to, so that those of
            replicas are added in place. Experts that say False have them copied first.
    """

    fresh_grads: ClassVar[bool] = False

    def __init__(self, config: MoEConfig, num_local: int, first_expert: int, layer_index: int) -> None:
        super().__init__()
        require(
            num_local >= 1 and first_expert >= 0 and first_expert + num_local <= config.num_experts,
            f"experts {first_expert} to {first_expert + num_local - 1} do not lie within num_experts = "
            f"{config.num_experts}; a rank owns E/R >= 1 of them",
        )
        self.config, self.first_expert, self.layer_index = config, first_expert, layer_index
        dtype: torch.dtype = getattr(torch, config.dtype)
        hidden_size, inner_size = config.hidden_size, config.expert_intermediate_size
        self.w_gate_up = nn.Parameter(torch.empty(num_local, 2 * inner_size, hidden_size, dtype=dtype))
        self.w_down = nn.Parameter(torch.empty(num_local, hidden_size, inner_size, dtype=dtype))
        self.reset_parameters(0)

    def reset_parameters(self, seed: int) -> None:
        """Draw float32 normal(0, init_std) values and cast them.

        They depend on (seed, layer_index, global expert id) alone: neither on the device nor on how many ranks share
        the experts. Call it before a framework shards the parameters.
        """
        for local in range(self.w_gate_up.shape[0]):
            generator = generator_for(seed, self.layer_index, self.first_expert + local)
            normal_(self.w_gate_up[local], self.config.init_std, generator)
            normal_(self.w_down[local], self.config.init_std, generator)

    @eager
    def forward(self, inp: ExpertInput, *, reserve_sms: int = 0, replicas: Replicas | None = None) -> Tensor:
        """Weighted expert outputs.

        Args:
            inp: rows in the parameters' dtype, float32 row weights (float64 too where the rows are float64).
            reserve_sms: SMs that the GEMMs leave free for communication beside them, in backward as well.
            replicas: further experts of this micro-batch, whose rows stand behind those of the rank's own.

        Returns:
            [N, H] in the rows' dtype: w[n] * expert(row n), with gradients to the rows, the row weights and both
            parameters. Rows beyond offsets[L] hold anything, and take no part in any gradient.

        Raises:
            InputError: sizes or dtypes that do not fit. Counts that contradict the offsets are found on a CPU and,
                with MOE_EP_DEBUG=1 and a wait for the device, elsewhere.
            Unavailable: reserve_sms where `reserve_refusal` has a reason.
        """
        if reserve_sms:
            check_reserve(self, reserve_sms, inp.source.device)
        masters = self.w_gate_up, self.w_down
        sets: tuple[Weights, ...] = (masters,)
        if replicas is not None:
            sets = replicas.take(masters, fresh_grads=self.fresh_grads)
        check_input(inp, sum(w_down.shape[0] for _, w_down in sets), self.w_down)
        with no_autocast(inp.source.device), leave_free(reserve_sms):
            if replicas is None:
                return self.compute(inp)
            inp = dataclasses.replace(inp, source=replicas.enter(inp.source))
            return replicas.again(self.compute_sets(inp, sets))

    def reserve_refusal(self, device: torch.device) -> str | None:
        """Why these experts cannot leave SMs free on a device, in a few words; None: they can."""
        return f"experts = {self.config.experts!r} cannot limit their GEMMs"

    def compute(self, inp: ExpertInput) -> Tensor:
        """What a back end implements: `forward` without the checks, under `sms.leave_free`."""
        raise NotImplementedError(f"{type(self).__name__} must implement compute(inp)")

    def compute_sets(self, inp: ExpertInput, sets: Sequence[Weights]) -> Tensor:
        """As `compute`, with the weights of several sets of experts in place of the parameters.

        The experts of the first set own the first groups of rows, those of the second the next. What a set holds in
        backward is what backward has to compute with: keep references, no copies. Back ends that do not define it
        refuse replicas.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement compute_sets(inp, sets)")

    @classmethod
    def replica_refusal(cls, host_counts: bool) -> str | None:
        """Why these experts cannot compute copies of others', in a few words; None: they can.

        Args:
            host_counts: whether the dispatcher reads row counts on the host.
        """
        if cls.compute_sets is GroupedExperts.compute_sets:
            return f"{cls.__name__} defines no compute_sets, so it knows one set of experts only"
        return None

    @classmethod
    def findings(cls) -> list[str]:
        """What was found on this machine of what these experts need, sentences for a person."""
        return []

    @classmethod
    def machine_reasons(cls) -> list[str]:
        """Why these experts cannot run on this machine, whatever the configuration, sentences; empty: they can."""
        return []

    def extra_repr(self) -> str:
        """Which experts these are."""
        num_local, hidden_size, inner_size = self.w_down.shape
        last = self.first_expert + num_local - 1
        return (
            f"experts {self.first_expert}..{last}, H={hidden_size}, I={inner_size}, weighting={self.config.weighting}"
        )


class SplitExperts(GroupedExperts):
    """Base of experts that compute one set of experts in a call: rows of several are expanded and split on the host."""

    def compute(self, inp: ExpertInput) -> Tensor:
        """See GroupedExperts.forward."""
        return self.compute_set(inp, (self.w_gate_up, self.w_down))

    def compute_sets(self, inp: ExpertInput, sets: Sequence[Weights]) -> Tensor:
        """See GroupedExperts; a call for each set."""
        parts = split_input(inp, [w_down.shape[0] for _, w_down in sets])
        return torch.cat([self.compute_set(part, weights) for part, weights in zip(parts, sets, strict=True)])

    def compute_set(self, inp: ExpertInput, weights: Weights) -> Tensor:
        """What a back end implements: as `compute`, with the weights given."""
        raise NotImplementedError(f"{type(self).__name__} must implement compute_set(inp, weights)")

    @classmethod
    def replica_refusal(cls, host_counts: bool) -> str | None:
        """See GroupedExperts."""
        if host_counts:
            return None
        return (
            "they compute a rank's own experts and its copies in two calls, whose rows are split on the host, and this "
            "dispatcher reads no counts there (leave capacity_factor and budget_rows unset, or take experts = 'quack')"
        )

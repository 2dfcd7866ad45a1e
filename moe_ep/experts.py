"""Experts: SwiGLU over the rows that a dispatcher hands over, scaled by the row weights, and the shared experts.

Parameters have one layout everywhere: `w_gate_up` [L, 2I, H], the gate half first, and `w_down` [L, H, I], so that
expert l computes (silu(x Wg^T) * (x Wu^T)) Wd^T with Wg = w_gate_up[l, :I], Wu = w_gate_up[l, I:], Wd = w_down[l].
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .autocast import no_autocast
from .config import MoEConfig
from .eager import eager
from .errors import InputError, RecipeError, Unavailable
from .grouped_mlp import grouped_swiglu
from .initial import SHARED_EXPERT_ID, generator_for, normal_
from .permute import ExpertInput, split_input
from .schema import nearest, require
from .sms import grouped_mm_refusal, leave_free, num_sms

Weights = tuple[Tensor, Tensor]  # w_gate_up [L, 2I, H], w_down [L, H, I]


class Replicas(Protocol):
    """Copies of other ranks' experts that one micro-batch uses beside the masters, this rank's own experts."""

    def take(self, masters: Weights) -> tuple[Weights, Weights]:
        """Masters [L, ...] and slots [S, ...], filled; what comes out is what the experts compute with."""
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
    """

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
            _check_reserve(self, reserve_sms, inp.source.device)
        masters = self.w_gate_up, self.w_down
        sets: tuple[Weights, ...] = (masters,) if replicas is None else replicas.take(masters)
        _check_input(inp, sum(w_down.shape[0] for _, w_down in sets), self.w_down)
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


X = TypeVar("X", bound=type[GroupedExperts])
_BUILT_IN = {
    "quack": ".quack_experts",
    "grouped_gemm": ".grouped_gemm_experts",
    "te": ".te_experts",
}  # modules that register a name, imported when it is asked for
_REGISTRY: dict[str, type[GroupedExperts]] = {}


def register_experts(name: str) -> Callable[[X], X]:
    """Class decorator: make a subclass of GroupedExperts known as `experts = "name"`.

    Raises:
        RecipeError: the name is taken.
    """

    def add(cls: X) -> X:
        known = _REGISTRY.get(name)
        own = cls.__module__ == f"{__package__}{_BUILT_IN.get(name, '')}"
        require(name not in _BUILT_IN or own, f"experts {name!r} are moe_ep's own; choose another name")
        require(known is None, f"experts {name!r} are already registered, as {known}; choose another name")
        _REGISTRY[name] = cls
        return cls

    return add


def known_experts() -> list[str]:
    """Every name that `build_experts` takes."""
    return sorted({*_REGISTRY, *_BUILT_IN})


def find_experts(name: str) -> type[GroupedExperts]:
    """The class of a name, imported now if need be.

    Raises:
        RecipeError: unknown name, with the nearest known one.
    """
    if name not in _REGISTRY and name in _BUILT_IN:
        importlib.import_module(_BUILT_IN[name], __package__)
    cls = _REGISTRY.get(name)
    if cls is None:
        raise RecipeError(f"experts = {name!r} is not registered; {nearest(name, known_experts())}")
    return cls


def build_experts(config: MoEConfig, num_local: int, first_expert: int, layer_index: int) -> GroupedExperts:
    """The experts that `config.experts` names, initialised from seed 0.

    Raises:
        RecipeError: unknown name (with the nearest known one), or a range of experts outside num_experts.
        Unavailable: a configuration that these experts cannot compute, with a way out.
    """
    return find_experts(config.experts)(config, num_local, first_expert, layer_index)


@register_experts("torch")
class TorchExperts(GroupedExperts):
    """Experts on `torch.nn.functional.grouped_mm`: float32, bfloat16 and float16, any H and I.

    On CUDA, bfloat16 waits for the host nowhere; for float32 and float16 grouped_mm itself reads the offsets on the
    host. See `moe_ep.grouped_mlp` for what is kept for backward and for sizes that are not multiples of 16 bytes.
    """

    def __init__(self, config: MoEConfig, num_local: int, first_expert: int, layer_index: int) -> None:
        _refuse_float64(getattr(torch, config.dtype))
        super().__init__(config, num_local, first_expert, layer_index)

    def compute(self, inp: ExpertInput) -> Tensor:
        """See GroupedExperts.forward."""
        _refuse_float64(self.w_down.dtype)
        return self._grouped(inp, (self.w_gate_up, self.w_down))

    def compute_sets(self, inp: ExpertInput, sets: Sequence[Weights]) -> Tensor:
        """See GroupedExperts; a call for each set, on rows that are expanded and split on the host."""
        _refuse_float64(self.w_down.dtype)
        parts = split_input(inp, [w_down.shape[0] for _, w_down in sets])
        return torch.cat([self._grouped(part, weights) for part, weights in zip(parts, sets, strict=True)])

    def _grouped(self, inp: ExpertInput, weights: Weights) -> Tensor:
        return grouped_swiglu(inp, *weights, weight_activation=self.config.weighting == "activation")

    @classmethod
    def replica_refusal(cls, host_counts: bool) -> str | None:
        """See GroupedExperts."""
        return None if host_counts else HOST_SPLIT

    def reserve_refusal(self, device: torch.device) -> str | None:
        """See GroupedExperts."""
        return grouped_mm_refusal(device, self.w_down.dtype)


HOST_SPLIT = (
    "they compute a rank's own experts and its copies in two calls, whose rows are split on the host, and this "
    "dispatcher reads no counts there (leave capacity_factor unset, or take experts = 'quack')"
)


def _refuse_float64(dtype: torch.dtype) -> None:
    if dtype == torch.float64:
        raise Unavailable(
            "experts = 'torch' cannot compute in float64: torch.nn.functional.grouped_mm takes float32, bfloat16 and "
            "float16 only; set experts = 'loop'"
        )


@register_experts("loop")
class LoopExperts(GroupedExperts):
    """The reference: one expert after the other in plain torch, any float dtype; waits for the counts on a device."""

    def compute(self, inp: ExpertInput) -> Tensor:
        """See GroupedExperts.forward; here the rows beyond offsets[L] are zero."""
        return self.compute_sets(inp, [(self.w_gate_up, self.w_down)])

    def compute_sets(self, inp: ExpertInput, sets: Sequence[Weights]) -> Tensor:
        """See GroupedExperts; one expert after the other all the same."""
        counts = inp.host_counts or tuple(inp.tokens_per_expert.tolist())
        every = [both for gate_up, down in sets for both in zip(gate_up, down, strict=True)]
        total = sum(counts)
        # every expert is visited, also without rows: its parameters must get zero gradients, not None
        rows = inp.rows()[:total].split(counts)
        weights = inp.row_weights[:total].split(counts)
        parts = [self._expert(expert, x, w) for expert, x, w in zip(every, rows, weights, strict=True)]
        tail = parts[0].new_zeros((inp.capacity - total, self.w_down.shape[1]))
        return torch.cat([*parts, tail])

    def _expert(self, expert: Weights, x_NH: Tensor, weights_N: Tensor) -> Tensor:
        w_gate_up, w_down = expert  # [2I, H], [H, I]
        gate, up = F.linear(x_NH, w_gate_up).chunk(2, dim=-1)
        act = F.silu(gate) * up
        if self.config.weighting == "activation":
            return F.linear(_scaled(act, weights_N), w_down)
        return _scaled(F.linear(act, w_down), weights_N)


class SharedExperts(nn.Module):
    """The experts that every token visits: one SwiGLU of num_shared_experts * shared_intermediate_size.

    Attributes:
        w_gate_up: [2*I_s, H], the gate half first.
        w_down: [H, I_s].
        w_gate: [H], or None without `shared_expert_gate`: the output is scaled by sigmoid(x . w_gate), as in
            Qwen2-MoE (arXiv:2407.10671).
    """

    def __init__(self, config: MoEConfig, layer_index: int = 0) -> None:
        super().__init__()
        inner_size = config.num_shared_experts * config.shared_intermediate_size
        require(inner_size >= 1, f"shared experts need num_shared_experts >= 1, got {config.num_shared_experts}")
        self.config, self.layer_index = config, layer_index
        dtype: torch.dtype = getattr(torch, config.dtype)
        self.w_gate_up = nn.Parameter(torch.empty(2 * inner_size, config.hidden_size, dtype=dtype))
        self.w_down = nn.Parameter(torch.empty(config.hidden_size, inner_size, dtype=dtype))
        self.w_gate: nn.Parameter | None = None
        if config.shared_expert_gate:
            self.w_gate = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype))
        self.reset_parameters(0)

    def reset_parameters(self, seed: int) -> None:
        """Draw float32 normal(0, init_std) values that depend on (seed, layer_index) alone, and cast them."""
        generator = generator_for(seed, self.layer_index, SHARED_EXPERT_ID)
        for parameter in self.parameters():
            normal_(parameter, self.config.init_std, generator)

    def forward(self, x_TH: Tensor) -> Tensor:
        """[T, H] in x's dtype, which must be the parameters' (InputError otherwise); T may be 0."""
        if x_TH.dtype != self.w_down.dtype or x_TH.shape[-1] != self.w_down.shape[0]:
            raise InputError(
                f"shared experts of H = {self.w_down.shape[0]} in {self.w_down.dtype} got x {tuple(x_TH.shape)} in "
                f"{x_TH.dtype}; cast x or build the layer with its dtype and size"
            )
        with no_autocast(x_TH.device):
            gate, up = F.linear(x_TH, self.w_gate_up).chunk(2, dim=-1)
            y_TH = F.linear(F.silu(gate) * up, self.w_down)
            if self.w_gate is None:
                return y_TH
            return _scaled(y_TH, torch.sigmoid(_at_least_float32(x_TH @ self.w_gate)))


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _scaled(rows: Tensor, weights_N: Tensor) -> Tensor:
    """Rows times their weights, multiplied in at least float32 and rounded once."""
    return (rows * weights_N.unsqueeze(-1)).to(rows.dtype)


def _check_input(inp: ExpertInput, num_local: int, w_down: Tensor) -> None:
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


def _check_reserve(experts: GroupedExperts, reserve_sms: int, device: torch.device) -> None:
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

"""Typed configuration. Plain values only: nothing here runs or allocates.

Each of these dataclasses checks itself (`config_checks`), against its own annotations too (`schema`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from .config_checks import check_moe, sorted_options
from .schema import check_types, from_mapping, known_keywords, require

RouterName = Literal["softmax", "sigmoid", "grouped"]
Weighting = Literal["output", "activation"]
AuxLevel = Literal["batch", "sequence", "none"]
Kernels = Literal["auto", "cuda", "torch"]
ReplicaPlanner = Literal["quota", "fixed_rows"]
ReplicaTransport = Literal["auto", "peer", "messages"]


@known_keywords
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """What a dispatcher needs to know; equal on every rank of its group (checked at construction).

    Attributes:
        name: a registered dispatcher.
        num_experts: E over all ranks; must be divisible by the group's size.
        top_k: K.
        hidden_size: H.
        dtype: dtype of x, one of DTYPES.
        max_tokens: most tokens of one rank's micro-batch, or None where the back end needs no bound.
        router: which router makes the routing ("grouped" promises column j's expert to lie in group j).
        num_groups: expert groups of the grouped router, else 0.
        capacity_factor: rows = factor x balanced rows, without a host sync; None: counts are read by the host.
        num_sms: SMs that a GPU back end may use, None for its default. all2all and agrs open a process group for rows
            that has so few; with several micro-batches the experts' GEMMs leave as many free.
        kernels: what moves rows on a GPU, see MoEConfig.
        num_micro_batches: most micro-batches that a layer interleaves, so how many tickets are in flight at once.
        options: further back-end keys, see MoEConfig.
    """

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    dtype: str = "float32"
    max_tokens: int | None = None
    router: str = "softmax"
    num_groups: int = 0
    capacity_factor: float | None = None
    num_sms: int | None = None
    kernels: Kernels = "auto"
    num_micro_batches: int = 1
    options: Any = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", sorted_options(self.options))
        check_types(self)


@known_keywords
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """Copies of hot experts, made for each micro-batch anew; see `moe_ep.replica`.

    Attributes:
        slots: S, copies of other ranks' experts that a rank can hold at a time; 0: none are made.
        planner: "quota" lowers the largest rank load as far as S slots allow; "fixed_rows" gives every rank its equal
            share, and needs S >= E/R.
        min_quota: fewest rows of a micro-batch that are worth a copy.
        joint: micro-batches that interleave share one placement and one copy of the weights, each with quotas of its
            own; they are then routed all of them before the first is sent.
        transport: "messages" of the process group, kernels over "peer" memory, or "auto": peer memory where all ranks
            can, else messages.
    """

    slots: int = 0
    planner: ReplicaPlanner = "quota"
    min_quota: int = 1
    joint: bool = False
    transport: ReplicaTransport = "auto"

    def __post_init__(self) -> None:
        check_types(self)
        require(self.slots >= 0, f"slots must not be negative, got {self.slots}; 0 makes no copies")
        require(
            1 <= self.min_quota < 2**31,
            f"min_quota must lie in [1, 2^31), got {self.min_quota}: rows are counted in 32 bits",
        )
        require(
            self.planner == "quota" or (self.min_quota == 1 and not self.joint),
            f"planner = {self.planner!r} gives every rank its equal share, so min_quota = {self.min_quota} and joint = "
            f"{self.joint} cannot be kept to; use min_quota = 1 and joint = false, or planner = 'quota'",
        )
        without = [f.name for f in dataclasses.fields(self) if self.slots == 0 and getattr(self, f.name) != f.default]
        require(not without, f"{', '.join(without)} would have no effect with slots = 0; set slots, or leave it out")


@known_keywords
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """One MoE layer. Every field but the sizes has the default that a recipe's `[moe]` section has.

    Attributes:
        hidden_size, expert_intermediate_size, num_experts, top_k: H, I, E, K.
        num_shared_experts: experts that every token visits (0: none); together they are one SwiGLU of
            `num_shared_experts * shared_intermediate_size`.
        shared_intermediate_size: inner size of one shared expert.
        shared_expert_gate: scale the shared experts' output by sigmoid(x . w), w in R^H.
        dtype: parameter and activation dtype; the router always computes in float32.
        max_tokens: most tokens of one rank's micro-batch (None: unbounded where the dispatcher allows it).
        dispatcher, experts: registered names.
        weighting: "output" scales the down projection's output rows, "activation" its input (Megatron's convention).
        router: "softmax", "sigmoid" (selection bias updated from load) or "grouped" (top K/num_groups in each group).
        normalize_weights: divide the K weights by their sum.
        routed_scale: factor on the weights, after normalisation.
        num_groups: groups of the grouped router.
        aux_loss: level of the load-balancing loss.
        aux_loss_coef, z_loss_coef: 0 means that the loss is not computed at all.
        bias_update_rate: step of the sigmoid router's selection bias per optimizer step; 0: no bias update.
        force_balance: replace the chosen ids by an even pattern (for A/B measurements).
        kernels: what moves rows on a GPU: "torch", "cuda" (the package's kernels; refused where they cannot run) or
            "auto" (the kernels where they can run, else torch and a warning).
        capacity_factor, num_sms, num_micro_batches: see DispatchConfig.
        options: back-end keys: a dict, or (key, value) pairs; kept as a tuple of sorted pairs.
        replica: copies of hot experts; a dict of its fields will do.
        init_std: standard deviation of the initial weights; a function of the global expert id, not of the rank.
    """

    hidden_size: int
    expert_intermediate_size: int
    num_experts: int
    top_k: int
    num_shared_experts: int = 0
    shared_intermediate_size: int = 0
    shared_expert_gate: bool = False
    dtype: str = "float32"
    max_tokens: int | None = None
    dispatcher: str = "all2all"
    experts: str = "torch"
    weighting: Weighting = "output"
    router: RouterName = "softmax"
    normalize_weights: bool = True
    routed_scale: float = 1.0
    num_groups: int = 0
    aux_loss: AuxLevel = "batch"
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    bias_update_rate: float = 0.0
    force_balance: bool = False
    kernels: Kernels = "auto"
    capacity_factor: float | None = None
    num_sms: int | None = None
    num_micro_batches: int = 1
    options: Any = ()
    replica: ReplicaConfig = dataclasses.field(default_factory=ReplicaConfig)
    init_std: float = 0.02

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", sorted_options(self.options))
        if isinstance(self.replica, Mapping):
            object.__setattr__(self, "replica", from_mapping(ReplicaConfig, self.replica, "replica"))
        check_types(self)
        check_moe(self)

    def dispatch(self, num_ranks: int = 1) -> DispatchConfig:
        """The part that the dispatcher of a group of R = num_ranks sees.

        With replicas that is P = E + R*S physical experts, and a routing that keeps to no columns any more.
        """
        rerouted = self.replica.slots > 0
        return DispatchConfig(
            name=self.dispatcher,
            num_experts=self.num_experts + num_ranks * self.replica.slots,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            dtype=self.dtype,
            max_tokens=self.max_tokens,
            router="softmax" if rerouted else self.router,
            num_groups=0 if rerouted else self.num_groups,
            capacity_factor=self.capacity_factor,
            num_sms=self.num_sms,
            kernels=self.kernels,
            num_micro_batches=self.num_micro_batches,
            options=self.options,
        )

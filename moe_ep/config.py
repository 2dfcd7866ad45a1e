"""Typed configuration and its validation. Plain values only: nothing here runs or allocates.

`from_mapping` turns a table (of a TOML file or keyword arguments) into one of these dataclasses and refuses unknown
keys, wrong types and values outside a closed choice, naming what would be valid. Recipes use it for their own sections.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from .bounds import NOT_NEGATIVE, POSITIVE, Range, check_ranges
from .errors import RecipeError

RouterName = Literal["softmax", "sigmoid", "grouped"]
Weighting = Literal["output", "activation"]
AuxLevel = Literal["batch", "sequence", "none"]
Kernels = Literal["auto", "cuda", "torch"]
MAX_MICRO_BATCHES = 63  # interleaved; ranks compare the number in six bits
ReplicaPlanner = Literal["quota", "fixed_rows"]
ReplicaTransport = Literal["auto", "peer", "messages"]
DTYPES = ("float32", "bfloat16", "float16", "float64")
C = TypeVar("C")
_RANGES = {
    **dict.fromkeys(("num_shared_experts", "aux_loss_coef", "z_loss_coef", "bias_update_rate"), NOT_NEGATIVE),
    "init_std": NOT_NEGATIVE,
    "routed_scale": POSITIVE,
    "capacity_factor": Range(at_least=1, why="(rows are never dropped)"),
}


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
        require(self.min_quota >= 1, f"min_quota must be at least 1, got {self.min_quota}")
        require(
            self.planner == "quota" or (self.min_quota == 1 and not self.joint),
            f"planner = {self.planner!r} gives every rank its equal share, so min_quota = {self.min_quota} and joint = "
            f"{self.joint} cannot be kept to; use min_quota = 1 and joint = false, or planner = 'quota'",
        )
        without = [f.name for f in dataclasses.fields(self) if self.slots == 0 and getattr(self, f.name) != f.default]
        require(not without, f"{', '.join(without)} would have no effect with slots = 0; set slots, or leave it out")


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


def sorted_options(options: Any) -> tuple[tuple[str, Any], ...]:
    """Back-end keys as sorted pairs, so that equal ones are equal and can be compared between ranks.

    Raises:
        RecipeError: neither a dict nor pairs, a key that is no text or comes twice, a value that cannot be compared.
    """
    given = list(options.items()) if isinstance(options, Mapping) else options
    pairs = isinstance(given, list | tuple) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in given)
    require(pairs, f"options = {options!r} must be a dict, such as {{'expand': True}}, or (key, value) pairs")
    for key, _ in given:
        require(isinstance(key, str), f"options: key {key!r} must be str, got {type(key).__name__}")
        require([k for k, _ in given].count(key) == 1, f"options: key {key!r} comes twice; give it one value")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in given}
    for key, value in values.items():
        require(
            value is None or isinstance(value, bool | int | float | str | tuple),
            f"options: {key} = {value!r} must be a plain value, got {type(value).__name__}",
        )
    return tuple((key, values[key]) for key in sorted(values))


def check_types(config: Any) -> None:
    """Hold every field of a dataclass against its annotation, as `from_mapping` does for a table.

    Raises:
        RecipeError: wrong type, or a value outside a Literal.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        coerce(getattr(config, field.name), hints[field.name], field.name)


def check_num_micro_batches(number: int) -> None:
    """Refuse more than ranks compare; beyond that, one that interleaves another number would be waited for.

    Raises:
        RecipeError: value, limit and way out.
    """
    require(
        number <= MAX_MICRO_BATCHES,
        f"{number} micro-batches are more than the {MAX_MICRO_BATCHES} that can be interleaved; pass fewer at once "
        "(num_micro_batches, train.intra_layer_micro_batch of a recipe) and accumulate gradients over several passes",
    )


def check_moe(config: MoEConfig) -> None:
    """Refuse what no machine and no group could run.

    Raises:
        RecipeError: one sentence with key, value and what would be valid.
    """
    for name in ("hidden_size", "expert_intermediate_size", "num_experts", "top_k", "num_micro_batches"):
        require(getattr(config, name) >= 1, f"{name} must be at least 1, got {getattr(config, name)}")
    check_num_micro_batches(config.num_micro_batches)
    require(config.dtype in DTYPES, f"dtype {config.dtype!r} is not one of {', '.join(DTYPES)}")
    require(
        config.top_k <= config.num_experts,
        f"top_k = {config.top_k} is larger than num_experts = {config.num_experts}; choose top_k <= num_experts",
    )
    for name in ("max_tokens", "num_sms"):
        value = getattr(config, name)
        require(value is None or value >= 1, f"{name} must be at least 1, got {value}; or leave it unset")
    check_ranges(config, _RANGES)
    require(
        config.num_shared_experts == 0 or config.shared_intermediate_size >= 1,
        f"num_shared_experts = {config.num_shared_experts} needs shared_intermediate_size >= 1, "
        f"got {config.shared_intermediate_size}",
    )
    require(
        config.num_shared_experts > 0 or config.shared_intermediate_size == 0,
        f"shared_intermediate_size = {config.shared_intermediate_size} needs num_shared_experts >= 1, got 0",
    )
    require(
        not config.shared_expert_gate or config.num_shared_experts > 0,
        "shared_expert_gate = true needs num_shared_experts >= 1, got 0",
    )
    require(
        config.aux_loss_coef == 0 or config.aux_loss != "none",
        f"aux_loss_coef = {config.aux_loss_coef} needs aux_loss = 'batch' or 'sequence', got 'none'; "
        "name a level or set the coefficient to 0",
    )
    require(
        config.bias_update_rate == 0 or config.router == "sigmoid",
        f"bias_update_rate = {config.bias_update_rate} works with router = 'sigmoid', got {config.router!r}; "
        "set it to 0 or change the router",
    )
    _check_groups(config)


def _check_groups(config: MoEConfig) -> None:
    groups = config.num_groups
    if config.router != "grouped":
        require(groups == 0, f"num_groups = {groups} works with router = 'grouped', got {config.router!r}")
        return
    require(groups >= 1, f"router = 'grouped' needs num_groups >= 1, got {groups}")
    require(
        config.num_experts % groups == 0 and config.top_k % groups == 0,
        f"num_groups = {groups} must divide num_experts = {config.num_experts} and top_k = {config.top_k}",
    )
    require(
        config.top_k // groups <= config.num_experts // groups,
        f"top_k / num_groups = {config.top_k // groups} is larger than the group's "
        f"{config.num_experts // groups} experts",
    )


def require(condition: bool, message: str) -> None:
    """Raise RecipeError(message) unless the condition holds."""
    if not condition:
        raise RecipeError(message)


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that lists the known names, with the nearest one first where one is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names) or 'none'}"


def from_mapping(cls: type[C], table: Mapping[str, Any], where: str) -> C:
    """Build the dataclass `cls` from a table, strictly.

    Args:
        cls: a dataclass whose fields are str, int, float, bool, tuple, Literal, or any of them | None.
        table: keys and values as TOML gives them. An int is accepted for a float, never the other way round.
        where: what a message starts with, such as "recipes/tiny.toml [moe]".

    Raises:
        RecipeError: unknown key (with the nearest known one), missing key, wrong type, value outside a Literal.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in table:
        require(key in fields, f"{where}: unknown key {key!r}; {nearest(key, fields)}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        require(not required or name in table, f"{where}: key {name!r} is missing; it has no default")
    values = {key: coerce(value, hints[key], f"{where}.{key}") for key, value in table.items()}
    try:
        return cls(**values)
    except RecipeError as err:
        raise RecipeError(f"{where}: {err}") from err


def coerce(value: Any, hint: Any, where: str) -> Any:
    """Check one value against a type hint; RecipeError with value and what would be valid."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        choices = typing.get_args(hint)
        require(value in choices, f"{where} = {value!r} is not one of {', '.join(map(repr, choices))}")
        return value
    if origin in (typing.Union, types.UnionType):
        options = [h for h in typing.get_args(hint) if h is not type(None)]
        if value is None and type(None) in typing.get_args(hint):
            return None
        return _coerce_any(value, options, where)
    if origin is tuple:
        require(isinstance(value, list | tuple), f"{where} = {value!r} must be a list")
        return tuple(value)
    if type(value) is int:
        require(-(2**63) <= value < 2**63, f"{where} = {value} does not fit into 64 bits")
        value = float(value) if hint is float else value
    if hint is Any or (isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool)):
        return value
    raise RecipeError(f"{where} = {value!r} must be {hint.__name__}, got {type(value).__name__}{_way_out(value, hint)}")


def _way_out(value: Any, hint: Any) -> str:
    """What to write in place of a value of a type that PyTorch users often try; empty where the type says it."""
    if dataclasses.is_dataclass(hint):
        return f"; give a dict of its fields: {', '.join(f.name for f in dataclasses.fields(hint))}"
    if hint is str and type(value).__module__ == "torch" and str(value).startswith("torch."):
        return f"; write its name, {str(value).removeprefix('torch.')!r}"
    return ""


def _coerce_any(value: Any, options: list[Any], where: str) -> Any:
    errors = []
    for hint in options:
        try:
            return coerce(value, hint, where)
        except RecipeError as err:
            errors.append(str(err))
    raise RecipeError("; or ".join(errors))

"""What a configuration alone shows to be impossible, on any machine and in any group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .bounds import NOT_NEGATIVE, POSITIVE, Range, check_ranges
from .schema import require

if TYPE_CHECKING:
    from .config import MoEConfig

DTYPES = ("float32", "bfloat16", "float16", "float64")
MAX_MICRO_BATCHES = 63  # interleaved; ranks compare the number in six bits
_RANGES = {
    **dict.fromkeys(("num_shared_experts", "aux_loss_coef", "z_loss_coef", "bias_update_rate"), NOT_NEGATIVE),
    "init_std": NOT_NEGATIVE,
    "routed_scale": POSITIVE,
    "capacity_factor": Range(at_least=1, why="(rows are never dropped)"),
}


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
    _check_sizes(config)
    check_ranges(config, _RANGES)
    _check_shared_experts(config)
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


def _check_sizes(config: MoEConfig) -> None:
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


def _check_shared_experts(config: MoEConfig) -> None:
    number, inner_size = config.num_shared_experts, config.shared_intermediate_size
    require(
        number == 0 or inner_size >= 1,
        f"num_shared_experts = {number} needs shared_intermediate_size >= 1, got {inner_size}",
    )
    require(
        number > 0 or inner_size == 0, f"shared_intermediate_size = {inner_size} needs num_shared_experts >= 1, got 0"
    )
    require(
        not config.shared_expert_gate or number > 0, "shared_expert_gate = true needs num_shared_experts >= 1, got 0"
    )


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

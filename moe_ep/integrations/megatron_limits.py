"""What of Megatron-Core's configuration our MoE layer serves: versions tried, flags refused, both by their names."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ..errors import RecipeError, Unavailable
from ..schema import nearest

TRIED = ("0.16.1", "0.19.2")
# selective recompute of these holds several micro-batches; others keep one state per layer until its backward
RECOMPUTED_BY_ONE = ("core_attn", "mla_up_proj", "moe_act", "shared_experts")


class Limit(NamedTuple):
    """A flag of TransformerConfig, whether a value of it is served, and why others are not, with the way out."""

    flag: str
    served: Callable[[Any], bool]
    why: str


def _off(value: Any) -> bool:
    return value is None or value is False or value in (0, "none")


def _one(value: Any) -> bool:
    return value is None or value == 1


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


_OVERLAP = "it drives Megatron's own dispatchers stage by stage; interleave micro-batches with use_domino instead"
_PADDING = "rows are neither dropped nor padded here; unset it"
_FLEX = "only Megatron's flex dispatcher reads it; unset it, and give num_sms and options to use_moe_ep"
_SPLIT = "an expert is not split here; set it to 1"
_GRAPH = "tickets are not restored by a graph's replay; "


def _default(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or value in values


LAYER_LIMITS = (
    Limit("moe_token_dispatcher_type", lambda v: v in ("alltoall", "allgather"), "set it to 'alltoall': ours replaces"
          " that one, and 'flex' would start another library first"),
    Limit("expert_tensor_parallel_size", _one, _SPLIT),
    Limit("expert_gtp_weight_remat_size", _one, _SPLIT + ", and expert_tensor_parallel_num_weight_shards, too"),
    Limit("moe_extended_tp", _off, "an expert is not split here; unset it"),
    Limit("overlap_moe_expert_parallel_comm", _off, _OVERLAP),
    Limit("overlap_dispatch_backward_with_experts_wgrad", _off, _OVERLAP),
    Limit("delay_wgrad_compute", _off, _OVERLAP),
    Limit("ep_overlap_early_attn_memory_release", _off, _OVERLAP),
    Limit("high_priority_a2a_comm_stream", _off, _OVERLAP + ", whose stream has a high priority"),
    Limit("moe_shared_expert_overlap", _off, "shared experts are run by Megatron's dispatchers then; unset it"),
    Limit("moe_expert_capacity_factor", lambda v: v is None, _PADDING),
    Limit("moe_pad_expert_input_to_capacity", _off, _PADDING),
    Limit("moe_router_padding_for_quantization", _off, _PADDING),
    Limit("moe_router_padding_for_fp8", _off, _PADDING),
    Limit("moe_expert_rank_capacity_factor", lambda v: v is None, _PADDING),
    Limit("moe_token_dropping", _off, _PADDING),
    Limit("moe_pad_experts_for_cuda_graph_inference", _off, _PADDING),
    Limit("moe_paged_stash", _off, "it needs rows padded to a capacity; unset it"),
    Limit("cuda_graph_impl", _off, _GRAPH + "set it to 'none'"),
    Limit("enable_cuda_graph", _off, _GRAPH + "unset it"),
    Limit("external_cuda_graph", _off, _GRAPH + "unset it"),
    Limit("transformer_impl", lambda v: v != "inference_optimized", "it exchanges the dispatcher for inference"),
    Limit("moe_enable_deepep", _off, _FLEX),
    Limit("moe_flex_dispatcher_num_sms", _default(), _FLEX),
    Limit("moe_deepep_num_sms", _default(20), _FLEX),
    Limit("moe_hybridep_num_sms", _default(16), _FLEX),
    Limit("moe_hybridep_num_sms_preprocessing", _default(108), _FLEX),
    Limit("moe_hybridep_num_blocks_permute", _default(), _FLEX),
    Limit("moe_hybridep_num_blocks_unpermute", _default(), _FLEX),
    Limit("moe_hybridep_pad_uneven_dispatch_inputs", _off, _FLEX),
    Limit("moe_permute_fusion_into_hybridep", _off, _FLEX),
    Limit("moe_ncclep_static_shape", _off, _FLEX),
    Limit("moe_ncclep_zero_copy", _off, _FLEX),
)  # fmt: skip

DOMINO_LIMITS = (
    Limit("tensor_model_parallel_size", _one, "tried without tensor parallelism only; set it to 1"),
    Limit("gtp_weight_remat_size", _one, "tried with whole weights only; set tensor_parallel_num_weight_shards to 1"),
    Limit("pipeline_model_parallel_size", _one, "tried without pipeline stages only; set it to 1"),
    Limit("context_parallel_size", _one, "tried without context parallelism only; set it to 1"),
    Limit("hidden_dropout", _off, "the routed experts' output is added where it arrives, without dropout; set it to 0"),
    Limit("moe_latent_size", lambda v: v is None, "the projection behind the experts is not interleaved; unset it"),
    Limit("mtp_num_layers", _off, "multi-token prediction layers are not interleaved; unset it"),
    Limit("mlp_chunks_for_training", _one, "it cuts the micro-batch in another way; set it to 1"),
    Limit("fp8", _off, "its scaling context spans one micro-batch; unset it"),
    Limit("fp4", _off, "its scaling context spans one micro-batch; unset it"),
    Limit("cpu_offloading", _off, "it keeps one state per layer; unset it"),
    Limit("fine_grained_activation_offloading", _off, "it keeps one state per layer; unset it"),
    Limit("fp32_residual_connection", _off, "routed experts answer in their own dtype; unset it"),
)  # fmt: skip

REPLICA_LIMITS = (
    Limit("gated_linear_unit", bool, "slots hold a gate and an up projection; set it to True"),
    Limit("add_bias_linear", _off, "a copy has no biases; set it to False"),
    Limit("fp8", _off, "tried in the parameters' own dtype only; unset it"),
    Limit("fp4", _off, "tried in the parameters' own dtype only; unset it"),
    Limit("use_transformer_engine_op_fuser", _off, "fused experts keep references to their own weights; unset it"),
)  # fmt: skip

_CHOICE = "its choice of experts cannot be replayed when a layer is computed again; "
RECOMPUTE_LIMITS = (
    Limit("moe_router_fusion", _off, _CHOICE + "unset it"),
    Limit("moe_router_load_balancing_type", lambda v: not {"sinkhorn", "quantile_balancing"}.intersection(_listed(v)),
          _CHOICE + "use 'aux_loss', 'seq_aux_loss', 'global_aux_loss' or 'none'"),
    Limit("moe_router_force_biased", lambda v: v is None, _CHOICE + "unset it"),
    Limit("use_te_rng_tracker", _off, "its random states cannot be set back; unset it"),
    Limit("distribute_saved_activations", _off, "a layer's inputs are kept whole; unset it"),
)  # fmt: skip


def refuse(config: Any, limits: Iterable[Limit], who: str) -> None:
    """Hold a TransformerConfig against limits; a flag that this version does not have is not set.

    Raises:
        RecipeError: the flag's name, its value, why, and what to set.
    """
    for flag, served, why in limits:
        value = getattr(config, flag, None)
        if not served(value):
            raise RecipeError(f"{flag} = {value!r} is not supported by {who}: {why}")


def selected_modules(config: Any) -> set[str]:
    """Modules of selective recompute."""
    on = getattr(config, "recompute_granularity", None) == "selective"
    return set(config.recompute_modules or ()) if on else set()


def refuse_recompute(config: Any, who: str) -> None:
    """Recompute that is not served where several micro-batches are in one layer.

    Raises:
        RecipeError: the flag, its value and what works.
    """
    modules, whole = selected_modules(config), getattr(config, "recompute_granularity", None) == "full"
    strange = sorted(modules - {*RECOMPUTED_BY_ONE, "moe"})
    if strange:
        raise RecipeError(
            f"recompute_modules = {strange} is not supported by {who}: they keep one state per layer; these work: "
            f"{', '.join(RECOMPUTED_BY_ONE)}, moe"
        )
    inside = sorted(modules & {"moe_act", "shared_experts"})
    if "moe" in modules and inside:
        raise RecipeError(
            f"recompute_modules = {inside} is not supported by {who} beside 'moe', which computes them again already; "
            "leave them out"
        )
    if whole and config.recompute_method == "uniform" and config.recompute_num_layers != 1:
        raise RecipeError(
            f"recompute_num_layers = {config.recompute_num_layers} is not supported by {who} with recompute_method = "
            "'uniform': each layer is recomputed by itself; set it to 1"
        )
    if whole or "moe" in modules:
        refuse(config, RECOMPUTE_LIMITS, f"recompute with {who}")


def scaled_for_pieces(config: Any, who: str) -> None:
    """Balancing losses that Megatron would count once for each piece of a batch.

    Raises:
        RecipeError: such a loss is on.
    """
    if getattr(config, "calculate_per_token_loss", False):
        return
    coefficients = config.moe_aux_loss_coeff
    on = any(coefficients) if isinstance(coefficients, list | tuple) else bool(coefficients)
    for flag, value in (("moe_aux_loss_coeff", on), ("moe_z_loss_coeff", bool(config.moe_z_loss_coeff))):
        if value:
            raise RecipeError(
                f"{flag} = {getattr(config, flag)!r} is not supported by {who}: Megatron adds a mean over each piece "
                "of the batch, so the loss would grow with their number; set calculate_per_token_loss = True (a sum "
                "over tokens), or the coefficient to 0"
            )


@functools.cache
def check_version(version: str) -> None:
    """Warn, once, about a version of Megatron-Core that nobody has tried."""
    if version not in TRIED:
        warnings.warn(
            f"Megatron-Core {version} was never tried with moe_ep; these were: {', '.join(TRIED)}. Its MoE layer may "
            "call dispatchers in another way",
            stacklevel=2,
        )


def megatron_version() -> str:
    """The version of Megatron-Core.

    Raises:
        Unavailable: it is not installed.
    """
    try:
        import megatron.core
    except ImportError as err:
        raise Unavailable(f"Megatron-Core cannot be imported ({err}); install moe-ep[megatron]") from err
    return str(megatron.core.__version__)


def known_options(options: Iterable[str], known: Iterable[str]) -> None:
    """Refuse an option that our layer does not have.

    Raises:
        RecipeError: the nearest one.
    """
    names = set(known)
    for name in options:
        if name not in names:
            raise RecipeError(f"unknown option {name!r} of the MoE layer; {nearest(name, names)}")

"""Megatron-Core's MoE layer with a dispatcher of ours, as a ModuleSpec."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from ..config import Kernels, MoEConfig
from ..dispatch.base import Dispatcher
from ..dispatch.registry import build_dispatcher
from ..errors import RecipeError
from ..replica.build import check_replicas
from .megatron_dispatcher import TicketDispatcher
from .megatron_limits import LAYER_LIMITS, check_version, known_options, megatron_version, refuse
from .megatron_replicas import ExpertCopies, replica_config

OPTIONS = ("dispatcher", "max_tokens", "capacity_factor", "num_sms", "kernels", "options", "replica")


class MegatronMoELayer(MoELayer):
    """Megatron's own MoE layer (router, experts, shared experts, losses, checkpoints) on one of our dispatchers.

    Its parameters and `sharded_state_dict` are those of Megatron's layer. Experts scale their activation by the
    routing weights, as always in Megatron, so combine is a plain sum. `moe_permute_fusion` concerns Megatron's
    dispatchers only; what moves rows here is `kernels`.

    Args:
        config: TransformerConfig; `moe_token_dispatcher_type` must be one that Megatron can build here, 'alltoall'.
        submodules, layer_number, pg_collection, others: as Megatron passes them.
        dispatcher: a registered name.
        max_tokens: most tokens of a micro-batch on one rank (sequence length x micro-batch size, over context and
            sequence parallel ranks), where the back end needs it.
        capacity_factor, num_sms, kernels: see DispatchConfig.
        options: further keys of the back end.
        replica: copies of hot experts, keys of ReplicaConfig such as {"slots": 2}; see `megatron_replicas`.

    Raises:
        RecipeError: a flag of the configuration that is not served, by name, with the way out.
        Unavailable: the dispatcher cannot run here, with the reason.
        PeerError: the ranks disagree about the configuration.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        dispatcher: str = "all2all",
        max_tokens: int | None = None,
        capacity_factor: float | None = None,
        num_sms: int | None = None,
        kernels: Kernels = "auto",
        options: Mapping[str, Any] | None = None,
        replica: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        check_version(megatron_version())
        refuse(config, LAYER_LIMITS, "moe_ep's MoE layer")
        copied = replica_config(replica, config)
        named = {"submodules": submodules, "layer_number": layer_number, "pg_collection": pg_collection}
        super().__init__(config=config, **named, **others)
        group: dist.ProcessGroup = self.ep_group
        chosen = MoEConfig(
            dispatcher=dispatcher,
            num_experts=config.num_moe_experts,
            top_k=config.moe_router_topk,
            hidden_size=getattr(config, "moe_latent_size", None) or config.hidden_size,
            expert_intermediate_size=config.moe_ffn_hidden_size or config.ffn_hidden_size,
            dtype=str(config.params_dtype).removeprefix("torch."),
            max_tokens=max_tokens,
            capacity_factor=capacity_factor,
            num_sms=num_sms,
            kernels=kernels,
            options=tuple(sorted((options or {}).items())),
            replica=copied,
        )
        several = group if group.size() > 1 else None
        check_replicas(chosen, several)
        self.dispatcher: Dispatcher = build_dispatcher(chosen.dispatch(group.size()), several)
        if getattr(config, "deterministic_mode", False) and not self.dispatcher.capabilities.deterministic:
            raise RecipeError(
                f"deterministic_mode = True is not supported by dispatcher {dispatcher!r}, whose results may differ "
                "from run to run; unset it, or choose another dispatcher"
            )
        # The stock dispatcher, built by Megatron just now, holds nothing but settings.
        groups = _Groups(self, pg_collection)
        copies = ExpertCopies(self, chosen, self.dispatcher, pg_collection) if copied.slots else None
        index = self._index(self.layer_number or 1)
        self.token_dispatcher = TicketDispatcher(config, groups, self.dispatcher, index, copies)

    def set_layer_number(self, layer_number: int) -> None:
        """As Megatron's, counting from 1."""
        super().set_layer_number(layer_number)
        self.token_dispatcher.layer_index = self._index(layer_number)

    def _index(self, layer_number: int) -> int:
        """From 0; layers of multi-token prediction, which 0.19 counts from 1 again, are behind the decoder's."""
        behind = self.config.num_layers if getattr(self, "is_mtp_layer", False) else 0
        return int(behind + layer_number - 1)

    def extra_repr(self) -> str:
        """The resolved dispatcher and what copies experts, as `print(model)` shows it."""
        return f"dispatcher={self.runs()}"

    def runs(self) -> str:
        """The dispatcher, and what copies experts, in one line."""
        copies = self.token_dispatcher.copies
        return ", ".join([self.dispatcher.describe(), *([] if copies is None else [copies.runtime.describe()])])

    # Megatron's forward calls these one after the other, perhaps inside a recomputed region. Where one of them raises,
    # the other ranks are on their way to a communication and must not wait there for this one.

    def route(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's."""
        with self.telling("router"):
            return super().route(*args, **kwargs)

    def shared_experts_compute(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's."""
        with self.telling("shared experts"):
            return super().shared_experts_compute(*args, **kwargs)

    def preprocess(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's."""
        with self.telling("dispatch_preprocess"):
            return super().preprocess(*args, **kwargs)

    def routed_experts_compute(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's."""
        with self.telling("experts"):
            return super().routed_experts_compute(*args, **kwargs)

    def postprocess(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's."""
        with self.telling("combine_postprocess"):
            return super().postprocess(*args, **kwargs)

    @contextlib.contextmanager
    def telling(self, stage: str) -> Iterator[None]:
        """Around what runs while the other ranks expect this one's next communication."""
        try:
            yield
        except BaseException as err:
            self.token_dispatcher.abandon()
            where = f"layer {self.token_dispatcher.layer_index} ({stage})"
            self.dispatcher.raise_everywhere(err, where)
            raise


class _Groups:
    """The process groups that a token dispatcher asks for: those given, else those of Megatron's stock dispatcher."""

    def __init__(self, layer: MoELayer, given: Any) -> None:
        stock = layer.token_dispatcher
        self.ep = stock.ep_group if given is None else given.ep
        self.expt_tp = stock.tp_group if given is None else given.expt_tp
        self.tp_ep = stock.tp_ep_group if given is None else given.tp_ep


def moe_spec(native: Any, **options: Any) -> ModuleSpec:
    """A spec of Megatron's MoE layer (ModuleSpec or functools.partial) as one of ours, with the same submodules.

    Args:
        native: what Megatron's `get_moe_module_spec` returns.
        options: see MegatronMoELayer; they become the spec's params.

    Raises:
        RecipeError: no such layer, unknown option, or a value of `kernels` that does not exist.
    """
    known_options(options, OPTIONS)
    kernels = options.get("kernels", "auto")
    if kernels not in get_args(Kernels):
        raise RecipeError(f"kernels = {kernels!r} is not one of {', '.join(get_args(Kernels))}")
    if not _is_moe(native):
        raise RecipeError(f"{native!r} is no spec of Megatron's MoELayer; give what get_moe_module_spec returns")
    if isinstance(native, functools.partial):
        params = {key: value for key, value in native.keywords.items() if key != "submodules"}
        return ModuleSpec(
            module=MegatronMoELayer, submodules=native.keywords.get("submodules"), params={**params, **options}
        )
    return ModuleSpec(module=MegatronMoELayer, submodules=native.submodules, params={**native.params, **options})


def use_moe_ep(spec: Any, **options: Any) -> Any:
    """A copy of a layer's or block's spec in which every MoE layer is ours; the rest is untouched.

        spec = use_moe_ep(get_gpt_decoder_block_spec(config, use_transformer_engine=True), dispatcher="direct")
        model = GPTModel(config, spec, ...)

    Args:
        spec: ModuleSpec of a transformer layer, or TransformerBlockSubmodules. Derive the spec of multi-token
            prediction from the result.
        options: see MegatronMoELayer.

    Raises:
        RecipeError: it has no MoE layer; unknown option.
    """
    layers = getattr(spec, "layer_specs", None)
    if layers is not None:
        swapped = copy.copy(spec)
        swapped.layer_specs = [use_moe_ep(layer, **options) if _has_moe(layer) else layer for layer in layers]
        if any(map(_has_moe, layers)):
            return swapped
    elif _has_moe(spec):
        layer = copy.copy(spec)
        layer.submodules = copy.copy(spec.submodules)
        layer.submodules.mlp = moe_spec(spec.submodules.mlp, **options)
        return layer
    raise RecipeError(f"{type(spec).__name__} has no MoE layer; set num_moe_experts before the spec is made")


def _has_moe(spec: Any) -> bool:
    return _is_moe(getattr(getattr(spec, "submodules", None), "mlp", None))


def _is_moe(spec: Any) -> bool:
    module = spec.func if isinstance(spec, functools.partial) else getattr(spec, "module", None)
    return isinstance(module, type) and issubclass(module, MoELayer)


def moe_layers(model: Any) -> list[MegatronMoELayer]:
    """The MoE layers of a model that are ours, in module order."""
    return [module for module in model.modules() if isinstance(module, MegatronMoELayer)]


def expert_output(layer: MoELayer, rows: Tensor, counts: Tensor, probs: Tensor) -> Tensor:
    """Megatron's routed experts on what `expert_arguments` made of the rows.

    Raises:
        RecipeError: they answer with a bias.
    """
    y_NH, bias = layer.experts(rows, counts, probs)
    if bias is not None:
        raise RecipeError("experts with a bias of their own are not supported; set add_bias_linear = False")
    out: Tensor = y_NH
    return out

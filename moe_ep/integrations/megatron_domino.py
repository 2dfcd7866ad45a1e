"""Several micro-batches in each layer of a Megatron-Core transformer block, without a change to its schedule.

The block gets one micro-batch of B sequences, as always, and takes it through its layers as M pieces of B / M sequences
each, interleaved by `moe_ep.domino`: one piece's communication runs beside the others' attention and experts, in
forward and in backward. Values are those of the M pieces as micro-batches of their own; embedding, final norm, output
layer and loss see the whole batch.

What is not served is refused by name (`megatron_limits.DOMINO_LIMITS`): tensor, context and pipeline parallelism,
hidden dropout, fp8, multi-token prediction, offloading; at the call: packed sequences,
cross-attention, attention bias. With an inference context the forward is Megatron's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer as NativeMoELayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import WrappedTensor, make_viewless_tensor
from torch import Tensor

from ..dispatch.base import Dispatcher
from ..dispatch.ticket import Ticket
from ..domino import DominoLayer, launch
from ..errors import InputError, RecipeError
from ..flights import releasing
from ..layer import MoELayer
from ..replica.beside import LeaseBeside
from ..schedule_steps import Link
from .megatron_dispatcher import expert_arguments, routing_of, with_tail
from .megatron_layer import MegatronMoELayer, expert_output
from .megatron_limits import DOMINO_LIMITS, refuse, refuse_recompute, scaled_for_pieces
from .megatron_recompute import first_choice, set_recompute
from .megatron_replicas import ExpertCopies

WHO = "several micro-batches in one layer"
SHARED_BY_ALL = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "rotary_pos_cos_sin")
PER_SEQUENCE = ("attention_mask", "padding_mask")


@dataclass(slots=True, kw_only=True)
class _Flight:
    """One piece on its way through a layer; what `moe_ep.domino` asks of a LayerFlight."""

    ticket: Ticket
    probs_dtype: torch.dtype
    lease: LeaseBeside | None = None


class _Routed:
    """The routed experts of a Megatron layer with what `moe_ep.domino` asks of a MoELayer."""

    def __init__(self, layer: MegatronMoELayer) -> None:
        self.layer = layer
        self.dispatcher: Dispatcher = layer.dispatcher
        self.layer_index: int = layer.token_dispatcher.layer_index
        self.replicas: ExpertCopies | None = layer.token_dispatcher.copies
        self.recomputed = False

    def open_replicas(self, micro_batch: int, num_micro_batches: int, users: int = 1) -> LeaseBeside | None:
        copies = self.replicas
        return None if copies is None else copies.open(self.layer_index, micro_batch, num_micro_batches, users)

    def prepare(
        self,
        n: Tensor,
        padding: Tensor | None,
        *,
        micro_batch: int,
        waits: frozenset[Link],
        num_micro_batches: int,
        lease: LeaseBeside | None = None,
    ) -> _Flight:
        mask = None if padding is None else padding.transpose(0, 1).bool()
        with first_choice(self.layer.router) if self.recomputed else contextlib.nullcontext():
            probs, routing_map = self.layer.route(n, mask)
        routing = routing_of(routing_map, probs, self.dispatcher.config.top_k)
        with releasing(lease):
            if self.replicas is not None and lease is not None:
                routing = self.replicas.place(lease, routing)
            ticket = self.dispatcher.dispatch_preprocess(
                n.reshape(-1, n.shape[-1]),
                routing,
                layer=self.layer_index,
                micro_batch=micro_batch,
                waits=waits,
                num_micro_batches=num_micro_batches,
            )
        return _Flight(ticket=ticket, probs_dtype=probs.dtype, lease=lease)

    def compute(self, flight: _Flight, *, beside_others: bool) -> None:
        with self.layer.telling("experts"), releasing(flight.lease), self._expecting(flight.lease):
            rows = self.dispatcher.dispatch_postprocess(flight.ticket)
            y_NH = expert_output(self.layer, *expert_arguments(rows, flight.probs_dtype))
            self.dispatcher.combine_preprocess(flight.ticket, with_tail(y_NH, flight.ticket.num_rows))

    @contextlib.contextmanager
    def _expecting(self, lease: LeaseBeside | None) -> Iterator[None]:
        """The experts compute rows of this micro-batch."""
        if self.replicas is None or lease is None:
            yield
            return
        lease.join()
        self.replicas.expected = lease
        try:
            yield
        finally:
            self.replicas.expected = None

    def aux_of(self, flight: _Flight) -> None:
        return None  # Megatron's router has attached its losses to the weights


class _Piecewise(DominoLayer):
    """A Megatron TransformerLayer in pieces, for one call of the block."""

    shared_joins_routed: ClassVar[bool] = True  # Megatron adds shared to routed, and both to the residual stream

    def __init__(self, layer: Any, inputs: list[Mapping[str, Any]]) -> None:
        super().__init__()
        self.inputs = inputs
        self.native = (layer,)  # not a submodule: the block owns it
        self.routed = _Routed(layer.mlp) if isinstance(layer.mlp, MegatronMoELayer) else None
        self.moe = cast("MoELayer | None", self.routed)

    def attention_of(self, micro_batch: int, x: Tensor) -> tuple[Tensor, Tensor]:
        (layer,) = self.native
        h, _ = layer._forward_attention(hidden_states=x, **self.inputs[micro_batch])
        n = layer._forward_pre_mlp_layernorm(h)
        if isinstance(n, tuple):  # norms that are fused with the residual sum
            n, h = n
        return h, n

    def shared(self, n: Tensor) -> Tensor | None:
        (layer,) = self.native
        if self.moe is not None:
            out: Tensor | None = layer.mlp.shared_experts_compute(n)
            return out
        y, bias = layer.mlp(n)
        return y if bias is None else y + bias


class DominoTransformerBlock(TransformerBlock):
    """TransformerBlock whose forward takes its batch through the layers as M pieces. See the module.

    Args:
        micro_batches: M, which must divide the number of sequences of a batch; 1: Megatron's own forward.
        others: as for TransformerBlock.

    Raises:
        RecipeError: a flag that is not served, a MoE layer that is not ours, or more micro-batches than its dispatcher
            holds in flight.
    """

    def __init__(self, *args: Any, micro_batches: int, **others: Any) -> None:
        super().__init__(*args, **others)
        self._set(micro_batches)

    @classmethod
    def of(cls, block: TransformerBlock, micro_batches: int) -> DominoTransformerBlock:
        """The block of an existing one's modules; that one must not be used any more."""
        made = cls.__new__(cls)
        made.__dict__ = block.__dict__
        made._set(micro_batches)
        return made

    def _set(self, micro_batches: int) -> None:
        if micro_batches < 1:
            raise RecipeError(f"micro_batches must be at least 1, got {micro_batches}")
        self.micro_batches = micro_batches
        if micro_batches == 1:
            return
        refuse(self.config, DOMINO_LIMITS, WHO)
        refuse_recompute(self.config, WHO)
        scaled_for_pieces(self.config, WHO)
        for layer in self.layers:
            mlp = layer.mlp
            if isinstance(mlp, NativeMoELayer) and not isinstance(mlp, MegatronMoELayer):
                raise RecipeError(
                    f"layer {layer.layer_number} has Megatron's own MoE layer, whose dispatcher holds one micro-batch; "
                    "make its spec with use_moe_ep"
                )
            if isinstance(mlp, MegatronMoELayer):
                mlp.dispatcher.check_interleaving(micro_batches)

    def forward(self, hidden_states: Any, attention_mask: Tensor | None = None, *args: Any, **others: Any) -> Any:
        """[S, B, H] to [S, B, H], as Megatron's.

        Raises:
            InputError: M does not divide B, or an argument that cannot be cut into pieces.
            PeerError: another rank raised.
        """
        inference = others.get("inference_context") is not None or others.get("inference_params") is not None
        if self.micro_batches == 1 or inference:
            return super().forward(hidden_states, attention_mask, *args, **others)
        if args:
            raise InputError("give the arguments behind attention_mask by name")
        if isinstance(hidden_states, WrappedTensor):
            hidden_states = hidden_states.unwrap()
        x_SBH = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        pieces = _cut(x_SBH, {"attention_mask": attention_mask, **others}, self.micro_batches)
        x_SBH = self._through_layers(x_SBH, pieces)
        if self.final_layernorm is None:
            return x_SBH
        return make_viewless_tensor(inp=self.final_layernorm(x_SBH), requires_grad=True, keep_graph=True)

    def _through_layers(self, x_SBH: Tensor, pieces: list[dict[str, Any]]) -> Tensor:
        padding = [piece.pop("padding_mask", None) for piece in pieces]
        xs = [piece.contiguous() for piece in x_SBH.chunk(len(pieces), dim=1)]
        layers = [_Piecewise(layer, list(pieces)) for layer in self.layers]
        for layer in set_recompute(layers, self.config) if self.training else ():
            if layer.routed is not None:
                layer.routed.recomputed = True
        dispatchers = {layer.moe.dispatcher: None for layer in layers if layer.moe is not None}
        try:
            pending, _ = launch(layers, xs, padding)
            return torch.cat([piece.resolve() for piece in pending], dim=1)
        except BaseException as err:
            for dispatcher in dispatchers:  # a dense layer knows none
                dispatcher.raise_everywhere(err, "a transformer block")
            raise


def _cut(x_SBH: Tensor, arguments: dict[str, Any], micro_batches: int) -> list[dict[str, Any]]:
    """The arguments of a layer, for each piece of the batch."""
    num_sequences = x_SBH.shape[1]
    if num_sequences % micro_batches:
        raise InputError(
            f"a batch of {num_sequences} sequences cannot be cut into intra_layer_micro_batch = {micro_batches} equal "
            "pieces; choose a micro_batch_size that it divides"
        )
    pieces: list[dict[str, Any]] = [{} for _ in range(micro_batches)]
    for name, value in arguments.items():
        if value is None:
            continue
        if name not in (*SHARED_BY_ALL, *PER_SEQUENCE):
            raise InputError(f"{name} cannot be cut into micro-batches; it is not served by {WHO}")
        own = name in PER_SEQUENCE and value.shape[0] == num_sequences
        parts = value.chunk(micro_batches) if own else [value] * micro_batches
        for piece, part in zip(pieces, parts, strict=True):
            piece[name] = part
    return pieces


def use_domino(model: GPTModel, micro_batches: int) -> GPTModel:
    """Let a GPTModel take each batch through its layers as M interleaved pieces; the model itself, changed.

    Call it before the model is wrapped (Float16Module, DistributedDataParallel). Parameters keep their names.

    Args:
        model: its MoE layers are ours (`use_moe_ep`).
        micro_batches: M, "intra_layer_micro_batch" of a recipe; must divide the number of sequences of a batch.

    Raises:
        RecipeError: a flag that is not served, by name; a dispatcher that holds fewer micro-batches in flight; a model
            without a decoder block.
    """
    block = getattr(model, "decoder", None)
    if not isinstance(block, TransformerBlock):
        raise RecipeError(f"{type(model).__name__} has no TransformerBlock as `decoder`; give a GPTModel, not wrapped")
    model.decoder = DominoTransformerBlock.of(block, micro_batches)
    return model

"""The six stages as XTuner calls them; see `moe_ep.integrations.xtuner`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import DispatchConfig
from ..dispatch.base import Dispatcher
from ..dispatch.registry import build_dispatcher as build_inner
from ..dispatch.ticket import Ticket
from ..errors import InputError, ProtocolError
from ..expert_input import ExpertInput
from ..routing import Routing

Result = dict[str, Any]


class ExpertWeightLayout(NamedTuple):
    """What later versions of XTuner look for beside the rows; our dispatchers leave the weights alone."""

    trainable_weights: None = None


@dataclass(slots=True)
class _Trip:
    """One micro-batch, carried in every result."""

    x: Tensor
    ids: Tensor
    async_op: bool
    weights: Tensor | None = None
    ticket: Ticket | None = None
    rows: ExpertInput | None = None
    y: Tensor | None = None


class XTunerDispatcher:
    """The six stages as XTuner calls them. Any number of micro-batches may be under way.

    With `async_op=True` a launched result is valid behind the next stage; with False behind the stage itself. All
    stages of a micro-batch take the same. `topk_weights` may come with `dispatch_preprocess` or only with `dispatch`;
    in the latter case the counts travel later, and less is hidden.

    Args:
        settings: of the DispatchConfig; `hidden_size`, `top_k` and `dtype` are read from the first micro-batch where
            they are missing, so that all ranks build the dispatcher there.
        group: expert-parallel ranks, None: one.
    """

    def __init__(self, settings: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
        self.settings, self.group = dict(settings), group
        self._inner: Dispatcher | None = None
        if {"hidden_size", "top_k", "dtype"} <= set(settings):
            self._build()

    @property
    def inner(self) -> Dispatcher:
        """The dispatcher behind the interface.

        Raises:
            ProtocolError: it is built at the first micro-batch, and there was none.
        """
        if self._inner is None:
            raise ProtocolError("no micro-batch has come yet; give hidden_size, top_k and dtype to build it before")
        return self._inner

    def _build(self) -> Dispatcher:
        self._inner = build_inner(DispatchConfig(**self.settings), self.group)
        return self._inner

    def prepare_layer_inputs(self, layer_inputs: list[Tensor]) -> tuple[list[Tensor], list[None]]:
        """Nothing is to be done before attention."""
        return layer_inputs, [None] * len(layer_inputs)

    def prepare_microbatch_input(self, hidden_states: Tensor, layer_state: object | None) -> Tensor:
        """Nothing is to be done before attention."""
        return hidden_states

    def dispatch_preprocess(
        self,
        *,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None = None,
        layer_state: object | None = None,
        async_op: bool = False,
    ) -> Result:
        """hidden_states [T, H], topk_ids int [T, K], topk_weights float [T, K].

        Raises:
            InputError, CapacityError: see `Dispatcher.dispatch_preprocess`.
        """
        if self._inner is None:
            found = {"hidden_size": hidden_states.shape[-1], "top_k": topk_ids.shape[-1]}
            self.settings = {**found, "dtype": str(hidden_states.dtype).removeprefix("torch."), **self.settings}
            self._build()
        trip = _Trip(hidden_states, topk_ids, async_op)
        if topk_weights is not None:
            self._open(trip, topk_weights)
        return {"hidden_states": hidden_states, "topk_ids": topk_ids, "trip": trip}

    def dispatch(
        self, *, pre_dispatched: Result, topk_weights: Tensor, async_op: bool = False, decoding: bool = False
    ) -> Result:
        """Launch; without `async_op` wait, too."""
        trip = _trip_of(async_op, decoding, pre_dispatched)
        if trip.ticket is None:
            self._open(trip, topk_weights)
        elif topk_weights is not trip.weights:
            raise ProtocolError(
                "dispatch was given other topk_weights than dispatch_preprocess; give both the router's own"
            )
        ticket = _ticket_of(trip)
        self.inner.dispatch(ticket)
        if async_op:
            under_way = (*ticket.payload, trip.x.new_empty(0), trip.x.new_empty(0))
            return {"hidden_states": under_way[0], "topk_weights": under_way[1], "trip": trip}
        trip.rows = self.inner.dispatch_postprocess(ticket)
        return {"hidden_states": trip.rows.source, "topk_weights": trip.rows.row_weights, "trip": trip}

    def dispatch_postprocess(
        self, *, pre_dispatched: Result, dispatched: Result, async_op: bool = False, decoding: bool = False
    ) -> Result:
        """Rows [N, H] by expert, tokens_per_expert int64 [L]; also on the host where the dispatcher has it there."""
        trip = _trip_of(async_op, decoding, pre_dispatched, dispatched)
        if trip.rows is None:
            trip.rows = self.inner.dispatch_postprocess(_ticket_of(trip))
        counts = trip.rows.tokens_per_expert.long()
        result = {"hidden_states": trip.rows.rows(), "tokens_per_expert": counts, "trip": trip}
        if trip.rows.host_counts is not None:
            result["tokens_per_expert_cpu"] = torch.tensor(trip.rows.host_counts, dtype=torch.int64)
        return {**result, "expert_weight_layout": ExpertWeightLayout()}

    def combine_preprocess(
        self,
        *,
        hidden_states: Tensor,
        pre_dispatched: Result,
        dispatched: Result,
        post_dispatched: Result,
        async_op: bool = False,
        decoding: bool = False,
    ) -> Result:
        """The experts' output [N, H], not weighted yet; it is here: in float32, rounded once."""
        trip = _trip_of(async_op, decoding, pre_dispatched, dispatched, post_dispatched)
        if trip.rows is None:
            raise ProtocolError("combine_preprocess was called before dispatch_postprocess of the same micro-batch")
        weighted = (hidden_states * trip.rows.row_weights[:, None]).to(hidden_states.dtype)
        trip.rows = None
        ticket = _ticket_of(trip)
        self.inner.combine_preprocess(ticket, weighted)
        return {"hidden_states": ticket.payload[0] if ticket.payload else weighted, "trip": trip}

    def combine(
        self,
        *,
        pre_dispatched: Result,
        dispatched: Result,
        post_dispatched: Result,
        pre_combined: Result,
        async_op: bool = False,
        decoding: bool = False,
    ) -> Result:
        """Launch; without `async_op` wait, too."""
        trip = _trip_of(async_op, decoding, pre_dispatched, dispatched, post_dispatched, pre_combined)
        ticket = _ticket_of(trip)
        self.inner.combine(ticket)
        if async_op:
            return {"hidden_states": ticket.payload[0] if ticket.payload else trip.x.new_empty(0), "trip": trip}
        trip.y = self.inner.combine_postprocess(ticket)
        return {"hidden_states": trip.y, "trip": trip}

    def combine_postprocess(
        self,
        *,
        pre_dispatched: Result,
        dispatched: Result,
        post_dispatched: Result,
        pre_combined: Result,
        combined: Result,
        async_op: bool = False,
    ) -> Result:
        """y [T, H]."""
        trip = _trip_of(async_op, False, pre_dispatched, dispatched, post_dispatched, pre_combined, combined)
        y = trip.y if trip.y is not None else self.inner.combine_postprocess(_ticket_of(trip))
        return {"hidden_states": y}

    def _open(self, trip: _Trip, weights: Tensor) -> None:
        trip.weights = weights
        experts = self.inner.config.num_experts
        routing = Routing(expert_ids=trip.ids.long(), weights=weights.float(), num_experts=experts)
        trip.ticket = self.inner.dispatch_preprocess(trip.x, routing)


def _trip_of(async_op: bool, decoding: bool, *results: Result) -> _Trip:
    """The micro-batch that all results are of.

    Raises:
        ProtocolError: results of several, or another `async_op` than before.
        InputError: decoding.
    """
    if decoding:
        raise InputError("decoding = True is not served: these dispatchers are for training")
    trip: _Trip = results[0]["trip"]
    if any(result["trip"] is not trip for result in results):
        raise ProtocolError(
            "the results given are of different micro-batches; thread each one's own through its stages"
        )
    if trip.async_op is not async_op:
        raise ProtocolError(
            f"async_op = {async_op}, but dispatch_preprocess had {trip.async_op}; all stages of a micro-batch take the "
            "same"
        )
    return trip


def _ticket_of(trip: _Trip) -> Ticket:
    if trip.ticket is None:
        raise ProtocolError("a stage was called before dispatch of the same micro-batch")
    return trip.ticket

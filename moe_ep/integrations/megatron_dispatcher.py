"""A dispatcher of ours behind the six stages of Megatron-Core's token dispatchers.

Megatron keeps what a micro-batch needs between two stages on the dispatcher object, so one can be under way at a time.
Here each micro-batch has its ticket, which is found again by the tensors that a stage returned: hand them on as they
are, to the next stage, of as many micro-batches as you like. Between `dispatch_postprocess` and `combine_preprocess`,
where Megatron's experts take the rows and give others, one micro-batch at a time can be.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..dispatch.base import Dispatcher
from ..dispatch.ticket import Stage, Ticket
from ..errors import InputError, ProtocolError
from ..expert_input import ExpertInput
from ..flights import releasing
from ..replica.beside import LeaseBeside
from ..routing import NO_ROUTE, Routing
from .megatron_replicas import ExpertCopies


def routing_of(routing_map_TE: Tensor, probs_TE: Tensor, top_k: int) -> Routing:
    """Megatron's routing as ours, without a host sync.

    Args:
        routing_map_TE: bool [T, E], True where a token goes; at most `top_k` in a row.
        probs_TE: [T, E], any float dtype, differentiable; read where the map is True.
        top_k: K.

    Returns:
        Ids ascending in each token, which is the order in which Megatron adds its experts up; slots left over are -1.
        A token with more than K experts gets ids that every dispatcher refuses, on every rank.

    Raises:
        InputError: wrong shape or dtype.
    """
    shape = tuple(routing_map_TE.shape)
    if len(shape) != 2 or routing_map_TE.dtype != torch.bool or tuple(probs_TE.shape) != shape:
        raise InputError(
            f"routing_map must be bool [T, E] and probs [T, E], got {routing_map_TE.dtype} {shape} and "
            f"{tuple(probs_TE.shape)}"
        )
    num_experts = shape[1]
    # a token's experts come first and stay in order, so this is their ids in few operations
    sorted_map, columns = routing_map_TE.view(torch.uint8).sort(dim=1, descending=True, stable=True)
    chosen, ids_TK = sorted_map.view(torch.bool), columns[:, :top_k]
    unused = chosen[:, :top_k].logical_not()
    weights_TK = probs_TE.gather(1, ids_TK).float().masked_fill(unused, 0)
    ids_TK = ids_TK.masked_fill(unused, NO_ROUTE)
    if num_experts > top_k:
        ids_TK = ids_TK.masked_fill(chosen[:, top_k : top_k + 1], num_experts)
    return Routing(expert_ids=ids_TK, weights=weights_TK, num_experts=num_experts)


def expert_arguments(rows: ExpertInput, probs_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """What Megatron's experts take: rows [N', H], tokens_per_expert int64 [L] on the host, probs [N'].

    N' is the true number of rows: Megatron splits by the counts, so it cannot do with a tail. Where the dispatcher has
    no counts on the host, reading them is a host sync, which Megatron's experts make anyway.
    """
    counts = list(rows.host_counts) if rows.host_counts is not None else rows.tokens_per_expert.tolist()
    total = sum(counts)
    expert_rows, weights_N = rows.rows(), rows.row_weights
    if total < rows.capacity:
        expert_rows, weights_N = expert_rows[:total], weights_N[:total]
    return expert_rows, torch.tensor(counts, dtype=torch.int64), weights_N.to(probs_dtype)


def with_tail(y_NH: Tensor, capacity: int) -> Tensor:
    """The experts' output with the tail that `expert_arguments` cut off, in zeros."""
    return y_NH if y_NH.shape[0] == capacity else F.pad(y_NH, (0, 0, 0, capacity - y_NH.shape[0]))


@dataclass(slots=True, kw_only=True)
class Trip:
    """One micro-batch between two stages; `rest` is its payload beyond the two tensors that a stage returned."""

    ticket: Ticket
    shape: torch.Size
    probs_dtype: torch.dtype
    lease: LeaseBeside | None = None
    num_tensors: int = 0
    second: weakref.ref[Tensor] | None = None
    rest: tuple[Tensor, ...] = ()


class TicketDispatcher(MoETokenDispatcher):
    """Megatron's interface in front of one of our dispatchers. See the module.

    Args:
        config: TransformerConfig.
        pg_collection: Megatron's process groups.
        dispatcher: of the expert-parallel group; shared by the layers.
        layer_index: from 0, for messages and compared between ranks.
        copies: of the layer's experts; None: there are none.
    """

    def __init__(
        self,
        config: Any,
        pg_collection: Any,
        dispatcher: Dispatcher,
        layer_index: int,
        copies: ExpertCopies | None = None,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.inner, self.copies = dispatcher, copies
        self.layer_index = layer_index
        self._trips = WeakTensorKeyDictionary()
        self._in_experts: Trip | None = None

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """hidden_states [..., H], routing_map bool [T, E], probs [T, E]: what to hand to `token_dispatch`.

        Raises:
            InputError, CapacityError: see `Dispatcher.dispatch_preprocess`.
        """
        routing = routing_of(routing_map, probs, self.inner.config.top_k)
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        lease = None if self.copies is None else self.copies.open(self.layer_index)
        with releasing(lease):
            if self.copies is not None and lease is not None:
                routing = self.copies.place(lease, routing)
            ticket = self.inner.dispatch_preprocess(x_TH, routing, layer=self.layer_index)
        trip = Trip(ticket=ticket, shape=hidden_states.shape, probs_dtype=probs.dtype, lease=lease)
        return self._hand_out(trip, hidden_states)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Launch; the returned tensors are not valid before `dispatch_postprocess`."""
        trip = self._find(hidden_states, probs, Stage.DISPATCH)
        self.inner.dispatch(trip.ticket)
        return self._hand_out(trip, hidden_states)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [N, H] by expert, tokens_per_expert int64 [L] on the host, probs [N] as the router's dtype has it.

        Raises:
            ProtocolError: the experts have not returned another micro-batch of this layer.
        """
        trip = self._find(hidden_states, probs, Stage.DISPATCH_POSTPROCESS)
        if self._in_experts is not None:
            raise ProtocolError(
                f"{trip.ticket.where}: the experts still hold {self._in_experts.ticket.where}; Megatron's stages give "
                "no way to tell two apart there, so call combine_preprocess first"
            )
        if trip.lease is not None:
            trip.lease.join()
        rows = self.inner.dispatch_postprocess(trip.ticket)
        self._expect(trip)
        return expert_arguments(rows, trip.probs_dtype)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The experts' output [N, H], already weighted (Megatron's experts scale their activation).

        Raises:
            ProtocolError: no micro-batch is with the experts.
        """
        trip = self._in_experts
        self._expect(None)
        if trip is None:
            raise ProtocolError(f"layer {self.layer_index}: combine_preprocess was called without dispatch_postprocess")
        self.inner.combine_preprocess(trip.ticket, with_tail(hidden_states, trip.ticket.num_rows))
        return self._hand_out(trip, hidden_states)[0]

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Launch; the returned tensor is not valid before `combine_postprocess`."""
        trip = self._find(hidden_states, None, Stage.COMBINE)
        self.inner.combine(trip.ticket)
        return self._hand_out(trip, hidden_states)[0]

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """y in the shape that `dispatch_preprocess` was given."""
        trip = self._find(hidden_states, None, Stage.COMBINE_POSTPROCESS)
        y_TH = self.inner.combine_postprocess(trip.ticket)
        return (y_TH if trip.lease is None else trip.lease.bring(y_TH)).view(trip.shape)

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Refused: see `megatron_limits`.

        Raises:
            ProtocolError: always.
        """
        raise ProtocolError("moe_shared_expert_overlap is not supported: shared experts are run by the layer")

    def abandon(self) -> None:
        """Let go of the micro-batch that the experts hold: they raised."""
        trip = self._in_experts
        self._expect(None)
        if trip is not None:
            trip.ticket.release()
            if trip.lease is not None:
                trip.lease.release()

    def _expect(self, trip: Trip | None) -> None:
        """Whose rows the experts compute next."""
        self._in_experts = trip
        if self.copies is not None:
            self.copies.expected = None if trip is None else trip.lease

    def _hand_out(self, trip: Trip, like: Tensor) -> tuple[Tensor, Tensor]:
        """The payload as two tensors, under the first of which the trip is found again."""
        payload, trip.ticket.payload = trip.ticket.payload, ()
        trip.num_tensors, trip.rest = len(payload), payload[2:]
        first = payload[0] if payload else like.new_empty(0)
        if first is like:  # as `local` hands x on; it may be on several trips at a time
            first = first.view_as(first)
        second = payload[1] if len(payload) > 1 else like.new_empty(0)
        trip.second = weakref.ref(second)
        self._trips[first] = trip
        return first, second

    def _find(self, first: Tensor, second: Tensor | None, stage: Stage) -> Trip:
        trip: Trip | None = self._trips.pop(first, None)
        if trip is None or (second is not None and trip.second is not None and trip.second() is not second):
            raise ProtocolError(
                f"layer {self.layer_index}: {stage.label} got tensors that no stage before it returned (or a second "
                "time); hand on what a stage returns as it is"
            )
        payload = (first,) if second is None else (first, second)
        trip.ticket.payload = (*payload, *trip.rest)[: trip.num_tensors]
        trip.rest = ()
        return trip

"""`all2all`: every route's row travels by an uneven all-to-all of torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import DispatchConfig
from ..expert_input import ExpertInput
from ..fault_words import count_message
from ..faults import NUM_WORDS, Fault, raise_faults
from ..in_flight import InFlight
from ..permute import gather_routes, gather_rows, sum_rows
from ..routing import Routing
from ..sorted_routes import SortedRoutes, regroup, sort_routes
from .base import Dispatcher
from .capabilities import Capabilities
from .collectives import all_to_all
from .registry import register_dispatcher
from .row_transfers import AllToAllRows
from .ticket import Ticket
from .transfer import Flight, finish, start
from .twin import collective_sms_reasons


@dataclass(slots=True, kw_only=True)
class All2AllState:
    """Sorted routes and the counts on their way; then the splits; then how received rows become expert rows.

    Attributes:
        send, recv: rows to and from each rank.
        host_counts: rows of each local expert.
    """

    routes: SortedRoutes
    counts_RL: Tensor
    early: InFlight | None = None
    flight: Flight | None = None
    send: tuple[int, ...] = ()
    recv: tuple[int, ...] = ()
    host_counts: tuple[int, ...] = ()
    order: Tensor | None = None
    places: Tensor | None = None


@register_dispatcher("all2all")
class All2All(Dispatcher):
    """One row per route each way; a token with several experts on one rank travels several times.

    The counts [R, L] travel early, together with each rank's fault status, and the host reads them once per
    micro-batch. They have a process group and a stream of their own, so that a micro-batch's rows can be launched while
    those of the one before are still under way. Received rows stand in the order (source rank, local expert, token, k);
    they are handed over as they are, with the index that regroups them by expert; with one expert or one rank they are
    grouped. On one rank rows stay in the memory that they were gathered into.

    Order of sums: combine adds a token's routes with k ascending, in float32; so does backward for x.
    Kept for backward: 12 T K + 8 N + 4 (E + 1) bytes of integers (8 N where several ranks have several experts each),
    and the N received rows where the experts keep them.
    """

    name: ClassVar[str] = "all2all"
    capabilities: ClassVar[Capabilities] = Capabilities(host_syncs=1, uses_num_sms=True)
    early_apart: ClassVar[bool] = True
    rows_by_collectives: ClassVar[bool] = True

    def __init__(self, config: DispatchConfig, group: dist.ProcessGroup | None) -> None:
        num_ranks = 1 if group is None else group.size()
        self.num_lane_ints = 2 * num_ranks * (config.num_experts // num_ranks + NUM_WORDS)
        super().__init__(config, group)
        self._ones = [1] * num_ranks

    @classmethod
    def unavailable_reasons(cls, config: DispatchConfig, group: dist.ProcessGroup | None) -> list[str]:
        """A number of SMs where there are none to limit."""
        return collective_sms_reasons(config.num_sms, group)

    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        routes = sort_routes(routing.expert_ids, self.config.num_experts, kernels=self.kernels)
        if routes.num_bad is None:
            message = self._message(ticket, routes.counts, self.status(routing))
        else:
            message = count_message(routes.counts, routes.num_bad, routing, ticket.place, self.num_ranks)
        early, counts_RL = self._send_counts(ticket, message)
        ticket.state = All2AllState(routes=routes, counts_RL=counts_RL, early=early)
        self.pack(ticket, *gather_routes(x_TH, routing.weights, routes, kernels=self.kernels))

    def _message(self, ticket: Ticket, counts_E: Tensor, status: Tensor) -> Tensor:
        """int64 [2, R, L + 3]: [0] what goes to each expert of each rank, and this rank's status and place."""
        counts_RL = counts_E.view(self.num_ranks, self.num_local)
        words = self.words(ticket, status.to(counts_E)).expand(self.num_ranks, NUM_WORDS)
        message = counts_RL.new_empty((2, self.num_ranks, self.num_local + NUM_WORDS))
        torch.cat([counts_RL, words], dim=1, out=message[0])
        return message

    def _send_counts(self, ticket: Ticket, message: Tensor) -> tuple[InFlight, Tensor]:
        """Exchange message[0] and receive into message[1].

        Returns:
            the exchange, whose host values are what was sent and what was received, and the received counts
            [R, L] on the device, valid behind it.
        """
        sent, received = message.unbind()
        comm = self.early(message.device)

        def exchange() -> tuple[tuple[Tensor, ...], list[object]]:
            works = all_to_all(received, sent, self._ones, self._ones, comm.group)
            if not message.is_cuda:
                return (message,), works
            assert ticket.lane is not None, "no lane"
            ticket.lane.host.copy_(message.view(-1), non_blocking=True)
            return (ticket.lane.host,), works

        early = comm.launch(f"exchange of counts of {ticket.where}", exchange, keep=(message,))
        if ticket.lane is not None:
            ticket.lane.event = early.event
        return early, received[:, : self.num_local]

    def _announce(self, ticket: Ticket, device: torch.device, code: Fault, value: int) -> None:
        if self.num_ranks == 1:
            return
        if self.num_lane_ints:
            ticket.lend(*self.lanes.borrow(device))
        counts = torch.zeros(self.config.num_experts, dtype=torch.int64, device=device)
        status = torch.tensor([int(code), value], device=device)
        self._send_counts(ticket, self._message(ticket, counts, status))[0].wait_on_host()

    def _dispatch(self, ticket: Ticket) -> None:
        state: All2AllState = ticket.state
        assert state.early is not None, "no counts"
        width = self.num_local + NUM_WORDS
        flat = self.read_ints(ticket, state.early)
        rows = [flat[i : i + width] for i in range(0, len(flat), width)]
        sent, received = rows[: self.num_ranks], rows[self.num_ranks :]
        words = [row[-NUM_WORDS:] for row in received]
        raise_faults(words, self.rank, ticket.where, self.config.num_experts, place=ticket.place)
        recv_RL = [row[:-NUM_WORDS] for row in received]
        send, recv = [sum(row[:-NUM_WORDS]) for row in sent], [sum(row) for row in recv_RL]
        transfer = AllToAllRows(self.row_group, send, recv, ticket.payload[0].shape[0], sum(recv))
        comm = self.comm(ticket.payload[0].device)
        state.flight = Flight(transfer, comm, f"dispatch of {ticket.where}", ticket.packed)
        ticket.payload = start(state.flight, *ticket.payload)
        # with the rows on their way there is time for the rest
        state.early, state.send, state.recv = None, tuple(send), tuple(recv)
        state.host_counts = tuple(map(sum, zip(*recv_RL, strict=True)))

    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        state: All2AllState = ticket.state
        assert state.flight is not None, "no flight"
        num_rows = sum(state.recv)
        # needs the counts alone, so that it runs beside the rows
        order, places, offsets, tokens = regroup(state.counts_RL, num_rows, kernels=self.kernels)
        source_UH, weights_N = finish(state.flight, *ticket.payload)
        positions = None
        if order is not None and places is not None:
            positions = places.view(-1, 1)
            weights_N = gather_rows(weights_N, order, positions, kernels=self.kernels)
        ticket.payload, state.flight, state.order, state.places = (), None, order, places
        return ExpertInput(
            source=source_UH,
            row_index=order,
            positions=positions,
            row_weights=weights_N,
            offsets=offsets,
            tokens_per_expert=tokens,
            capacity=num_rows,
            host_counts=state.host_counts,
            kernels=self.kernels,
        )

    def _combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None:
        order, places = ticket.state.order, ticket.state.places
        if order is not None and places is not None:
            y_NH = gather_rows(y_NH, places, order.view(-1, 1), kernels=self.kernels)
        self.pack(ticket, y_NH)

    def _combine(self, ticket: Ticket) -> None:
        state: All2AllState = ticket.state
        send, recv = list(state.send), list(state.recv)
        transfer = AllToAllRows(self.row_group, recv, send, sum(recv), sum(send))
        comm = self.comm(ticket.payload[0].device)
        state.flight = Flight(transfer, comm, f"combine of {ticket.where}", ticket.packed)
        ticket.payload = start(state.flight, *ticket.payload)
        state.order = state.places = None

    def _combine_postprocess(self, ticket: Ticket) -> Tensor:
        state: All2AllState = ticket.state
        assert state.flight is not None, "no flight"
        (rows_SH,) = finish(state.flight, *ticket.payload)
        routes, row_token = state.routes, state.routes.row_token[: rows_SH.shape[0]]
        return sum_rows(rows_SH, row_token, routes.positions, bound=routes.bound, kernels=self.kernels)

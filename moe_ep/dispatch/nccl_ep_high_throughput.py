"""High-throughput mode of NCCL EP: the six stages of a micro-batch, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..expert_input import ExpertInput
from ..faults import Fault
from ..in_flight import InFlight
from ..routing import Routing
from ..sorted_routes import SortedRoutes, sort_routes
from .nccl_ep_engine import Engine, Lease
from .nccl_ep_rows import cut, library_routes, pad
from .nccl_ep_transfer import Combine, Dispatch
from .received_rows import grouped_input, sum_routes, unique_input
from .ticket import Ticket
from .transfer import Flight, finish, start

if TYPE_CHECKING:
    from .nccl_ep import NcclEp


@dataclass(frozen=True, slots=True, kw_only=True)
class HighThroughputState:
    """The handle; routing and statuses on their way; then the transfer, and where flat the sorted routes.

    `counts` is int32 [L + 1], valid behind `early`; `received` the same on the host, None with a fixed budget, as is
    `told`.
    """

    mode: HighThroughput
    lease: Lease
    early: InFlight
    told: InFlight | None
    counts: Tensor
    received: tuple[int, ...] | None = None
    flight: Flight | None = None
    transfer: Dispatch | None = None
    routes: SortedRoutes | None = None


class HighThroughput:
    """Stages over one engine.

    Args:
        owner: the dispatcher.
        engine: its group and handles.
    """

    def __init__(self, owner: NcclEp, engine: Engine) -> None:
        self.owner, self.engine, self.sizes = owner, engine, owner.sizes

    def dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        """Bind the routing beside the compute, first of all; rows and weights as the library takes them."""
        ids_TK, weights_TK = library_routes(routing, self.sizes.num_local, self.sizes.local_experts)
        self._bind(ticket, ids_TK, lambda: self.owner.status(routing))
        self.owner.pack(ticket, self._widen(x_TH), weights_TK)

    def announce(self, ticket: Ticket, ids_TK: Tensor, status: Tensor) -> None:
        """The calls of `dispatch_preprocess` without tokens, for a rank that fails before it."""
        self._bind(ticket, ids_TK, lambda: status)

    def _bind(self, ticket: Ticket, ids_TK: Tensor, status: Callable[[], Tensor]) -> None:
        lease = self.engine.lease()
        what = f"exchange of routes of {ticket.where}"
        found: list[Tensor] = []

        def update() -> Tensor:
            found.append(self.engine.update(lease, ids_TK, what))
            return found[0]

        early = self.owner.bind(ticket, what, ids_TK, update)
        told = self.owner.tell(ticket, status())
        ticket.state = HighThroughputState(mode=self, lease=lease, early=early, told=told, counts=found[0])

    def _widen(self, rows: Tensor) -> Tensor:
        """Rows of the width and number that the library takes."""
        return pad(rows, max(rows.shape[0], 1), self.sizes.row)

    def dispatch(self, ticket: Ticket) -> None:
        """Read what came in where it is counted; launch."""
        state: HighThroughputState = ticket.state
        self.owner.read_statuses(ticket, state.told)
        received = self.owner.read_counts(state.early)
        num_rows = self.sizes.budget if received is None else received[-1]
        assert num_rows is not None, "neither counted nor fixed"
        what = f"dispatch of {ticket.where}"
        transfer = Dispatch(self.engine, state.lease, max(num_rows, 1), what)
        flight = Flight(transfer, self.owner.comm(ticket.payload[0].device), what, ticket.packed)
        ticket.payload = start(flight, *ticket.payload)
        ticket.state = replace(state, received=received, flight=flight, transfer=transfer)

    def dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        """Wait; what the experts see."""
        state: HighThroughputState = ticket.state
        assert state.flight is not None and state.transfer is not None, "no flight"
        rows, weights = finish(state.flight, *ticket.payload)
        ticket.payload = ()
        if state.received is None:
            state.early.wait()  # lets go of the ids; the dispatch behind it has ended
        rows = cut(rows, rows.shape[0], self.sizes.hidden)
        host_counts = None if state.received is None else state.received[: self.sizes.num_local]
        routes, kernels = None, self.owner.kernels
        if state.transfer.ids is not None:
            self.owner.comm(rows.device).hold(state.transfer.ids)
            routes = sort_routes(state.transfer.ids, self.sizes.num_local, kernels=kernels)
        ticket.state = replace(state, flight=None, transfer=None, routes=routes)
        if routes is not None:
            assert host_counts is not None, "flat rows are counted"
            return unique_input(rows, weights, routes, host_counts, kernels)
        counts_L = state.counts[: self.sizes.num_local]
        if host_counts is None:
            self._note_overflow(ticket, counts_L.sum())
        return grouped_input(rows, weights, counts_L, host_counts, kernels)

    def _note_overflow(self, ticket: Ticket, needed: Tensor) -> None:
        assert self.sizes.budget is not None, "counted rows cannot overflow"
        code = torch.where(needed > self.sizes.budget, int(Fault.TOO_MANY_ROWS), 0)
        status = torch.stack([code, needed.to(code.dtype)])
        self.owner.faults(needed.device).note(status, ticket.layer, ticket.micro_batch)

    def combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None:
        """Where flat, sum the rows of each token that is here; else as they are."""
        routes = ticket.state.routes
        if routes is not None:
            y_NH = sum_routes(y_NH, routes, self.owner.kernels)
        self.owner.pack(ticket, self._widen(y_NH))

    def combine(self, ticket: Ticket) -> None:
        """Launch."""
        state: HighThroughputState = ticket.state
        what = f"combine of {ticket.where}"
        transfer = Combine(self.engine, state.lease, max(ticket.num_tokens, 1), what)
        flight = Flight(transfer, self.owner.comm(ticket.payload[0].device), what, ticket.packed)
        ticket.payload = start(flight, *ticket.payload)
        ticket.state = replace(state, flight=flight, routes=None)

    def combine_postprocess(self, ticket: Ticket) -> Tensor:
        """Wait; y [T, H]."""
        assert ticket.state.flight is not None, "no flight"
        (y,) = finish(ticket.state.flight, *ticket.payload)
        return cut(y, ticket.num_tokens, self.sizes.hidden)

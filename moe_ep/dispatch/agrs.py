"""`agrs`: all-gather every token, compute one's own routes, reduce-scatter the partial sums (XTuner's AGRS).

Two forms, chosen at construction:
- *grouped*, where the router is grouped, its groups are the ranks and K == R: column j of the ids names an expert of
  rank j (or -1), so a rank computes at most one route per token and the number of rows is static: no count is read.
- *general*, for any routing: the host reads how many routes fall to this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import DispatchConfig
from ..expert_input import ExpertInput
from ..faults import NUM_WORDS, Fault, raise_faults
from ..in_flight import InFlight
from ..permute import gather_rows, sum_rows
from ..routing import NO_ROUTE, Routing
from ..sorted_routes import SortedRoutes, sort_routes
from .base import Dispatcher
from .capabilities import Capabilities
from .collectives import all_gather
from .registry import register_dispatcher
from .row_transfers import AllToAllRows, GatherRows
from .ticket import Ticket
from .transfer import Flight, finish, start
from .twin import collective_sms_reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class AgrsState:
    """The ids on their way; then this rank's routes among all gathered tokens.

    `gathered` int64 [R, C*K + 3] and, where a GPU has sorted them on their stream, `routes` are valid behind `early`.
    """

    early: InFlight | None = None
    gathered: Tensor | None = None
    routes: SortedRoutes | None = None
    num_rows: int = 0
    host_counts: tuple[int, ...] | None = None
    flight: Flight | None = None


@register_dispatcher("agrs")
class Agrs(Dispatcher):
    """Rows, ids and weights are padded to max_tokens (C) and gathered; padding has id -1 and takes part in nothing.

    Order of sums: a rank sums a token's local routes with k ascending in float32 and rounds to x's dtype for the trip;
    home adds the ranks' partial sums, rank ascending, in float32, and rounds once more. With several ranks the result
    therefore differs from all2all's by the rounding of R partial sums in x's dtype (none in float32 but the order).
    Kept for backward: 12 R C K + 4 R (C + T) + 4 (L + 1) bytes of integers, and the R*C gathered rows where the experts
    keep them.
    """

    name: ClassVar[str] = "agrs"
    capabilities: ClassVar[Capabilities] = Capabilities(needs_max_tokens=True, host_syncs=1, uses_num_sms=True)
    early_apart: ClassVar[bool] = True
    rows_by_collectives: ClassVar[bool] = True

    def __init__(self, config: DispatchConfig, group: dist.ProcessGroup | None) -> None:
        num_ranks = 1 if group is None else group.size()
        self.block = config.max_tokens or 0
        self.grouped = config.router == "grouped" and config.num_groups == num_ranks == config.top_k
        self.num_lane_ints = NUM_WORDS * num_ranks + config.num_experts // num_ranks
        super().__init__(config, group)

    @property
    def host_syncs(self) -> int:
        """None in the grouped form."""
        return 0 if self.grouped else 1

    def describe(self) -> str:
        """One line on what runs, for the log."""
        form = "grouped form, static rows" if self.grouped else "general form, rows counted on the host"
        return f"{super().describe()}, {form}, padded to {self.block} tokens"

    @classmethod
    def unavailable_reasons(cls, config: DispatchConfig, group: dist.ProcessGroup | None) -> list[str]:
        """A number of SMs where there are none to limit."""
        return collective_sms_reasons(config.num_sms, group)

    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        ticket.state = self._send_ids(ticket, routing.expert_ids, self._status(routing))
        self.pack(ticket, _pad(x_TH, self.block, 0), _pad(routing.weights, self.block, 0))

    def _status(self, routing: Routing) -> Tensor:
        status = self.status(routing)
        if not self.grouped:
            return status
        column = torch.arange(self.num_ranks, device=status.device)
        ids = routing.expert_ids
        strays = ((ids >= 0) & (ids // self.num_local != column)).sum()
        stray = torch.stack([torch.full_like(strays, int(Fault.BAD_GROUP)), strays])
        return torch.where((strays > 0) & (status[0] == 0), stray, status)

    def _send_ids(self, ticket: Ticket, ids_TK: Tensor, status: Tensor) -> AgrsState:
        """All-gather C*K ids, status and place of each rank.

        What the host reads of them follows on the same stream: on the compute stream it would stand in line behind
        whatever is issued until then.
        """
        padded = _pad(ids_TK, self.block, NO_ROUTE)
        sent = torch.cat([padded.reshape(-1), self.words(ticket, status.to(ids_TK.dtype))])
        gathered = sent.new_empty((self.num_ranks, sent.numel()))
        comm = self.early(sent.device)
        found: list[SortedRoutes] = []

        def exchange() -> tuple[tuple[Tensor, ...], list[Any]]:
            works = all_gather(gathered.view(-1), sent, comm.group)
            if self.grouped or not gathered.is_cuda or ticket.lane is None:  # or nobody reads them
                return (gathered,), works
            found.append(self._sort(gathered))
            ticket.lane.host.copy_(_to_read(gathered, found[0]), non_blocking=True)
            return (gathered, ticket.lane.host), works

        early = comm.launch(f"exchange of ids of {ticket.where}", exchange, keep=(sent,))
        if ticket.lane is not None:
            ticket.lane.event = early.event
        return AgrsState(early=early, gathered=gathered, routes=found[0] if found else None)

    def _sort(self, gathered: Tensor) -> SortedRoutes:
        """This rank's routes among those gathered."""
        ids = gathered[:, :-NUM_WORDS].reshape(-1, self.config.top_k)
        return sort_routes(self._local_ids(ids), self.num_local, kernels=self.kernels)

    def _announce(self, ticket: Ticket, device: torch.device, code: Fault, value: int) -> None:
        ids = torch.full((self.block, self.config.top_k), NO_ROUTE, device=device)
        early = self._send_ids(ticket, ids, torch.tensor([int(code), value], device=device)).early
        assert early is not None, "no ids"
        early.wait_on_host()

    def _dispatch(self, ticket: Ticket) -> None:
        state: AgrsState = ticket.state
        assert state.early is not None and state.gathered is not None, "no ids"
        if state.routes is None:
            state.early.wait()
        else:
            state.early.wait_on_host()
        routes = self._sort(state.gathered) if state.routes is None else state.routes
        counts = self._read(ticket, state.gathered, routes, there=state.routes is not None)
        num_rows = self.num_ranks * self.block if self.grouped else sum(counts or ())
        transfer = GatherRows(self.row_group, self.num_ranks, self.block)
        flight = Flight(transfer, self.comm(state.gathered.device), f"dispatch of {ticket.where}", ticket.packed)
        ticket.payload = start(flight, *ticket.payload)
        host_counts = None if self.grouped else counts
        ticket.state = AgrsState(routes=routes, num_rows=num_rows, host_counts=host_counts, flight=flight)

    def _local_ids(self, ids: Tensor) -> Tensor:
        """Ids as local experts, -1 for the routes of other ranks."""
        first = self.rank * self.num_local
        local = torch.where((ids >= first) & (ids < first + self.num_local), ids - first, NO_ROUTE)
        if self.grouped:
            column = torch.arange(self.config.top_k, device=ids.device)
            local = torch.where(column == self.rank, local, NO_ROUTE)
        return local

    def _read(self, ticket: Ticket, gathered: Tensor, routes: SortedRoutes, there: bool) -> tuple[int, ...] | None:
        """Statuses and counts on the host, where they may be already.

        In the grouped form on CUDA neither, the record keeps the fault.
        """
        if self.grouped and gathered.is_cuda:
            words = gathered[self.rank, -NUM_WORDS:]
            self.faults(gathered.device).note(words, ticket.layer, ticket.micro_batch)
            return None
        assert ticket.lane is not None, "no lane"
        if not there:
            ticket.lane.host.copy_(_to_read(gathered, routes))
        values = ticket.lane.host.tolist()
        told = [values[NUM_WORDS * r : NUM_WORDS * (r + 1)] for r in range(self.num_ranks)]
        raise_faults(told, self.rank, ticket.where, self.config.num_experts, place=ticket.place)
        return tuple(values[NUM_WORDS * self.num_ranks :])

    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        state: AgrsState = ticket.state
        assert state.flight is not None and state.routes is not None, "no flight"
        source_UH, weights_UK = finish(state.flight, *ticket.payload)
        ticket.payload = ()
        routes, num_rows = state.routes, state.num_rows
        ticket.state = replace(state, flight=None)
        return ExpertInput(
            source=source_UH,
            row_index=routes.row_token[:num_rows],
            positions=routes.positions,
            row_weights=gather_rows(
                weights_UK.reshape(-1),
                routes.row_slot[:num_rows],
                routes.positions.reshape(-1, 1),
                bound=routes.bound,
                kernels=self.kernels,
            ),
            offsets=routes.offsets,
            tokens_per_expert=routes.counts.to(torch.int32),
            capacity=num_rows,
            host_counts=state.host_counts,
            kernels=self.kernels,
        )

    def _combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None:
        routes: SortedRoutes = ticket.state.routes
        index = routes.row_token[: ticket.state.num_rows]
        self.pack(ticket, sum_rows(y_NH, index, routes.positions, bound=routes.bound, kernels=self.kernels))

    def _combine(self, ticket: Ticket) -> None:
        even = [self.block] * self.num_ranks
        transfer = AllToAllRows(self.row_group, even, even, sum(even), sum(even))
        flight = Flight(transfer, self.comm(ticket.payload[0].device), f"combine of {ticket.where}", ticket.packed)
        ticket.payload = start(flight, *ticket.payload)
        ticket.state = AgrsState(flight=flight)

    def _combine_postprocess(self, ticket: Ticket) -> Tensor:
        (parts,) = finish(ticket.state.flight, *ticket.payload)
        token = torch.arange(self.block, dtype=torch.int32, device=parts.device)
        owner = torch.where(token < ticket.num_tokens, token, NO_ROUTE).repeat(self.num_ranks)
        block_start = torch.arange(self.num_ranks, dtype=torch.int32, device=parts.device) * self.block
        return sum_rows(parts, owner, token[: ticket.num_tokens, None] + block_start, kernels=self.kernels)


def _to_read(gathered: Tensor, routes: SortedRoutes) -> Tensor:
    """Words of each rank, then this rank's counts, int64 [3 R + L]."""
    return torch.cat([gathered[:, -NUM_WORDS:].reshape(-1), routes.counts])


def _pad(tensor: Tensor, rows: int, value: int) -> Tensor:
    """Rows of `value` behind, up to `rows` rows."""
    missing = rows - tensor.shape[0]
    return tensor if missing == 0 else torch.nn.functional.pad(tensor, (0, 0, 0, missing), value=value)

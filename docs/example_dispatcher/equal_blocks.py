"""`equal_blocks`: an all-to-all whose blocks all have one size, for networks that are fast only then.

Every pair of ranks exchanges max_tokens * top_k slots; routes stand at the front of a block, by expert, the rest is
padding. How many routes there are travels early, in a small exchange beside the router's tail.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from moe_ep import Capabilities, Dispatcher, ExpertInput, Routing, Ticket, register_dispatcher
from moe_ep.dispatch.transfer import AllToAllRows, Flight, all_to_all, finish, start
from moe_ep.faults import NUM_WORDS, Fault, raise_faults
from moe_ep.permute import gather_rows, regroup, sort_routes, sum_rows
from moe_ep.streams import InFlight


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a micro-batch needs between its stages. It lives in the ticket, never on the dispatcher."""

    slots_TK: Tensor  # where each route stands in the send buffer, -1: no route
    token_S: Tensor  # whose row stands in each slot, -1: padding
    early: InFlight | None = None  # the exchange of counts on its way
    counts_RL: Tensor | None = None
    host_counts: tuple[int, ...] = ()  # rows of each local expert
    flight: Flight | None = None
    row_of_slot: Tensor | None = None  # expert row of each received slot, -1: padding
    slot_of_row: Tensor | None = None


@register_dispatcher("equal_blocks")
class EqualBlocks(Dispatcher):
    """Order of sums: a token's routes with k ascending, in float32.

    Kept for backward, with C = max_tokens: 12 R C K + 4 T K + 4 N + 4 bytes of integers.
    """

    name: ClassVar[str] = "equal_blocks"
    # What it can do: everything else is refused before training, with the sentence that the contract suite knows.
    capabilities: ClassVar[Capabilities] = Capabilities(needs_max_tokens=True, host_syncs=1)
    early_apart: ClassVar[bool] = True  # counts travel in a process group of their own

    @property
    def block(self) -> int:
        """Slots of a block."""
        return (self.config.max_tokens or 0) * self.config.top_k

    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        routes = sort_routes(routing.expert_ids, self.config.num_experts)
        rank_starts = routes.offsets[:: self.num_local].long()  # [R + 1], of each destination's first sorted route
        places = routes.positions.long()
        destination = (torch.searchsorted(rank_starts, places, right=True) - 1).clamp(0, self.num_ranks - 1)
        slots_TK = torch.where(places < 0, -1, places - rank_starts[destination] + destination * self.block)
        token_S, route_S = self._slots(slots_TK)
        slots_TK = slots_TK.int()
        early, counts_RL = self._send_counts(ticket, routes.counts, self.status(routing))
        ticket.state = State(slots_TK=slots_TK, token_S=token_S, early=early, counts_RL=counts_RL)
        self.pack(
            ticket,
            gather_rows(x_TH, token_S, slots_TK),
            gather_rows(routing.weights.reshape(-1), route_S, slots_TK.reshape(-1, 1)),
        )

    def _slots(self, slots_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Token and flat route of each slot, int32 [S], -1 where it is padding."""
        size = self.num_ranks * self.block
        route_S = torch.full((size + 1,), -1, dtype=torch.int32, device=slots_TK.device)
        flat = slots_TK.reshape(-1)
        numbers = torch.arange(flat.numel(), dtype=torch.int32, device=flat.device)
        route_S[torch.where(flat < 0, size, flat)] = numbers  # routes without a place all go behind the end
        route_S = route_S[:size]
        return torch.where(route_S < 0, -1, route_S // max(self.config.top_k, 1)).int(), route_S

    def _send_counts(self, ticket: Ticket, counts_E: Tensor, status: Tensor) -> tuple[InFlight, Tensor]:
        """Launch the exchange of [R, L] counts, with this rank's fault status behind them."""
        words = self.words(ticket, status.to(counts_E)).expand(self.num_ranks, NUM_WORDS)
        sent = torch.cat([counts_E.view(self.num_ranks, self.num_local), words], dim=1)
        received, ones, comm = torch.empty_like(sent), [1] * self.num_ranks, self.early(sent.device)
        what = f"exchange of counts of {ticket.where}"
        early = comm.launch(
            what, lambda: ((received,), all_to_all(received, sent, ones, ones, comm.group)), keep=(sent,)
        )
        return early, received

    def _announce(self, ticket: Ticket, device: torch.device, code: Fault, value: int) -> None:
        """This rank fails before it has sent anything: take part in the exchange all the same, with the reason."""
        none = torch.zeros(self.config.num_experts, dtype=torch.int64, device=device)
        self._send_counts(ticket, none, torch.tensor([int(code), value], device=device))[0].wait_on_host()

    def _dispatch(self, ticket: Ticket) -> None:
        state: State = ticket.state
        assert state.early is not None and state.counts_RL is not None, "no counts"
        state.early.wait()
        values = state.counts_RL.tolist()  # the one host sync
        words = [row[self.num_local :] for row in values]
        raise_faults(words, self.rank, ticket.where, self.config.num_experts, place=ticket.place)
        ticket.payload, flight = self._launch(ticket, "dispatch")
        counts = tuple(map(sum, zip(*(row[: self.num_local] for row in values), strict=True)))
        counts_RL = state.counts_RL[:, : self.num_local]
        ticket.state = replace(state, early=None, counts_RL=counts_RL, host_counts=counts, flight=flight)

    def _launch(self, ticket: Ticket, what: str) -> tuple[tuple[Tensor, ...], Flight]:
        even = [self.block] * self.num_ranks
        transfer = AllToAllRows(self.group, even, even, sum(even), sum(even))
        flight = Flight(transfer, self.comm(ticket.payload[0].device), f"{what} of {ticket.where}", ticket.packed)
        return start(flight, *ticket.payload), flight

    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        state: State = ticket.state
        assert state.flight is not None and state.counts_RL is not None, "no flight"
        source_SH, weights_S = finish(state.flight, *ticket.payload)
        ticket.payload = ()
        slot_of_row, row_of_slot, offsets, tokens = self._expert_order(state.counts_RL, sum(state.host_counts))
        ticket.state = replace(state, flight=None, row_of_slot=row_of_slot, slot_of_row=slot_of_row)
        return ExpertInput(
            source=source_SH,
            row_index=slot_of_row,
            positions=row_of_slot.view(-1, 1),
            row_weights=gather_rows(weights_S, slot_of_row, row_of_slot.view(-1, 1)),
            offsets=offsets,
            tokens_per_expert=tokens,
            capacity=sum(state.host_counts),
            host_counts=state.host_counts,
        )

    def _expert_order(self, counts_RL: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Slot of each expert row (by expert, source, token), expert row of each slot; offsets and counts."""
        order, _, offsets, tokens = regroup(counts_RL, num_rows)
        device, totals_R = counts_RL.device, counts_RL.sum(1)
        source = torch.arange(self.num_ranks, device=device).repeat_interleave(totals_R, output_size=num_rows)
        first_R = totals_R.cumsum(0) - totals_R
        slots = torch.arange(num_rows, device=device) - first_R[source] + source * self.block
        slots = slots if order is None else slots[order.long()]
        rows = torch.full((self.num_ranks * self.block,), -1, dtype=torch.int32, device=device)
        rows[slots] = torch.arange(num_rows, dtype=torch.int32, device=device)
        return slots.int(), rows, offsets, tokens

    def _combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None:
        state: State = ticket.state
        assert state.row_of_slot is not None and state.slot_of_row is not None, "no order"
        self.pack(ticket, gather_rows(y_NH, state.row_of_slot, state.slot_of_row.view(-1, 1)))

    def _combine(self, ticket: Ticket) -> None:
        ticket.payload, flight = self._launch(ticket, "combine")
        ticket.state = replace(ticket.state, flight=flight, row_of_slot=None, slot_of_row=None)

    def _combine_postprocess(self, ticket: Ticket) -> Tensor:
        state: State = ticket.state
        assert state.flight is not None, "no flight"
        (rows_SH,) = finish(state.flight, *ticket.payload)
        return sum_rows(rows_SH, state.token_S, state.slots_TK)

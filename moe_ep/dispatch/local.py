"""`local`: one rank holds all experts, nothing travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..expert_input import ExpertInput
from ..faults import Fault, raise_faults
from ..permute import gather_rows, sum_rows
from ..routing import Routing
from ..sorted_routes import SortedRoutes, sort_routes
from .base import Dispatcher
from .capabilities import Capabilities
from .registry import register_dispatcher
from .ticket import Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalState:
    """Sorted routes of the micro-batch."""

    routes: SortedRoutes


@register_dispatcher("local")
class Local(Dispatcher):
    """One rank. No communication, no host sync on CUDA: rows with id -1 stay in the tail beyond the counts.

    Order of sums: combine adds a token's routes with k ascending, in float32.
    Kept for backward: 12 T K + 4 (E + 1) bytes of integers; `source` is x itself.
    """

    name: ClassVar[str] = "local"
    capabilities: ClassVar[Capabilities] = Capabilities(rank_counts=(1,), graph_capture=True)

    def _announce(self, ticket: Ticket, device: torch.device, code: Fault, value: int) -> None:
        pass  # nobody else is there

    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        status = self.status(routing)
        if x_TH.device.type == "cpu":
            code, value = status.tolist()
            raise_faults([(code, value, 0)], 0, ticket.where, self.config.num_experts)
        else:
            self.faults(x_TH.device).note(status, ticket.layer, ticket.micro_batch)
        routes = sort_routes(routing.expert_ids, self.config.num_experts, kernels=self.kernels)
        ticket.state = LocalState(routes=routes)
        ticket.payload = (x_TH, routing.weights)

    def _dispatch(self, ticket: Ticket) -> None:
        pass  # nothing travels

    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        x_TH, weights_TK = ticket.payload
        routes = ticket.state.routes
        ticket.payload = ()
        return ExpertInput(
            source=x_TH,
            row_index=routes.row_token,
            positions=routes.positions,
            row_weights=gather_rows(
                weights_TK.reshape(-1),
                routes.row_slot,
                routes.positions.view(-1, 1),
                bound=routes.bound,
                kernels=self.kernels,
            ),
            offsets=routes.offsets,
            tokens_per_expert=routes.counts.to(torch.int32),
            capacity=routes.row_token.numel(),
            kernels=self.kernels,
        )

    def _combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None:
        ticket.payload = (y_NH,)

    def _combine(self, ticket: Ticket) -> None:
        pass  # nothing travels

    def _combine_postprocess(self, ticket: Ticket) -> Tensor:
        (y_NH,) = ticket.payload
        routes = ticket.state.routes
        return sum_rows(y_NH, routes.row_token, routes.positions, bound=routes.bound, kernels=self.kernels)

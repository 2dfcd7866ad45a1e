"""The contract of a dispatcher: six stages over a ticket.

A dispatcher object holds only static resources (`resources`), so any number of tickets may be in flight. A back end
writes the six `_stage` methods; their order, checks and faults are here.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import DispatchConfig
from ..config_checks import check_num_micro_batches
from ..eager import eager
from ..errors import InputError, MoEError, PeerError, ProtocolError, RecipeError
from ..expert_input import ExpertInput
from ..fault_words import routing_status
from ..faults import Fault, describe
from ..order import in_stage, told
from ..peers import is_heard, is_out_of_step, is_reported, mark_everywhere, mark_reported
from ..routing import Routing
from ..schedule_steps import Link
from ..tracing import stage_range
from .capabilities import capture_refusal, check_input, check_output, is_captured, too_many_tickets
from .count_checks import check_counts
from .resources import Resources
from .ticket import Stage, Ticket
from .waits import stage_waits

T = TypeVar("T")
_nothing = contextlib.nullcontext()


class Dispatcher(Resources, ABC):
    """Sends the tokens of a micro-batch to their experts and brings the results back, differentiably.

    Stages, in this order, all on one ticket: `dispatch_preprocess`, `dispatch`, `dispatch_postprocess`,
    (the experts), `combine_preprocess`, `combine`, `combine_postprocess`. `dispatch` and `combine` launch; the stage
    behind each waits. Called one after the other they are the synchronous form; whatever the caller issues between a
    launch and the stage that waits runs beside the communication. There is no other code path.

    Every rank of the group makes the same calls, also with zero tokens, and a backward on one is a backward on all.

    A back end that moves rows with `transfer.all_to_all` and `transfer.all_gather` gives its users a group that serves
    on behind an exception on one rank. What other means start cannot be made up for, and ends the group (`alarm`).
    """

    # what a back end writes

    @classmethod
    def unavailable_reasons(cls, config: DispatchConfig, group: dist.ProcessGroup | None) -> list[str]:
        """Sentences that say why this back end cannot run here, beyond what `capabilities` says. Empty: it can."""
        return []

    @classmethod
    def findings(cls) -> list[str]:
        """Sentences on the libraries that this back end found on this machine: name, version, what they offer."""
        return []

    @abstractmethod
    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None: ...

    @abstractmethod
    def _dispatch(self, ticket: Ticket) -> None: ...

    @abstractmethod
    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput: ...

    @abstractmethod
    def _combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None: ...

    @abstractmethod
    def _combine(self, ticket: Ticket) -> None: ...

    @abstractmethod
    def _combine_postprocess(self, ticket: Ticket) -> Tensor: ...

    @abstractmethod
    def _announce(self, ticket: Ticket, device: torch.device, code: Fault, value: int) -> None:
        """Tell the other ranks of a fault known on the host before this rank raises, so that they do not wait."""

    # what a caller uses

    @eager
    def dispatch_preprocess(
        self,
        x_TH: Tensor,
        routing: Routing,
        *,
        layer: int = 0,
        micro_batch: int = 0,
        waits: frozenset[Link] | None = None,
        num_micro_batches: int = 1,
    ) -> Ticket:
        """Compute stream: x [T, H] and its routing to a ticket with layout, counts and the payload to send.

        Args:
            x_TH: tokens of one micro-batch, in the configured dtype.
            routing: their experts and weights.
            layer: for messages, and compared between ranks.
            micro_batch: likewise.
            waits: the ticket's waits between streams, as a schedule has them; None: all that are needed.
            num_micro_batches: how many interleave, with this one; compared between ranks.

        Raises:
            InputError: wrong shape, dtype, device; ids out of range (here or at the next stage, where the counts are
                read). The other ranks get a PeerError that names this one.
            CapacityError: more tokens than max_tokens.
            ProtocolError: more tickets are in flight than the back end holds; or a CUDA graph is being captured, which
                cannot hold this back end (before anything is sent: all ranks capture, or none).
        """
        ticket = Ticket(layer, micro_batch, owner=self, waits=waits, num_micro_batches=num_micro_batches)
        if is_captured(x_TH) and (why := capture_refusal(self.name, self.capabilities, self.host_syncs)) is not None:
            raise _everywhere(ProtocolError(f"{ticket.where}: {why}"))
        self._enter(ticket, Stage.DISPATCH_PREPROCESS)
        self._admit(ticket)
        fault = self._find_fault(x_TH, routing)
        if fault is not None:
            code, value, error = fault
            device = x_TH.device if isinstance(x_TH, Tensor) else None
            self._announce(ticket, self.served_device(device), code, value)
            ticket.release()
            raise _everywhere(type(error)(f"{ticket.where}: {error}"))
        ticket.num_tokens, self._device = x_TH.shape[0], x_TH.device
        if self.num_lane_ints:
            ticket.lend(*self.lanes.borrow(x_TH.device))
        row_bytes = x_TH.shape[1] * x_TH.element_size()
        ticket.bad_tokens = routing.bad_tokens
        self._tickets.add(ticket)
        ticket.note_layout(routing.expert_ids, self.config.num_experts, self.num_ranks, self.rank, row_bytes)
        self._run(ticket, Stage.DISPATCH_PREPROCESS, lambda: self._dispatch_preprocess(ticket, x_TH, routing))
        return ticket

    @eager
    def dispatch(self, ticket: Ticket) -> None:
        """Comm stream: launch the payload on its way to the experts' ranks.

        Raises:
            InputError, CapacityError, NonFiniteError: a fault of this rank's routing.
            PeerError: a fault that another rank reported, or a lost rank.
        """
        self._enter(ticket, Stage.DISPATCH)
        self._run(ticket, Stage.DISPATCH, lambda: self._dispatch(ticket))

    @eager
    def dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        """Compute stream: wait for the rows; what the experts compute on.

        Raises:
            PeerError: a rank was lost, or did not make the same call in time.
        """
        self._enter(ticket, Stage.DISPATCH_POSTPROCESS)
        rows = self._run(ticket, Stage.DISPATCH_POSTPROCESS, lambda: self._dispatch_postprocess(ticket))
        ticket.num_rows = rows.capacity
        if self._order is not None:
            ids = ticket.expert_ids
            check_counts(ticket.where, self.name, self._order, ids, self.config.num_experts, rows)
        return rows

    @eager
    def combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None:
        """Compute stream: the experts' output [N, H], already weighted, to the payload to return.

        Raises:
            InputError: wrong shape or dtype.
        """
        self._enter(ticket, Stage.COMBINE_PREPROCESS)
        try:
            check_output(self.config, ticket.num_rows, y_NH)
        except InputError as err:
            ticket.release()
            raise InputError(f"{ticket.where}: {err}") from None
        self._run(ticket, Stage.COMBINE_PREPROCESS, lambda: self._combine_preprocess(ticket, y_NH))

    @eager
    def combine(self, ticket: Ticket) -> None:
        """Comm stream: launch the results on their way home."""
        self._enter(ticket, Stage.COMBINE)
        self._run(ticket, Stage.COMBINE, lambda: self._combine(ticket))

    @eager
    def combine_postprocess(self, ticket: Ticket) -> Tensor:
        """Compute stream: wait; y [T, H] in x's dtype and token order. Releases the ticket.

        Raises:
            PeerError: a rank was lost, or did not make the same call in time.
        """
        self._enter(ticket, Stage.COMBINE_POSTPROCESS)
        y_TH = self._run(ticket, Stage.COMBINE_POSTPROCESS, lambda: self._combine_postprocess(ticket))
        ticket.release()
        return y_TH

    @eager
    def announce_failure(self, device: torch.device | None, *, layer: int = 0, micro_batch: int = 0) -> None:
        """Tell the other ranks, in place of `dispatch_preprocess`, that this rank fails before it; then raise.

        The others get a PeerError from their `dispatch` instead of waiting until the group's timeout. `device` is where
        x lies, None where there is no x to speak of.
        """
        ticket = Ticket(layer, micro_batch, owner=self)
        self._announce(ticket, self.served_device(device), Fault.BAD_INPUT, 0)
        ticket.release()

    def check_interleaving(self, num_micro_batches: int) -> None:
        """Refuse more micro-batches at once than the back end holds, or than ranks can tell each other of.

        Raises:
            RecipeError: value, limit and way out.
        """
        check_num_micro_batches(num_micro_batches)
        most = self.capabilities.max_tickets
        if most is not None and num_micro_batches > most:
            reason = too_many_tickets(self.capabilities, num_micro_batches)
            raise RecipeError(f"dispatcher {self.name!r} cannot run here: {reason}")

    # internals

    def _enter(self, ticket: Ticket, stage: Stage) -> None:
        if ticket.owner is not self:
            raise ProtocolError(
                f"{ticket.where}: {stage.label} was called on another dispatcher than the one that made the ticket; "
                "pass it to the stages of that one"
            )
        if self.closed:
            raise ProtocolError(f"{ticket.where}: {stage.label} was called on a closed {self.name} dispatcher")
        ticket.expect(stage)

    def _admit(self, ticket: Ticket) -> None:
        most = self.capabilities.max_tickets
        if most is None:
            return
        live = [other.where for other in self._tickets if other.stage is not Stage.RELEASED]
        if len(live) >= most:
            raise ProtocolError(
                f"{ticket.where}: dispatcher {self.name!r} holds {most} micro-batch(es) in flight, and "
                f"{', '.join(sorted(live))} is under way; finish it first or take another dispatcher"
            )

    def _own_fault(self) -> MoEError | None:
        """A fault of this rank's routings that are on their way, of which another rank may have been told first."""
        for ticket in sorted((t for t in self._tickets if t.is_under_way), key=lambda t: t.place):
            ids, num_experts = ticket.expert_ids, self.config.num_experts
            weights = torch.zeros(ids.shape, device=ids.device)
            routing = Routing(expert_ids=ids, weights=weights, num_experts=num_experts, bad_tokens=ticket.bad_tokens)
            code, value = routing_status(routing, duplicates=self.capabilities.duplicates).tolist()
            if code:
                return _everywhere(describe(code, value, ticket.where, num_experts))
        return None

    def _run(self, ticket: Ticket, stage: Stage, fn: Callable[[], T]) -> T:
        waits = stage_waits(ticket, stage)
        noted = _nothing if self._order is None else in_stage(stage.label)
        try:
            with stage_range(stage.label, ticket.layer, ticket.micro_batch), waits, noted:
                result = fn()
        except BaseException as err:
            own = self._own_fault() if is_heard(err) else None
            ticket.release()
            if own is not None:
                raise own from err
            if isinstance(err, PeerError):
                told(err, self.group)
            if is_out_of_step(err) or (ticket.counts_cross and is_reported(err)):
                self.stop_everywhere(err, ticket.where)
            raise
        ticket.stage = stage
        return result

    def _find_fault(self, x_TH: Tensor, routing: Routing) -> tuple[Fault, int, MoEError] | None:
        """What the host can see to be wrong without a sync."""
        try:
            # a device that the group has served before is not looked up again
            known = isinstance(x_TH, Tensor) and x_TH.device == self._device
            check_input(self.config, self.capabilities, None if known else self.group, x_TH, routing)
        except InputError as err:
            return Fault.BAD_INPUT, 0, err
        except MoEError as err:
            return Fault.TOO_MANY_TOKENS, x_TH.shape[0], err
        return None


def _everywhere(error: MoEError) -> MoEError:
    """The error, as one that the other ranks raise too or have been told of."""
    mark_everywhere(error)
    mark_reported(error)
    return error

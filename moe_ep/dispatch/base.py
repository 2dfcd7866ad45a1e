"""The contract of a dispatcher: capabilities, six stages over a ticket, early counts.

A dispatcher object holds only static resources, so any number of tickets may be in flight. A back end writes the six
`_stage` methods; order, checks, faults and lanes are here.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..alarm import Alarm, alarm_of
from ..config import DispatchConfig, check_num_micro_batches
from ..debug import debug
from ..eager import eager
from ..errors import InputError, MoEError, PeerError, ProtocolError, RecipeError
from ..faults import Fault, FaultRecord, status_words
from ..ops import choose_kernels
from ..order import Order, in_stage, open_order, told
from ..peers import is_out_of_step, is_reported, mark_everywhere, mark_reported
from ..permute import ExpertInput
from ..routing import Routing
from ..schedule import Link
from ..streams import CommStream, InFlight, LanePool, comm_stream
from ..tracing import stage_range
from .capabilities import (
    Capabilities,
    capture_refusal,
    check_input,
    group_serves,
    is_captured,
    row_capacity,
    too_many_tickets,
)
from .count_checks import check_counts
from .ticket import Stage, Ticket
from .transfer import pack, start_call
from .twin import back_ends_of, open_twin
from .waits import LAUNCH_AFTER_PACK, stage_waits

T = TypeVar("T")


class Closing(Protocol):
    """What `close_dispatchers` closes, too."""

    def close(self) -> None:
        """Free static resources."""
        ...


_nothing = contextlib.nullcontext()


class Dispatcher(ABC):
    """Sends the tokens of a micro-batch to their experts and brings the results back, differentiably.

    Stages, in this order, all on one ticket: `dispatch_preprocess`, `dispatch`, `dispatch_postprocess`,
    (the experts), `combine_preprocess`, `combine`, `combine_postprocess`. `dispatch` and `combine` launch; the stage
    behind each waits. Called one after the other they are the synchronous form; whatever the caller issues between a
    launch and the stage that waits runs beside the communication. There is no other code path.

    Every rank of the group makes the same calls, also with zero tokens, and a backward on one is a backward on all.

    A back end that moves rows with `transfer.all_to_all` and `transfer.all_gather` gives its users a group that serves
    on behind an exception on one rank. What other means start cannot be made up for, and ends the group (`alarm`).
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    num_lane_ints: int = 0
    early_apart: ClassVar[bool] = False  # what the host reads early travels in a process group of its own
    rows_by_collectives: ClassVar[bool] = False  # of torch.distributed: config.num_sms limits all of them

    def __init__(self, config: DispatchConfig, group: dist.ProcessGroup | None) -> None:
        self.config = config
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.num_ranks = 1 if group is None else group.size()
        self.num_local = config.num_experts // self.num_ranks
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.kernels = choose_kernels(config, group)  # for tensors on a GPU; others are moved by torch
        self.lanes = LanePool(self.num_lane_ints)
        num_sms = config.num_sms if self.rows_by_collectives else None
        purposes = ["counts", "rows"] if num_sms is None else [f"{what}_{num_sms}_sms" for what in ("counts", "rows")]
        self._early_group = open_twin(group, purposes[0], num_sms=num_sms) if self.early_apart else group
        self.row_group = group if num_sms is None else open_twin(group, purposes[1], num_sms=num_sms)
        self.alarm: Alarm | None = None
        if group is not None and self.num_ranks > 1:
            self.alarm = alarm_of(group, start_call)
            for beside in (self._early_group, self.row_group):
                if beside is not None:
                    self.alarm.include(beside)
            if back_ends_of(group) == {"gloo"}:  # it ends the process where calls that do not belong together meet
                self.alarm.meet_in(open_twin(group, "steps") or group)
        self._order: Order | None = None
        if debug().checks:
            self._order = open_order(group, self.alarm, self._early_group, self.row_group)
        self._tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()  # where their number is limited
        self._faults: FaultRecord | None = None
        self._device: torch.device | None = None  # of the last micro-batch
        self.companions: dict[Any, Closing] = {}  # what lives as long as this, such as the replicas of its layers
        self.closed = False

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

    def __reduce__(self) -> Any:
        raise ProtocolError(
            f"dispatcher {self.name!r} belongs to a process group of this job and cannot be pickled; save the model's "
            "state_dict() in place of the model, and build the layers again to load it"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Dispatcher:
        """The dispatcher itself: layers share one, and a process group cannot be copied."""
        return self

    @property
    def host_syncs(self) -> int:
        """Host syncs of one micro-batch, forward and backward, as this object is configured."""
        return self.capabilities.host_syncs

    @property
    def comm_sms(self) -> int:
        """SMs of a GPU that its communication keeps busy while it runs: what GEMMs beside it should leave free."""
        return 0 if self.num_ranks == 1 else self.config.num_sms or self.capabilities.comm_sms

    def describe(self) -> str:
        """One line on what runs, for the log."""
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        movers = ", rows moved by CUDA kernels" if self.kernels else ""
        in_line = self.early_apart and self.num_ranks > 1 and self._early_group is self.group
        counts = ", counts in line behind rows (the group's back end cannot be opened twice)" if in_line else ""
        return f"{self.name} ({ranks}, {self.num_local} experts on each{movers}{counts}{self._room()})"

    def _room(self) -> str:
        rows = row_capacity(self.config, self.num_ranks)
        if rows is None:
            return ""
        mib = rows * self.config.hidden_size * self.dtype.itemsize / 2**20
        return f", room for {rows} expert rows of each micro-batch, {mib:.1f} MiB a tensor of them"

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
        self._count(ticket)
        fault = self._find_fault(x_TH, routing)
        if fault is not None:
            code, value, error = fault
            self._announce(ticket, self.served_device(x_TH.device if isinstance(x_TH, Tensor) else None), code, value)
            ticket.release()
            raise _everywhere(type(error)(f"{ticket.where}: {error}"))
        ticket.num_tokens, self._device = x_TH.shape[0], x_TH.device
        if self.num_lane_ints:
            ticket.lend(*self.lanes.borrow(x_TH.device))
        row_bytes = x_TH.shape[1] * x_TH.element_size()
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
        wanted = (ticket.num_rows, self.config.hidden_size)
        if tuple(y_NH.shape) != wanted or y_NH.dtype != self.dtype:
            ticket.release()
            raise InputError(
                f"{ticket.where}: the experts' output must be {wanted} {self.dtype}, one row for each row of the "
                f"ExpertInput, got {tuple(y_NH.shape)} {y_NH.dtype}"
            )
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

    def raise_everywhere(self, err: BaseException, where: str) -> None:
        """Make the other ranks raise a PeerError, wherever they wait, because this one raises `err` at `where`.

        It returns when all ranks have stopped (`moe_ep.alarm`); the caller then raises. Nothing happens for an error
        that all ranks raise anyway, nor where the same one was handed over before.
        """
        if self.alarm is not None:
            self.alarm.fail(err, where)

    def stop_everywhere(self, err: BaseException, where: str) -> None:
        """As `raise_everywhere`, where all ranks raise, but have not launched as much: all call this."""
        if self.alarm is not None:
            self.alarm.stop_all(err, where)

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

    def raise_if_faulted(self) -> None:
        """Read the device's fault record (a host sync) and raise on every rank if there is one. Collective.

        Raises:
            InputError, CapacityError, NonFiniteError: the fault.
            PeerError: another rank raised.
        """
        if self.alarm is not None:
            self.alarm.check()
        if self._faults is not None:
            self._faults.raise_if_set(self.group)

    def close(self) -> None:
        """Free the static resources; call it before the process group goes. Idempotent, no collective by default."""
        self.closed = True

    # for back ends

    def faults(self, device: torch.device) -> FaultRecord:
        """The device's fault record, made at first use."""
        if self._faults is None:
            self._faults = FaultRecord(device, self.config.num_experts)
        return self._faults

    def status(self, routing: Routing) -> Tensor:
        """(code, value) of this rank's routing, int64 [2] on its device: what the other ranks must learn."""
        return status_words(routing, 0, duplicates=self.capabilities.duplicates, kernels=self.kernels)[:2]

    def words(self, ticket: Ticket, status: Tensor) -> Tensor:
        """A status and the ticket's place, int64 [3]: what travels to every rank along with the counts."""
        return torch.cat([status, status.new_full((1,), ticket.place)])

    def pack(self, ticket: Ticket, *payload: Tensor) -> None:
        """End of a preprocess stage: the payload for `transfer.start`, which may come much later.

        Whatever a schedule puts between the two does not hold up a dispatch: it waits for what was issued up to here.
        Without a schedule nobody knows what is in between, and the launch waits for all of it.
        """
        ticket.packed, ticket.payload = pack(*payload)
        if ticket.stage is Stage.NEW and ticket.waits is not None and LAUNCH_AFTER_PACK in ticket.waits:
            ticket.packed.mark = self.comm(payload[0].device).mark()

    def comm(self, device: torch.device) -> CommStream:
        """The comm stream of (device, group)."""
        return comm_stream(device, self.group)

    def early(self, device: torch.device) -> CommStream:
        """The stream for what the host reads early; its `group` is where to issue it."""
        return comm_stream(device, self._early_group, early=self.early_apart)

    def read_ints(self, ticket: Ticket, early: InFlight) -> list[int]:
        """Host values of an early exchange that wrote into the ticket's lane (its one host sync on CUDA)."""
        assert ticket.lane is not None, "no lane"
        (values,) = early.wait_on_host()
        if values is ticket.lane.host:
            return values.tolist()
        if values.device.type == "cpu" and values.data_ptr() != ticket.lane.host.data_ptr():
            ticket.lane.host[: values.numel()].copy_(values.view(-1))
        return ticket.lane.host[: values.numel()].tolist()

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

    def _count(self, ticket: Ticket) -> None:
        most = self.capabilities.max_tickets
        if most is None:
            return
        live = [other.where for other in self._tickets if other.stage is not Stage.RELEASED]
        if len(live) >= most:
            raise ProtocolError(
                f"{ticket.where}: dispatcher {self.name!r} holds {most} micro-batch(es) in flight, and "
                f"{', '.join(sorted(live))} is under way; finish it first or take another dispatcher"
            )
        self._tickets.add(ticket)

    def _run(self, ticket: Ticket, stage: Stage, fn: Callable[[], T]) -> T:
        waits = stage_waits(ticket, stage)
        noted = _nothing if self._order is None else in_stage(stage.label)
        try:
            with stage_range(stage.label, ticket.layer, ticket.micro_batch), waits, noted:
                result = fn()
        except BaseException as err:
            ticket.release()
            if isinstance(err, PeerError):
                told(err, self.group)
            if is_out_of_step(err) or (ticket.counts_cross and is_reported(err)):
                self.stop_everywhere(err, ticket.where)
            raise
        ticket.stage = stage
        return result

    def served_device(self, device: torch.device | None) -> torch.device:
        """`device`, or the one that the other ranks exchange from where the group does not serve this (or is none).

        A wrong device can be just the fault that is to be announced.
        """
        if device is not None and (self.group is None or self.num_ranks == 1 or group_serves(self.group, device)):
            return device
        if self._device is not None:
            return self._device
        cpu = torch.device("cpu")
        if self.group is None or group_serves(self.group, cpu):
            return cpu
        return torch.device("cuda", torch.cuda.current_device())

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

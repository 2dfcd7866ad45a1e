"""What a dispatcher holds for as long as it lives: process groups, streams, lanes, alarm, faults noted on a device."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ..alarm import Alarm
from ..alarm_registry import alarm_of, include
from ..config import DispatchConfig
from ..debug import debug
from ..errors import ProtocolError
from ..fault_words import status_words
from ..faults import FaultRecord
from ..in_flight import InFlight
from ..lanes import LanePool
from ..ops import choose_kernels
from ..order import Order, open_order
from ..routing import Routing
from ..streams import CommStream, comm_stream
from .capabilities import Capabilities, group_serves, row_capacity
from .collectives import start_call
from .ticket import Stage, Ticket
from .transfer import pack
from .twin import back_ends_of, open_twin
from .waits import LAUNCH_AFTER_PACK


class Closing(Protocol):
    """What `close_dispatchers` closes, too."""

    def close(self) -> None:
        """Free static resources."""
        ...


class Resources:
    """Base of `Dispatcher`: its static resources, and what a back end does with them.

    Nothing of a micro-batch is kept here but the device that the last one came from: the rest is in its ticket.
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
        self._early_group, self.row_group = self._open_groups()
        self.alarm = self._open_alarm()
        self._order: Order | None = None
        if debug().checks:
            self._order = open_order(group, self.alarm, self._early_group, self.row_group)
        self._tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._faults: FaultRecord | None = None
        self._device: torch.device | None = None  # of the last micro-batch
        self.companions: dict[Any, Closing] = {}  # what lives as long as this, such as the replicas of its layers
        self.closed = False

    def _open_groups(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """What the host reads early travels in the first, rows in the second; the group itself where both may."""
        num_sms = self.config.num_sms if self.rows_by_collectives else None
        suffix = "" if num_sms is None else f"_{num_sms}_sms"
        early = open_twin(self.group, f"counts{suffix}", num_sms=num_sms) if self.early_apart else self.group
        rows = self.group if num_sms is None else open_twin(self.group, f"rows{suffix}", num_sms=num_sms)
        return early, rows

    def _open_alarm(self) -> Alarm | None:
        """The group's, which learns of the twins here; None on one rank."""
        if self.group is None or self.num_ranks == 1:
            return None
        alarm = alarm_of(self.group, start_call)
        for beside in (self._early_group, self.row_group):
            if beside is not None:
                include(alarm, beside)
        if back_ends_of(self.group) == {"gloo"}:  # it ends the process where calls that do not belong together meet
            steps = open_twin(self.group, "steps") or self.group
            include(alarm, steps)
            alarm.watched.meet_in(steps)
        return alarm

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

    def __reduce__(self) -> Any:
        raise ProtocolError(
            f"dispatcher {self.name!r} belongs to a process group of this job and cannot be pickled; save the model's "
            "state_dict() in place of the model, and build the layers again to load it"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """The dispatcher itself: layers share one, and a process group cannot be copied."""
        return self

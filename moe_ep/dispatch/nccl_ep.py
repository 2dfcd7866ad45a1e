"""`nccl_ep`: NVIDIA's NCCL EP (package nccl-extensions). High-throughput mode trains, low-latency mode evaluates."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import DispatchConfig
from ..expert_input import ExpertInput
from ..faults import NUM_WORDS, Fault, raise_faults
from ..in_flight import InFlight
from ..routing import NO_ROUTE, Routing
from .base import Dispatcher
from .capabilities import Capabilities
from .collectives import all_gather
from .nccl_ep_engine import Engine
from .nccl_ep_high_throughput import HighThroughput
from .nccl_ep_library import found_versions, library, library_reasons, make_communicator
from .nccl_ep_low_latency import LowLatency
from .nccl_ep_sizes import CAPABILITIES, Sizes, make_sizes, option_reasons, read_options
from .preflight import preflight
from .registry import register_dispatcher
from .ticket import Ticket
from .watchdog import Watchdog, group_timeout_s


@register_dispatcher("nccl_ep")
class NcclEp(Dispatcher):
    """One copy of a token goes to each rank that it has an expert on, by kernels that NCCL EP compiles at first use.

    `layout = "expert_major"` (default): the library expands and groups the rows by expert. `"flat"`: the unique rows
    are handed over with their index. Rows are counted on the host, unless `budget_rows` or capacity_factor fixes how
    many a rank can receive (expert_major only): then nothing is read there, and rows beyond it are dropped and noted
    as a fault on the device. `low_latency = true`: micro-batches under no_grad take the library's low-latency kernels,
    which send and complete in two calls, through buffers of their own.

    Order of sums: the experts' rank adds a token's local routes (expert ascending) in float32 and rounds to x's dtype
    for the trip; home adds the ranks' partial sums in float32 and rounds once more. The gradient of x goes the same
    way.
    Kept for backward: the handle (its size is printed at construction), 4 bytes an expert row; where flat
    12 U K bytes of integers; and the received rows where the experts keep them. On all ranks the same calls in one
    order, so a token's rank never waits for a rank without tokens.
    """

    name: ClassVar[str] = "nccl_ep"
    capabilities: ClassVar[Capabilities] = CAPABILITIES
    early_apart: ClassVar[bool] = True

    def __init__(self, config: DispatchConfig, group: dist.ProcessGroup | None) -> None:
        assert group is not None, "rank_counts leaves no configuration without a group"
        self.sizes: Sizes = make_sizes(config, group.size(), getattr(torch, config.dtype).itemsize)
        if self.sizes.budget is None:
            self.num_lane_ints = NUM_WORDS * group.size() + self.sizes.local_experts + 1
        super().__init__(config, group)
        equal = {"sizes": self.sizes, **self.versions()}
        preflight("dispatcher 'nccl_ep'", equal, [], group, one_host=self.on_gpu and self.num_ranks <= 8)
        self.home = torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")
        timeout_s = group_timeout_s(group, self.home)
        self.watchdog = Watchdog(self.name, self.rank, self.num_ranks, timeout_s)
        low_latency = read_options(config).low_latency
        self._print_memory(low_latency)
        lib, communicator = self.find_library(group)
        self.engine = Engine(lib, communicator, self.sizes, config.num_sms, timeout_s, self.watchdog)
        self.high_throughput = HighThroughput(self, self.engine)
        self.low_latency: LowLatency | None = None
        if low_latency:  # one communicator for each group of the library
            self.low_latency = LowLatency(self, *self.find_library(group), timeout_s)

    # what a test replaces, to run this adapter without a GPU

    on_gpu: ClassVar[bool] = True

    @classmethod
    def machine_reasons(cls) -> list[str]:
        """What the machine lacks."""
        return library_reasons()

    @classmethod
    def versions(cls) -> dict[str, str]:
        """What was found; must be equal on all ranks."""
        return found_versions()

    @staticmethod
    def find_library(group: dist.ProcessGroup) -> tuple[Any, Any]:
        """The module, and a communicator for the group."""
        return library(), make_communicator(group)

    # construction and end

    @classmethod
    def unavailable_reasons(cls, config: DispatchConfig, group: dist.ProcessGroup | None) -> list[str]:
        """Options, the library's limits, then what this machine lacks."""
        return [*option_reasons(config), *cls.machine_reasons()]

    @classmethod
    def findings(cls) -> list[str]:
        """Which packages, NCCL and compiler were found, for `doctor`."""
        return ["found " + ", ".join(f"{name} {version}" for name, version in cls.versions().items())]

    def _print_memory(self, low_latency: bool) -> None:
        if self.rank == 0:
            group_mib, handle_mib = self.sizes.group_bytes() / 2**20, self.sizes.handle_bytes() / 2**20
            more = f", {self.sizes.low_latency_bytes() / 2**20:.1f} MiB for the low-latency one" if low_latency else ""
            print(
                f"moe_ep: nccl_ep takes {group_mib:.1f} MiB on each GPU for its group{more}, and {handle_mib:.1f} MiB "
                "for each micro-batch of each layer from its dispatch to the end of its backward",
                file=sys.stderr,
                flush=True,
            )

    @property
    def host_syncs(self) -> int:
        """Counts, and what the library itself reads in dispatch and in its backward; with a fixed budget none."""
        return 3 if self.sizes.budget is None else 0

    def describe(self) -> str:
        """One line on what runs, for the log."""
        rows = "rows counted on the host" if self.sizes.budget is None else f"at most {self.sizes.budget} rows"
        layout = "flat" if self.sizes.flat else "expert_major"
        return f"{super().describe()}, {layout}, {rows}, up to {self.config.max_tokens} tokens"

    def close(self) -> None:
        """Free the library's memory. Every rank calls it before the process group goes: NCCL waits for all of them."""
        if not self.closed:
            if self.low_latency is not None:
                self.low_latency.close()
            self.engine.close()
            self.watchdog.close()
        super().close()

    # for the modes

    def tell(self, ticket: Ticket, status: Tensor) -> InFlight | None:
        """Statuses of all ranks to the host, beside the library's calls; with a fixed budget a note on the device."""
        if self.sizes.budget is not None:
            self.faults(status.device).note(status, ticket.layer, ticket.micro_batch)
            return None
        words, comm = self.words(ticket, status.to(torch.int64)), self.early(status.device)

        def launch() -> tuple[tuple[Tensor, ...], list[Any]]:
            gathered = words.new_empty((self.num_ranks, NUM_WORDS))
            works = all_gather(gathered.view(-1), words, comm.group)
            return (self.to_host(ticket, gathered, 0),), works

        told = comm.launch(f"exchange of statuses of {ticket.where}", launch, keep=(words,))
        self._note_writer(ticket, told)
        return told

    def bind(self, ticket: Ticket, what: str, ids_TK: Tensor, update: Callable[[], Tensor]) -> InFlight:
        """Beside the compute, `update` a handle with ids; its counts to the host where they are read there."""

        def launch() -> tuple[tuple[Tensor, ...], list[Any]]:
            counts = update()
            return (self.to_host(ticket, counts, NUM_WORDS * self.num_ranks),) if self.num_lane_ints else (), []

        early = self.comm(ids_TK.device).launch(what, launch, keep=(ids_TK,))
        self._note_writer(ticket, early)
        return early

    def to_host(self, ticket: Ticket, values: Tensor, place: int) -> Tensor:
        """Integers into the ticket's lane; on CPUs, where they may not be there yet, themselves."""
        if values.device.type == "cpu":
            return values
        assert ticket.lane is not None, "no lane"
        host = ticket.lane.host[place : place + values.numel()]
        host.copy_(values.reshape(-1).long(), non_blocking=True)
        return host

    def _note_writer(self, ticket: Ticket, writer: InFlight) -> None:
        if ticket.lane is not None and writer.event is not None:
            ticket.lane.event = Events(ticket.lane.event, writer.event)

    def read_statuses(self, ticket: Ticket, told: InFlight | None) -> None:
        """Raise if any rank reported a fault; with a fixed budget nothing is read."""
        if told is not None:
            (values,) = told.wait_on_host()
            words = values.view(self.num_ranks, NUM_WORDS).tolist()
            raise_faults(words, self.rank, ticket.where, self.config.num_experts, place=ticket.place)

    def read_counts(self, early: InFlight) -> tuple[int, ...] | None:
        """What the update of a handle counted; None with a fixed budget."""
        if self.sizes.budget is not None:
            return None
        (values,) = early.wait_on_host()
        return tuple(values.tolist())

    def _mode(self) -> HighThroughput | LowLatency:
        evaluates = self.low_latency is not None and not torch.is_grad_enabled()
        return self.low_latency if evaluates and self.low_latency is not None else self.high_throughput

    def _announce(self, ticket: Ticket, device: torch.device, code: Fault, value: int) -> None:
        if self.num_lane_ints:
            ticket.lend(*self.lanes.borrow(device))
        ids = torch.full((1, self.config.top_k), NO_ROUTE, device=device)
        self._mode().announce(ticket, ids, torch.tensor([int(code), value], device=device))
        if ticket.state.told is not None:
            ticket.state.told.wait_on_host()

    # the six stages

    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        self._mode().dispatch_preprocess(ticket, x_TH, routing)

    def _dispatch(self, ticket: Ticket) -> None:
        ticket.state.mode.dispatch(ticket)

    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        return ticket.state.mode.dispatch_postprocess(ticket)

    def _combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None:
        ticket.state.mode.combine_preprocess(ticket, y_NH)

    def _combine(self, ticket: Ticket) -> None:
        ticket.state.mode.combine(ticket)

    def _combine_postprocess(self, ticket: Ticket) -> Tensor:
        return ticket.state.mode.combine_postprocess(ticket)


class Events:
    """Several writers of a lane, of which the last to end counts."""

    def __init__(self, *events: Any) -> None:
        self._events = [event for event in events if event is not None and not event.query()]

    def query(self) -> bool:
        """Whether all have ended."""
        return all(event.query() for event in self._events)

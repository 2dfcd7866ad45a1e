"""`deepep`: DeepEP's kernels between GPUs of one host, one row per token and destination rank each way."""

from __future__ import annotations

import sys
import weakref
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..config import DispatchConfig
from ..expert_input import ExpertInput
from ..fault_words import status_words
from ..faults import NUM_WORDS, Fault, raise_faults
from ..in_flight import InFlight
from ..machine import loaded_nccl
from ..routing import NO_ROUTE, Routing
from ..sorted_routes import SortedRoutes, sort_routes
from . import deepep_library as found
from .base import Dispatcher
from .capabilities import Capabilities
from .collectives import all_gather
from .deepep_library import settings
from .deepep_link import Link
from .deepep_transfer import CombineTransfer, DispatchTransfer
from .deepep_v1 import V1Link
from .deepep_v2 import V2Link
from .preflight import preflight
from .received_rows import grouped_input, sum_routes, unique_input
from .registry import register_dispatcher
from .ticket import Ticket
from .transfer import Flight, finish, start
from .watchdog import Watchdog, group_timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepEPState:
    """Ids to send, and words on their way; then the transfer and its flight; then the routes of what came."""

    ids: Tensor | None = None
    told: InFlight | None = None
    transfer: DispatchTransfer | None = None
    handle: Any = None
    routes: SortedRoutes | None = None
    flight: Flight | None = None


@register_dispatcher("deepep")
class DeepEP(Dispatcher):
    """A token travels once to each rank that holds experts of it; what they compute for it is summed there first.

    One buffer for all layers and micro-batches of a (configuration, group), sized here; what tells calls apart, the
    library's handle, stays with the ticket. Backward of combine is a dispatch along the handle, backward of dispatch a
    combine that carries the weights' gradients too.

    What ranks tell each other (fault, value, place) travels beside, in a process group of its own, and is read behind
    the counts that the library makes the host wait for: by then it has arrived.

    Order of sums: a rank sums a token's local routes with k ascending in float32 and rounds to bfloat16 for the trip;
    home adds the ranks' partial sums in float32, rank ascending (v1) or in the order of k (v2), and rounds once more.
    With `expand` the library makes the first sum, in the same precision.
    Kept for backward, in bytes of integers: 5 T R + 12 U K + 4 U (v1), 12 T K + 16 U K + 24 U (v2), and
    12 T K + 4 U K + 16 N (expanded); and the received rows where the experts keep them.
    """

    name: ClassVar[str] = "deepep"
    early_apart: ClassVar[bool] = True
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cuda",),
        dtypes=("bfloat16",),
        rank_counts=(2, 3, 4, 5, 6, 7, 8),
        hidden_multiple=16,
        max_top_k=32,
        options=("api", "expand"),
        host_syncs=1,
        uses_num_sms=True,
        comm_sms=found.DEFAULT_SMS,
        packages=("tokenspeed-deepep",),
        notes=found.NOTES,
    )

    _open: ClassVar[weakref.WeakSet[DeepEP]] = weakref.WeakSet()

    def __init__(self, config: DispatchConfig, group: dist.ProcessGroup | None) -> None:
        assert group is not None, "unavailable_reasons lets no one pass without a group"
        self.num_lane_ints = NUM_WORDS * group.size()
        super().__init__(config, group)
        self.ep_group = group
        self.api, self.expand, self.num_sms = settings(config)
        self.device = self._own_device()
        timeout_s = group_timeout_s(group, self.device)
        self._preflight()
        self.link = self._make_link(timeout_s)
        self._say_memory()
        self.link.open()
        self._open.add(self)
        self.watchdog = Watchdog(self.describe(), self.rank, self.num_ranks, timeout_s)

    @classmethod
    def load_library(cls) -> tuple[Any, str]:
        """The module and "", or None and why it is not there."""
        return found.load()

    @classmethod
    def machine_reasons(cls, api: str, num_sms: int) -> list[str]:
        """What this machine lacks, sentences."""
        return found.machine_reasons(api, num_sms)

    @classmethod
    def sms_of_device(cls) -> int:
        """SMs of this rank's GPU."""
        return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count

    @classmethod
    def findings(cls) -> list[str]:
        """Which library was found and what it offers, for `doctor`."""
        return found.findings()

    @classmethod
    def unavailable_reasons(cls, config: DispatchConfig, group: dist.ProcessGroup | None) -> list[str]:
        """Options, then the library, then this machine, then the configuration against the library's limits."""
        api, expand, num_sms = settings(config)
        reasons = found.option_reasons(api, expand, num_sms)
        if reasons:
            return reasons
        library, why = cls.load_library()
        reasons = [*found.library_reasons(library, why, api), *cls.machine_reasons(api, num_sms)]
        num_ranks = 2 if group is None else group.size()
        if not reasons:
            reasons = found.limit_reasons(library, api, config, num_ranks)
        if not reasons and group is not None:
            reasons = found.together_reasons(num_sms, cls._sms_of_others(group), cls.sms_of_device())
        return reasons

    @classmethod
    def _sms_of_others(cls, group: dist.ProcessGroup) -> list[int]:
        """SMs that communication of each other group takes; buffers of one group share its stream."""
        most: dict[dist.ProcessGroup, int] = {}
        for other in cls._open:
            if not other.closed and other.ep_group is not group:
                most[other.ep_group] = max(other.num_sms, most.get(other.ep_group, 0))
        return list(most.values())

    def describe(self) -> str:
        """One line on what runs, for the log."""
        form = ", expanded rows" if self.expand else ""
        return f"{super().describe()}, api {self.api}{form}, {self.num_sms} SMs, {self.link.num_bytes / 2**20:.0f} MiB"

    def close(self) -> None:
        """Free the buffer; collective. After a lost rank the library's barrier would only wait, so it is left out."""
        if self.closed:
            return
        super().close()
        self.watchdog.close()
        if not self.watchdog.broken:
            self.link.close()

    # stages

    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        words = status_words(routing, ticket.place, duplicates=self.api == "v1", kernels=self.kernels)
        told = self._tell(ticket, words)
        # with a fault nothing is routed: the library checks no ids, or traps on the device
        ids = torch.where(words[0] > 0, NO_ROUTE, routing.expert_ids).contiguous()
        ticket.state = DeepEPState(ids=_at_least_one(ids, NO_ROUTE), told=told)
        self.pack(ticket, _at_least_one(x_TH, 0), _at_least_one(routing.weights, 0))

    def _tell(self, ticket: Ticket, words: Tensor) -> InFlight:
        """This rank's words to all, and all ranks' to the host, beside the rows."""
        comm, lane = self.early(words.device), ticket.lane
        assert lane is not None, "no lane"

        def launch() -> tuple[tuple[Tensor, ...], list[Any]]:
            gathered = words.new_empty((self.num_ranks, NUM_WORDS))
            works = all_gather(gathered.view(-1), words, comm.group)
            if not words.is_cuda:
                return (gathered,), works
            lane.host.copy_(gathered.view(-1), non_blocking=True)
            return (lane.host,), works

        told = comm.launch(f"exchange of statuses of {ticket.where}", launch, keep=(words,))
        lane.event = told.event
        return told

    def _announce(self, ticket: Ticket, device: torch.device, code: Fault, value: int) -> None:
        ticket.lend(*self.lanes.borrow(self.device))
        shape = (1, self.config.top_k)
        ids = torch.full(shape, NO_ROUTE, device=self.device)
        x_TH = torch.zeros((1, self.config.hidden_size), dtype=self.dtype, device=self.device)
        told = self._tell(ticket, self.words(ticket, torch.tensor([int(code), value], device=self.device)))
        transfer = DispatchTransfer(self.link, self.watchdog, f"fault of {ticket.where}", ids)
        payload = x_TH, torch.zeros(shape, device=self.device)
        what = f"dispatch of {ticket.where}"  # the other ranks' dispatch is its counterpart
        self.comm(self.device).launch(what, lambda: transfer.forward(payload), keep=payload).wait_on_host()
        told.wait_on_host()

    def _dispatch(self, ticket: Ticket) -> None:
        state: DeepEPState = ticket.state
        assert state.ids is not None and state.told is not None, "no ids"
        what = f"dispatch of {ticket.where}"
        transfer = DispatchTransfer(self.link, self.watchdog, what, state.ids)
        flight = Flight(transfer, self.comm(self.device), what, ticket.packed)
        ticket.payload = start(flight, *ticket.payload)
        flat = self.read_ints(ticket, state.told)
        words = [flat[i : i + NUM_WORDS] for i in range(0, len(flat), NUM_WORDS)]
        raise_faults(words, self.rank, ticket.where, self.config.num_experts, place=ticket.place)
        ticket.state = DeepEPState(transfer=transfer, flight=flight)

    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        state: DeepEPState = ticket.state
        assert state.flight is not None and state.transfer is not None, "no flight"
        source_UH, weights = finish(state.flight, *ticket.payload)
        ticket.payload = ()
        received = state.transfer.take()
        self.comm(self.device).hold(received)
        if received.ids is None:
            ticket.state = DeepEPState(handle=received.handle)
            assert received.counts is not None, "no counts"
            return grouped_input(source_UH, weights, received.counts, received.host_counts, self.kernels)
        routes = sort_routes(received.ids, self.num_local, kernels=self.kernels)
        ticket.state = DeepEPState(handle=received.handle, routes=routes)
        return unique_input(source_UH, weights, routes, received.host_counts, self.kernels)

    def _combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None:
        routes: SortedRoutes | None = ticket.state.routes
        self.pack(ticket, y_NH if routes is None else sum_routes(y_NH, routes, self.kernels))
        ticket.state = replace(ticket.state, routes=None)

    def _combine(self, ticket: Ticket) -> None:
        what = f"combine of {ticket.where}"
        transfer = CombineTransfer(self.link, self.watchdog, what, ticket.state.handle)
        flight = Flight(transfer, self.comm(self.device), what, ticket.packed)
        ticket.payload = start(flight, *ticket.payload)
        ticket.state = DeepEPState(flight=flight)

    def _combine_postprocess(self, ticket: Ticket) -> Tensor:
        (y_TH,) = finish(ticket.state.flight, *ticket.payload)
        return y_TH[: ticket.num_tokens]

    # construction

    @classmethod
    def _own_device(cls) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def _preflight(self) -> None:
        versions = {"deep_ep": found.distribution(), "NCCL": loaded_nccl(), "torch": torch.__version__}
        equal = {**asdict(self.config), **versions}
        preflight(f"dispatcher {self.config.name!r}", equal, (), self.ep_group, one_host=True)

    def _make_link(self, timeout_s: float) -> Link:
        library, _ = self.load_library()
        if self.api == "v1":
            return V1Link(library, self.config, self.ep_group, self.num_sms)
        return V2Link(library, self.config, self.ep_group, self.num_sms, self.expand, timeout_s, self.kernels)

    def _say_memory(self) -> None:
        if self.rank == 0:
            print(f"moe_ep: allocates for {self.describe()} on each GPU", file=sys.stderr, flush=True)


def _at_least_one(tensor: Tensor, value: int) -> Tensor:
    """A token without routes in place of no token: it travels nowhere, and the library meets no empty tensor."""
    return pad(tensor, (0, 0, 0, 1), value=value) if tensor.shape[0] == 0 else tensor

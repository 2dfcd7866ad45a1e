"""`nccl_ep`: NVIDIA's NCCL EP (package nccl-extensions), high-throughput mode for training."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import DispatchConfig
from ..faults import NUM_WORDS, Fault, raise_faults
from ..permute import ExpertInput, SortedRoutes, sort_routes, sum_rows
from ..routing import NO_ROUTE, Routing
from ..streams import InFlight
from .base import Dispatcher
from .capabilities import Capabilities
from .nccl_ep_engine import Engine, Lease
from .nccl_ep_library import found_versions, library, library_reasons, make_communicator
from .nccl_ep_rows import cut, flat_input, grouped_input, library_routes, pad
from .nccl_ep_sizes import CAPABILITIES, Sizes, make_sizes, option_reasons
from .nccl_ep_transfer import Combine, Dispatch
from .preflight import preflight
from .registry import register_dispatcher
from .ticket import Ticket
from .transfer import Flight, all_gather, finish, start
from .watchdog import Watchdog, group_timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclEpState:
    """The handle; the routing on its way and the counts it gives; then the transfer, and where flat the sorted routes.

    `counts` is int32 [L + 1], valid behind `early`; `received` the same on the host, None with a fixed budget.
    """

    lease: Lease
    early: InFlight | None
    counts: Tensor
    received: tuple[int, ...] | None = None
    flight: Flight | None = None
    transfer: Dispatch | None = None
    routes: SortedRoutes | None = None


@register_dispatcher("nccl_ep")
class NcclEp(Dispatcher):
    """One copy of a token goes to each rank that it has an expert on, by kernels that NCCL EP compiles at first use.

    `layout = "expert_major"` (default): the library expands and groups the rows by expert. `"flat"`: the unique rows
    are handed over with their index. Rows are counted on the host, unless `budget_rows` or capacity_factor fixes how
    many a rank can receive (expert_major only): then nothing is read there, and rows beyond it are dropped and noted
    as a fault on the device.

    Order of sums: the experts' rank adds a token's local routes (expert ascending) in float32 and rounds to x's dtype
    for the trip; home adds the ranks' partial sums in float32 and rounds once more. The gradient of x goes the same
    way.
    Kept for backward: the handle (its size is printed at construction), 4 bytes an expert row; where flat
    12 U K bytes of integers; and the received rows where the experts keep them. On all ranks the same calls in one
    order, so a token's rank never waits for a rank without tokens.
    """

    name: ClassVar[str] = "nccl_ep"
    capabilities: ClassVar[Capabilities] = CAPABILITIES

    def __init__(self, config: DispatchConfig, group: dist.ProcessGroup | None) -> None:
        assert group is not None, "rank_counts leaves no configuration without a group"
        self.sizes: Sizes = make_sizes(config, group.size(), getattr(torch, config.dtype).itemsize)
        if self.sizes.budget is None:
            self.num_lane_ints = NUM_WORDS * group.size() + self.sizes.local_experts + 1
        super().__init__(config, group)
        equal = {"sizes": self.sizes, **self.versions()}
        preflight("dispatcher 'nccl_ep'", equal, [], group, one_host=self.on_gpu and self.num_ranks <= 8)
        device = torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")
        timeout_s = group_timeout_s(group, device)
        self.watchdog = Watchdog(self.name, self.rank, self.num_ranks, timeout_s / 2)
        self._print_memory()
        lib, communicator = self.find_library(group)
        self.engine = Engine(lib, communicator, self.sizes, config.num_sms, timeout_s, self.watchdog)

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
        return option_reasons(config) or cls.machine_reasons()

    @classmethod
    def findings(cls) -> list[str]:
        """Which packages, NCCL and compiler were found, for `doctor`."""
        return ["found " + ", ".join(f"{name} {version}" for name, version in cls.versions().items())]

    def _print_memory(self) -> None:
        if self.rank == 0:
            group_mib, handle_mib = self.sizes.group_bytes() / 2**20, self.sizes.handle_bytes() / 2**20
            print(
                f"moe_ep: nccl_ep takes {group_mib:.1f} MiB on each GPU for its group, and {handle_mib:.1f} MiB for "
                "each micro-batch of each layer from its dispatch to the end of its backward",
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
            self.engine.close()
            self.watchdog.close()
        super().close()

    # the six stages

    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        status = self.status(routing)
        ids_TK, weights_TK = library_routes(routing, self.num_local, self.sizes)
        ticket.state = self._send_routing(ticket, ids_TK, status)
        ticket.payload = (self._widen(x_TH), weights_TK)

    def _widen(self, rows: Tensor) -> Tensor:
        """Rows of the width and number that the library takes."""
        return pad(rows, max(rows.shape[0], 1), self.sizes.row)

    def _send_routing(self, ticket: Ticket, ids_TK: Tensor, status: Tensor) -> NcclEpState:
        """Bind the routing to a handle, and tell the other ranks of this rank's status; both beside the compute."""
        lease = self.engine.lease()
        what = f"exchange of routes of {ticket.where}"
        device = ids_TK.device
        counted = self.sizes.budget is None
        if not counted:
            self.faults(device).note(status, ticket.layer, ticket.micro_batch)
        words = self.words(ticket, status.to(torch.int64))
        found: list[Tensor] = []

        def exchange() -> tuple[tuple[Tensor, ...], list[Any]]:
            gathered = words.new_empty((self.num_ranks, NUM_WORDS))
            works = all_gather(gathered.view(-1), words, self.group) if counted else []
            counts = self.engine.update(lease, ids_TK, what)
            found.append(counts)
            if not counted or device.type == "cpu":
                return (gathered, counts) if counted else (), works
            assert ticket.lane is not None, "no lane"
            ticket.lane.host.copy_(torch.cat([gathered.view(-1), counts.long()]), non_blocking=True)
            return (ticket.lane.host,), works

        early = self.comm(device).launch(what, exchange, keep=(ids_TK, words))
        if ticket.lane is not None:
            ticket.lane.event = early.event
        return NcclEpState(lease=lease, early=early, counts=found[0])

    def _announce(self, ticket: Ticket, device: torch.device, code: Fault, value: int) -> None:
        if self.num_lane_ints:
            ticket.lend(*self.lanes.borrow(ticket, device))
        ids = torch.full((1, self.config.top_k), NO_ROUTE, device=device)
        state = self._send_routing(ticket, ids, torch.tensor([int(code), value], device=device))
        assert state.early is not None, "no exchange"
        state.early.wait_on_host()

    def _dispatch(self, ticket: Ticket) -> None:
        state: NcclEpState = ticket.state
        received, num_rows = None, self.sizes.budget
        if num_rows is None:
            received = self._read(ticket, state)
            num_rows = received[-1]
        what = f"dispatch of {ticket.where}"
        transfer = Dispatch(self.engine, state.lease, max(num_rows, 1), what)
        flight = Flight(transfer, self.comm(ticket.payload[0].device), what)
        ticket.payload = start(flight, *ticket.payload)
        ticket.state = replace(state, received=received, flight=flight, transfer=transfer)

    def _read(self, ticket: Ticket, state: NcclEpState) -> tuple[int, ...]:
        """Statuses and counts on the host: rows for each local expert, and the number of rows to make room for."""
        assert state.early is not None, "no exchange"
        values = [int(v) for part in state.early.wait_on_host() for v in part.reshape(-1).tolist()]
        words = [values[NUM_WORDS * r : NUM_WORDS * (r + 1)] for r in range(self.num_ranks)]
        raise_faults(words, self.rank, ticket.where, self.config.num_experts)
        return tuple(values[NUM_WORDS * self.num_ranks :])

    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        state: NcclEpState = ticket.state
        assert state.flight is not None and state.transfer is not None and state.early is not None, "no flight"
        rows, weights = finish(state.flight, *ticket.payload)
        ticket.payload = ()
        if state.received is None:
            state.early.wait()  # lets go of the ids; the dispatch behind it has ended
        rows = cut(rows, rows.shape[0], self.config.hidden_size)
        host_counts = None if state.received is None else state.received[: self.num_local]
        routes = None
        if state.transfer.ids is not None:
            routes = sort_routes(state.transfer.ids, self.num_local, kernels=self.kernels)
        ticket.state = replace(state, flight=None, transfer=None, routes=routes)
        if routes is not None:
            assert host_counts is not None, "flat rows are counted"
            return flat_input(rows, weights, routes, host_counts, self.kernels)
        counts_L = state.counts[: self.num_local]
        if host_counts is None:
            self._note_overflow(ticket, counts_L.sum())
        return grouped_input(rows, weights, counts_L, host_counts, self.kernels)

    def _note_overflow(self, ticket: Ticket, needed: Tensor) -> None:
        assert self.sizes.budget is not None, "counted rows cannot overflow"
        code = torch.where(needed > self.sizes.budget, int(Fault.TOO_MANY_ROWS), 0)
        status = torch.stack([code, needed.to(code.dtype)])
        self.faults(needed.device).note(status, ticket.layer, ticket.micro_batch)

    def _combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None:
        routes = ticket.state.routes
        if routes is not None:
            index = routes.row_token[: y_NH.shape[0]]
            y_NH = sum_rows(y_NH, index, routes.positions, bound=routes.bound, kernels=self.kernels)
        ticket.payload = (self._widen(y_NH),)

    def _combine(self, ticket: Ticket) -> None:
        state: NcclEpState = ticket.state
        what = f"combine of {ticket.where}"
        transfer = Combine(self.engine, state.lease, max(ticket.num_tokens, 1), what)
        flight = Flight(transfer, self.comm(ticket.payload[0].device), what)
        ticket.payload = start(flight, *ticket.payload)
        ticket.state = replace(state, flight=flight, routes=None, early=None)

    def _combine_postprocess(self, ticket: Ticket) -> Tensor:
        assert ticket.state.flight is not None, "no flight"
        (y,) = finish(ticket.state.flight, *ticket.payload)
        return cut(y, ticket.num_tokens, self.config.hidden_size)

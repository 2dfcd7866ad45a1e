"""`direct`: our own kernels over peer memory, for the GPUs of one NVLink domain."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..alarm_registry import launch_unlogged
from ..config import DispatchConfig
from ..expert_input import ExpertInput
from ..faults import Fault, raise_faults
from ..kernels.direct import Peers, rank_routes
from ..kernels.direct_types import MAX_RANKS, Codes, Shape, Trip
from ..kernels.library import missing
from ..routing import Routing
from .base import Dispatcher
from .capabilities import Capabilities
from .direct_transfer import Blocks, GiveBack, Push, capacities, default_blocks
from .peer_memory import PeerMemory
from .preflight import preflight
from .registry import register_dispatcher
from .ticket import Ticket
from .transfer import Flight, finish, start
from .watchdog import group_timeout_s

_NO_BOUND = 2**31 - 1
_CODES = Codes(
    bad_ids=int(Fault.BAD_IDS),
    non_finite=int(Fault.NON_FINITE),
    overflow=int(Fault.TOO_MANY_ROWS),
    place=int(Fault.OTHER_PLACE),
    no_grad=int(Fault.NO_GRAD),
    lost=int(Fault.LOST),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectState:
    """The trip, and what is under way."""

    trip: Trip
    push: Push | None = None
    flight: Flight | None = None


@register_dispatcher("direct")
class Direct(Dispatcher):
    """One copy of a token to each rank that has experts for it; a rank adds up its routes and sends one row back.

    Counts are exchanged on the device, so each rank knows the exact place of every row at its destination: no atomics,
    no host, and results that repeat bit for bit. With `capacity_factor` nothing waits for the host; without it the host
    reads the counts once per micro-batch, and rows are as many as there are.

    Rows stay in peer memory only while the kernel that sent or received them runs, and all communication of a group
    has one order. So one block of peer memory, sized for max_tokens, serves every ticket in flight.

    Option `expand`: hand over expert rows instead of unique rows and an index.

    Order of sums: a rank adds a token's routes with k ascending in float32; what came over the link was rounded to x's
    dtype once; home adds ranks ascending, its own routes unrounded and one by one in their turn, and rounds at the end.
    Backward does the same for x. Kept for backward: 4 T (K + R) + 8 T K + 4 U K bytes of integers.
    """

    name: ClassVar[str] = "direct"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cuda",),
        dtypes=("float32", "bfloat16", "float16"),
        hidden_multiple=8,
        needs_max_tokens=True,
        capacity=True,
        options=("expand",),
        host_syncs=1,
        graph_capture=True,
        uses_num_sms=True,
        notes=("rows move in units of 16 bytes; ranks must share a host and reach each other's memory",),
    )

    def __init__(self, config: DispatchConfig, group: dist.ProcessGroup | None) -> None:
        super().__init__(config, group)
        device = torch.device("cuda", torch.cuda.current_device())
        assert config.max_tokens is not None, "capabilities ask for max_tokens"
        row_bytes = config.hidden_size * self.dtype.itemsize
        self.shape = Shape(
            num_ranks=self.num_ranks,
            num_experts=config.num_experts,
            top_k=config.top_k,
            max_tokens=config.max_tokens,
            row_bytes=row_bytes,
        )
        self.expand = dict(config.options).get("expand", False) is True
        self._alone, self._beside = (default_blocks(device, config.num_sms, beside_gemms=b) for b in (False, True))
        layout, self.num_bytes = self.shape.layout()
        if group is not None and self.num_ranks > 1:
            preflight("dispatcher 'direct'", {"peer memory bytes": self.num_bytes}, [], group, one_host=True)
        self._memory = PeerMemory(self.num_bytes, group, device, stop_at=layout.stop)
        self._peers = Peers(
            self.shape,
            self.rank,
            self._memory.addresses,
            device,
            codes=_CODES,
            fault=self.faults(device).word,
            timeout_s=60.0 if group is None else group_timeout_s(group, device),
        )

    @classmethod
    def unavailable_reasons(cls, config: DispatchConfig, group: dist.ProcessGroup | None) -> list[str]:
        """No GPU, no kernels, too many ranks, sizes that no flag can hold."""
        if not torch.cuda.is_available():
            return ["it moves rows between GPUs, and torch sees none; take 'all2all'"]
        reasons = []
        expand = dict(config.options).get("expand", False)
        if not isinstance(expand, bool):
            reasons.append(f"expand = {expand!r} must be true or false")
        index = torch.cuda.current_device()
        if (why := missing(index)) is not None:
            reasons.append(f"its kernels are not to be had: {why}")
        num_ranks = 1 if group is None else group.size()
        if num_ranks > MAX_RANKS:
            reasons.append(f"it serves at most {MAX_RANKS} ranks, the group has {num_ranks}; take 'all2all'")
        if (config.max_tokens or 0) >= 1 << 24:
            reasons.append(f"max_tokens = {config.max_tokens} is not below 2^24; send smaller micro-batches")
        return reasons

    @property
    def host_syncs(self) -> int:
        """None where capacity_factor bounds the rows."""
        return 0 if self.config.capacity_factor is not None else 1

    @property
    def comm_sms(self) -> int:
        """Of its largest kernel where micro-batches interleave; where none does, nothing runs beside it."""
        return 0 if self.num_ranks == 1 else self._beside.sms

    def describe(self) -> str:
        """One line on what runs, for the log."""
        rows = "expert rows" if self.expand else "unique rows"
        return (
            f"{super().describe()}, {rows}, {self.num_bytes / 2**20:.0f} MiB of peer memory a rank for up to "
            f"{self.shape.max_tokens} tokens"
        )

    def close(self) -> None:
        """Free the peer memory; all ranks must be through with their work."""
        if not self.closed:
            torch.cuda.synchronize()
            self._memory.close()
        super().close()

    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        ids = routing.expert_ids.to(torch.int64).contiguous()
        trip = self._trip(ticket, ids, routing.bad_tokens)
        ticket.state = DirectState(trip=trip)
        self.pack(ticket, x_TH, routing.weights)

    def _trip(self, ticket: Ticket, ids_TK: Tensor, bad_tokens: Tensor | None = None) -> Trip:
        return Trip(
            layer=ticket.layer,
            micro_batch=ticket.micro_batch,
            place=ticket.place,
            ids=ids_TK,
            ranked=rank_routes(ids_TK, self.shape),
            bad_tokens=bad_tokens,
        )

    def _exchange(self, trip: Trip, fault: tuple[int, int] = (0, 0)) -> None:
        """Exchange counts on the current stream; sets plan, capacities, and counts where the host reads them.

        Raises, where it does: InputError, NonFiniteError, PeerError.
        """
        factor = self.config.capacity_factor
        if factor is not None:
            trip.row_capacity, trip.unique_capacity = capacities(factor, self.shape)
        bound = _NO_BOUND if factor is None else trip.row_capacity
        self._peers.exchange(trip, row_bound=bound, no_grad=not torch.is_grad_enabled(), host_fault=fault)
        if factor is None:
            self._read(trip)

    def _read(self, trip: Trip) -> None:
        """The host reads the plan: its one wait."""
        assert trip.plan is not None, "no plan"
        parts = self._peers.plan_parts(trip.plan.cpu())
        words = [(code, value or no_grad, place) for code, value, no_grad, place in parts["words"].tolist()]
        codes = {code for code, _, _ in words}
        if int(Fault.LOST) in codes and self.alarm is not None:
            self.alarm.hear()  # a rank that failed says more than that it did not come
        if any(codes - {int(Fault.LOST)}):
            self.faults(self._peers.device).word.zero_()  # told now, not a second time with the loss
        where = f"layer {trip.layer}, micro-batch {trip.micro_batch}"
        raise_faults(words, self.rank, where, self.config.num_experts)
        trip.row_capacity, trip.unique_capacity = parts["totals"].tolist()
        trip.host_counts = tuple(parts["tokens"].tolist())

    def _blocks(self, ticket: Ticket) -> Blocks:
        return self._alone if ticket.num_micro_batches == 1 else self._beside

    def _announce(self, ticket: Ticket, device: torch.device, code: Fault, value: int) -> None:
        if self.num_ranks == 1:
            return
        ids = torch.full((0, self.config.top_k), -1, device=self._peers.device)
        trip = self._trip(ticket, ids)
        comm = self.comm(self._peers.device)
        fault = (int(code), min(value, _NO_BOUND))

        def say() -> tuple[tuple[Tensor, ...], list[object]]:
            if self.config.capacity_factor is None:  # the others read the fault on the host and push nothing
                self._peers.exchange(trip, row_bound=_NO_BOUND, host_fault=fault)
                return (), []
            x = torch.empty((0, self.config.hidden_size), dtype=self.dtype, device=ids.device)
            weights = torch.empty((0, self.config.top_k), device=ids.device)
            push = Push(self._peers, trip, self._blocks(ticket), self.expand, lambda t: self._exchange(t, fault))
            return push.forward((x, weights))

        comm.launch(f"announcement of a fault of {ticket.where}", say).wait_on_host()

    def _dispatch(self, ticket: Ticket) -> None:
        state: DirectState = ticket.state
        if self.group is not None:
            launch_unlogged(self.group)  # before it starts: the host may wait for counts inside
        push = Push(self._peers, state.trip, self._blocks(ticket), self.expand, self._exchange)
        flight = Flight(push, self.comm(self._peers.device), f"dispatch of {ticket.where}", ticket.packed)
        ticket.payload = start(flight, *ticket.payload)
        ticket.state = replace(state, push=push, flight=flight)

    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        state: DirectState = ticket.state
        trip = state.trip
        assert state.flight is not None and state.push is not None and trip.plan is not None, "no flight"
        rows, row_weights = finish(state.flight, *ticket.payload)
        received = state.push.take()
        self.comm(self._peers.device).hold(received)
        ticket.payload, ticket.state = (), DirectState(trip=trip)
        parts = self._peers.plan_parts(trip.plan)
        return ExpertInput(
            source=rows,
            row_index=None if self.expand else received.row_index,
            positions=None if self.expand else received.positions,
            row_weights=row_weights,
            offsets=parts["offsets"],
            tokens_per_expert=parts["tokens"],
            capacity=trip.row_capacity,
            host_counts=trip.host_counts,
            kernels=True,  # nothing moves here without them
        )

    def _combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None:
        self.pack(ticket, y_NH)

    def _combine(self, ticket: Ticket) -> None:
        state: DirectState = ticket.state
        back = GiveBack(self._peers, state.trip, self._blocks(ticket))
        flight = Flight(back, self.comm(self._peers.device), f"combine of {ticket.where}", ticket.packed)
        ticket.payload = start(flight, *ticket.payload)
        ticket.state = replace(state, flight=flight)

    def _combine_postprocess(self, ticket: Ticket) -> Tensor:
        state: DirectState = ticket.state
        assert state.flight is not None, "no flight"
        (y_TH,) = finish(state.flight, *ticket.payload)
        return y_TH

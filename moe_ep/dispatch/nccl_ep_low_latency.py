"""Low-latency mode of NCCL EP, for micro-batches under no_grad: the library has no backward for it.

Rows arrive rank by rank in any order (the library places them with atomics), so each row carries its token's number in
16 bytes behind it, and what the experts see is in the order of the contract all the same. A send and its arrival are
two calls. A group has one send under way at a time (ll_ep.cuh, selectLowLatencyEpoch: `send_in_flight == 0`): whatever
comes next on it first completes the one before, into that one's own memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..expert_input import ExpertInput
from ..in_flight import InFlight
from ..permute import sum_rows
from ..routing import NO_ROUTE, Routing
from .nccl_ep_engine import Lease, LibraryGroup, refusals, stream_of
from .nccl_ep_rows import arrange, cut, library_routes, number_rows, pad
from .ticket import Ticket

if TYPE_CHECKING:
    from .nccl_ep import NcclEp


class Operation:
    """A send under way. The library reads descriptors, ids and rows again when it completes it, so all live here."""

    def __init__(self, what: str, handle: Any, stream: Any, keep: tuple[Any, ...]) -> None:
        self.what, self.handle, self.stream, self.keep = what, handle, stream, keep


@dataclass(frozen=True, slots=True, kw_only=True)
class LowLatencyState:
    """Ids and the handle; statuses on their way; the send; what arrived; how slots became expert rows."""

    mode: LowLatency
    lease: Lease
    ids: Tensor
    told: InFlight | None
    sent: InFlight | None = None
    operation: Operation | None = None
    results: tuple[Tensor, ...] = ()
    index: Tensor | None = None
    positions: Tensor | None = None
    bound: Tensor | None = None


class LowLatency(LibraryGroup):
    """A group of its own, rank-major, for at most max_tokens tokens a rank; the six stages under no_grad.

    Args:
        owner: the dispatcher.
        library: the module nccl.ep.
        communicator: of the library's own; the object takes it over.
        timeout_s: how long a kernel waits for a peer before it gives up.
    """

    def __init__(self, owner: NcclEp, library: Any, communicator: Any, timeout_s: float) -> None:
        self.owner, sizes = owner, owner.sizes
        self._last: Operation | None = None
        config = library.GroupConfig(
            algorithm=library.Algorithm.LOW_LATENCY,
            num_experts=sizes.num_local * sizes.num_ranks,
            max_dispatch_tokens_per_rank=sizes.max_tokens,
            max_token_bytes=sizes.low_latency_row * sizes.element_bytes,
            timeout_ns=int(timeout_s * 1e9),
        )
        super().__init__(library, communicator, sizes, config, owner.watchdog)
        self._allocate(owner.home)

    def _allocate(self, device: torch.device) -> None:
        """The first handle makes the group's buffers, on all ranks together; later ones fit into them."""
        with refusals("the buffers of the low-latency group"):
            self._bind(self.lease(), torch.full((1, self.sizes.top_k), NO_ROUTE, device=device))

    def _bind(self, lease: Lease, ids_TK: Tensor) -> None:
        ids, stream = self.library.Tensor(ids_TK), stream_of(ids_TK)
        if lease.box[0] is None:
            lease.box[0] = self._group.create_handle(self.library.Layout.RANK_MAJOR, ids, stream=stream)
        else:
            lease.box[0].update(ids, stream=stream)

    # the six stages

    def dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        """Number the rows; statuses travel."""
        ids_TK, weights_TK = library_routes(routing, self.sizes.num_local, self.sizes.num_local)
        self.announce(ticket, ids_TK, self.owner.status(routing))
        rows = pad(x_TH, max(x_TH.shape[0], 1), x_TH.shape[1])
        self.owner.pack(ticket, number_rows(rows, self.sizes.low_latency_row), weights_TK.contiguous())

    def announce(self, ticket: Ticket, ids_TK: Tensor, status: Tensor) -> None:
        """Tell the other ranks of this rank's status."""
        told = self.owner.tell(ticket, status)
        ticket.state = LowLatencyState(mode=self, lease=self.lease(), ids=ids_TK, told=told)

    def dispatch(self, ticket: Ticket) -> None:
        """Bind the routing and send rows and weights."""
        self.owner.read_statuses(ticket, ticket.state.told)
        state: LowLatencyState = ticket.state
        what = f"dispatch of {ticket.where}"
        x_TH, weights_TK = ticket.payload
        found: list[Operation] = []
        assert ticket.packed is not None, "dispatch without pack"

        def send() -> tuple[tuple[Tensor, ...], list[Any]]:
            results = self._room(x_TH, weights_TK)
            with self._operation(what, x_TH.device):
                self._complete_last()
                self._bind(state.lease, state.ids)
                found.append(self._send_rows(what, state, x_TH, weights_TK, results))
            return results, []

        sent = self.owner.comm(x_TH.device).launch(what, send, (x_TH, weights_TK), ticket.packed.mark)
        ticket.payload = ()
        ticket.state = replace(state, sent=sent, operation=found[0], results=sent.results)

    def _room(self, x_TH: Tensor, weights_TK: Tensor) -> tuple[Tensor, ...]:
        """Rows [R, C, H], weights and local ids [R, C, K], tokens of each rank [R]."""
        shape = (self.sizes.num_ranks, self.sizes.max_tokens)
        return (
            x_TH.new_empty(*shape, x_TH.shape[1]),
            weights_TK.new_empty(*shape, self.sizes.top_k),
            torch.empty(*shape, self.sizes.top_k, dtype=torch.int32, device=x_TH.device),
            torch.empty(self.sizes.num_ranks, dtype=torch.int32, device=x_TH.device),
        )

    def _send_rows(
        self, what: str, state: LowLatencyState, x: Tensor, weights: Tensor, results: tuple[Tensor, ...]
    ) -> Operation:
        lib = self.library
        rows, got, ids, tokens = map(lib.Tensor, results)
        inputs = lib.DispatchInputs(tokens=lib.Tensor(x), topk_weights=lib.Tensor(weights))
        outputs = lib.DispatchOutputs(tokens=rows, topk_weights=got, topk_idx=ids)
        info = lib.LayoutInfo(src_rank_counters=tokens, recv_topk_idx_kind=lib.ExpertIdKind.LOCAL)
        config = lib.DispatchConfig(send_only=1)
        handle, stream = state.lease.box[0], stream_of(x)
        handle.dispatch(inputs, outputs, layout_info=info, config=config, stream=stream)
        keep = (inputs, outputs, info, config, state.ids, state.lease)
        return self._under_way(Operation(what, handle, stream, keep))

    def dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        """Complete the send; rows in the order of the contract, through an index."""
        state: LowLatencyState = ticket.state
        self._arrive(state)
        inp, index, positions = arrange(state.results, self.sizes.hidden, self.sizes.num_local, self.owner.kernels)
        ticket.state = replace(
            state, sent=None, operation=None, results=(), index=index, positions=positions, bound=inp.offsets[-1:]
        )
        return inp

    def combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None:
        """Sum the rows of each slot in float32."""
        state: LowLatencyState = ticket.state
        assert state.index is not None and state.positions is not None, "combine before dispatch"
        slots = sum_rows(y_NH, state.index, state.positions, bound=state.bound, kernels=self.owner.kernels)
        shape = (self.sizes.num_ranks, self.sizes.max_tokens, self.sizes.low_latency_row)
        ticket.payload = (pad(slots, slots.shape[0], shape[2]).view(shape),)

    def combine(self, ticket: Ticket) -> None:
        """Send what the ranks' own experts made of each token."""
        state: LowLatencyState = ticket.state
        what = f"combine of {ticket.where}"
        (rows,) = ticket.payload
        found: list[Operation] = []

        def send() -> tuple[tuple[Tensor, ...], list[Any]]:
            y_TH = rows.new_empty(state.ids.shape[0], rows.shape[2])
            lib = self.library
            with self._operation(what, rows.device):
                self._complete_last()
                inputs, outputs = (
                    lib.CombineInputs(tokens=lib.Tensor(rows)),
                    lib.CombineOutputs(tokens=lib.Tensor(y_TH)),
                )
                config = lib.CombineConfig(send_only=1)
                handle, stream = state.lease.box[0], stream_of(rows)
                handle.combine(inputs, outputs, config=config, stream=stream)
                keep = (inputs, outputs, config, state.ids, state.lease)
                found.append(self._under_way(Operation(what, handle, stream, keep)))
            return (y_TH,), []

        sent = self.owner.comm(rows.device).launch(what, send, keep=(rows,))
        ticket.payload = ()
        ticket.state = replace(state, sent=sent, operation=found[0], results=sent.results)

    def combine_postprocess(self, ticket: Ticket) -> Tensor:
        """Complete the send; y [T, H]."""
        (y_TH,) = ticket.state.results
        self._arrive(ticket.state)
        return cut(y_TH, ticket.num_tokens, self.sizes.hidden)

    def close(self) -> None:
        """As the base, behind what is still under way."""
        if self._group is not None and not self.watchdog.broken:
            self._complete_last()
        super().close()

    # one send at a time

    def _under_way(self, operation: Operation) -> Operation:
        self._last = operation
        return operation

    def _complete_last(self) -> None:
        """On the stream of the send, which the library keeps to in any case."""
        if self._last is not None:
            operation, self._last = self._last, None
            with refusals(f"arrival of {operation.what}"):
                operation.handle.complete(stream=operation.stream)

    def _arrive(self, state: LowLatencyState) -> None:
        """Make the results of a send valid on the caller's stream."""
        sent, operation = state.sent, state.operation
        assert sent is not None and operation is not None, "nothing was sent"

        def complete() -> tuple[tuple[Tensor, ...], list[Any]]:
            if self._last is operation:
                self._complete_last()
            return (), []

        self.owner.comm(state.ids.device).launch(f"arrival of {sent.what}", complete).wait()
        sent.wait()

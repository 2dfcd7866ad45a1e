"""A communication as three autograd nodes, *pack*, *start* and *finish*.

    forward   pack: nothing     start: launch on the comm stream     finish: wait
    backward  finish: launch the transpose     start: nothing        pack: wait

Pack is created where the payload is made, start where the communication is issued, finish where its result is needed.
With one node for all, autograd runs the consumer of each communication's gradient right behind it and backward overlaps
nothing; with nodes of their own, the order of backward mirrors forward, and what was interleaved in forward is
interleaved in backward. Pack apart from start, because the host may issue other computation in between (it has counts
to read), and autograd runs the newest node first: a start that waited would wait before that computation's backward.
No hooks on foreign nodes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions

from ..alarm import alarm_of, find_alarm
from ..calls import Call, Kind
from ..errors import ProtocolError
from ..in_flight import InFlight, Mark
from ..order import order_of
from ..race import begin_late
from ..streams import CommStream, any_stream, is_async

Tensors = tuple[Tensor, ...]
# torch 2.13 renamed all_gather_into_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# the same of the group's own method, which is called without torch's wrapper
_all_to_all_of_group = getattr(dist.ProcessGroup, "all_to_all_single", None) or dist.ProcessGroup.alltoall_base
_OPTIONS = AllToAllOptions(), AllToAllOptions()
for _async_op, _options in enumerate(_OPTIONS):
    _options.asyncOp = bool(_async_op)
with torch.inference_mode(False):
    _anchor = torch.empty(0, requires_grad=True, device="cpu")  # what makes a node of every pack


class Transfer(Protocol):
    """A communication and its transpose. All ranks make every call, also with zero rows."""

    def forward(self, payload: Tensors) -> tuple[Tensors, list[Any]]:
        """Allocate the results and start the collectives; returns them with the work handles."""
        ...

    def backward(self, grads: Tensors) -> tuple[Tensors, list[Any]]:
        """The same for the gradients of the results."""
        ...

    def reduce(self, parts: Tensors) -> Tensors:
        """Local work behind the transpose, on the compute stream: gradients of the payload."""
        ...


class Packed:
    """What `pack` knows of a payload, and where its backward finds the flight.

    `flight` is set in backward alone: in forward the flight keeps the payload, which has the node of pack, which has
    this, and Python's collector does not see such a cycle.

    Attributes:
        has_node: gradients are recorded.
        mark: what the launch waits for; None: for all that was issued before it.
    """

    __slots__ = ("flight", "has_node", "mark")

    def __init__(self, has_node: bool) -> None:
        self.has_node = has_node
        self.mark: Mark | None = None
        self.flight: Flight | None = None


class Flight:
    """One transfer of one ticket. Holds tensors only between a launch and its wait."""

    def __init__(self, transfer: Transfer, comm: CommStream, what: str, packed: Packed | None) -> None:
        assert packed is not None, "start without pack"
        self.transfer = transfer
        self.packed = packed
        self._comm = comm
        self._what = what
        self._forward: InFlight | None = None
        self._backward: InFlight | None = None

    def check_packed(self) -> None:
        """Refuse a payload without the node whose backward waits."""
        if not self.packed.has_node:
            raise ProtocolError(
                f"{self._what}: gradients are recorded, but were not when the payload was packed, so backward would "
                "lose them; run all stages of a micro-batch with gradients on, or all with gradients off, also where "
                "an activation checkpoint runs some of them (use_reentrant=False)"
            )

    def launch_forward(self, payload: Tensors) -> Tensors:
        """Send the payload; the results are not valid yet."""
        assert all(t.is_contiguous() for t in payload), "a copy made now would be behind the mark"
        mark, self.packed.mark = self.packed.mark, None
        self._forward = self._comm.launch(self._what, lambda: self.transfer.forward(payload), keep=payload, mark=mark)
        self._tell(self._forward, self._what)
        return self._forward.results

    def wait_forward(self) -> None:
        """Make the results valid on the caller's stream."""
        assert self._forward is not None, "finish without start"
        self._forward.wait()
        self._forward = None

    def launch_backward(self, grads: Tensors) -> None:
        """Send the gradients of the results."""
        sent = tuple(g.contiguous() for g in grads)
        what = f"backward of {self._what}"
        self._backward = self._comm.launch(what, lambda: self.transfer.backward(sent), keep=sent)
        self._tell(self._backward, what)

    def _tell(self, launched: InFlight, what: str) -> None:
        if launched.alarm is not None:
            launched.alarm.launches.note(what)

    def wait_backward(self) -> Tensors:
        """Gradients of the payload."""
        assert self._backward is not None, "backward of pack before backward of finish"
        parts = self._backward.wait()
        self._backward = None
        return self.transfer.reduce(parts)


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Packed, anchor: Tensor, *payload: Tensor) -> Tensors:
        ctx.set_materialize_grads(False)
        ctx.packed = packed
        return payload

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Any, ...]:
        # no gradient is handed in: start's consumer sent it away, and the answer is what came back
        flight, ctx.packed.flight = ctx.packed.flight, None
        assert flight is not None, "backward of pack before backward of start"
        return (None, None, *flight.wait_backward())


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, *payload: Tensor) -> Tensors:
        ctx.set_materialize_grads(False)
        ctx.flight, ctx.num_sent = flight, len(payload)
        # Autograd hangs its node, which owns this flight, on the tensors returned. Were they the ones that the works in
        # flight hold, nobody could ever free a ticket abandoned here: Python's collector does not see that cycle.
        return tuple(t.detach() for t in flight.launch_forward(payload))

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        refuse_second_derivatives()
        ctx.flight.packed.flight = ctx.flight
        return (None,) * (1 + ctx.num_sent)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, *received: Tensor) -> Tensors:
        ctx.flight = flight
        flight.wait_forward()
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        ctx.flight.launch_backward(grads)
        return (None, *grads)


def refuse_second_derivatives() -> None:
    """Raise ProtocolError in a backward that records itself: what travels carries no graph, so it would be wrong."""
    if torch.is_grad_enabled():
        raise ProtocolError(
            "backward with create_graph=True reached a dispatcher: second derivatives do not travel between ranks; "
            "keep the MoE layer out of them"
        )


def pack(*payload: Tensor) -> tuple[Packed, Tensors]:
    """What is to be sent, for `start`, and what its `Flight` has to know.

    Where gradients are recorded at all, all nodes exist whatever the payload asks for: whether this rank's x needs a
    gradient is a local matter, and a backward that ran on some ranks only would leave the others waiting.
    """
    payload = tuple(t.contiguous() for t in payload)
    packed = Packed(has_node=torch.is_grad_enabled())
    if not packed.has_node:
        return packed, payload
    return packed, _Pack.apply(packed, _anchor, *payload)


def start(flight: Flight, *payload: Tensor) -> Tensors:
    """Launch what `pack` gave; the returned tensors are not valid before `finish`.

    Raises:
        ProtocolError: gradients are recorded here, but were not in `pack`.
    """
    if not torch.is_grad_enabled():
        return flight.launch_forward(payload)
    flight.check_packed()
    started: Tensors = _Start.apply(flight, *payload)
    return started


def finish(flight: Flight, *received: Tensor) -> Tensors:
    """Wait; returns the received tensors, valid on the caller's stream.

    Raises:
        ProtocolError: gradients are recorded here, but were not in `pack`.
    """
    if not torch.is_grad_enabled():
        flight.wait_forward()
        return received
    flight.check_packed()
    finished: Tensors = _Finish.apply(flight, *received)
    return finished


class AllToAllRows:
    """Rows [S, ...] to the ranks they are for, in rank order; its transpose is itself with the splits swapped.

    A buffer may be longer than its splits' sum: the rows behind are neither sent nor written, and nobody reads them.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, send: list[int], recv: list[int], send_rows: int, recv_rows: int
    ) -> None:
        self.group, self.send, self.recv = group, send, recv
        self.send_rows, self.recv_rows = send_rows, recv_rows

    def forward(self, payload: Tensors) -> tuple[Tensors, list[Any]]:
        """Start sending rows [send_rows, ...]; results [recv_rows, ...]."""
        return self._exchange(payload, self.send, self.recv, self.recv_rows)

    def backward(self, grads: Tensors) -> tuple[Tensors, list[Any]]:
        """Start sending gradients [recv_rows, ...] back; results [send_rows, ...]."""
        return self._exchange(grads, self.recv, self.send, self.send_rows)

    def reduce(self, parts: Tensors) -> Tensors:
        """Nothing to add up."""
        return parts

    def _exchange(self, tensors: Tensors, send: list[int], recv: list[int], rows: int) -> tuple[Tensors, list[Any]]:
        received, works = [], []
        num_sent, num_received = sum(send), sum(recv)
        for tensor in tensors:
            out = tensor.new_empty((rows, *tensor.shape[1:]))
            target = out if num_received == rows else out[:num_received]
            given = tensor if num_sent == tensor.shape[0] else tensor[:num_sent]
            works += all_to_all(target, given, recv, send, self.group)
            received.append(out)
        return tuple(received), works


class GatherRows:
    """All-gather of equally long [C, ...] blocks to [R*C, ...]; the transpose sums the ranks' gradients.

    The sum is a reduce-scatter, done as an equal all-to-all and a local sum in float32, rank ascending, rounded once:
    NCCL's own reduce-scatter adds bfloat16 in bfloat16, in an order that is the library's.
    """

    def __init__(self, group: dist.ProcessGroup | None, num_ranks: int, block: int) -> None:
        self.group, self.num_ranks, self.block = group, num_ranks, block

    def forward(self, payload: Tensors) -> tuple[Tensors, list[Any]]:
        """Start gathering blocks [C, ...]; results [R*C, ...]."""
        gathered, works = [], []
        for tensor in payload:
            out = tensor.new_empty((self.num_ranks * self.block, *tensor.shape[1:]))
            works += all_gather(out, tensor, self.group)
            gathered.append(out)
        return tuple(gathered), works

    def backward(self, grads: Tensors) -> tuple[Tensors, list[Any]]:
        """Start sending each rank the gradients [C, ...] of its block; results [R*C, ...], one part a rank."""
        even = [self.block] * self.num_ranks
        return AllToAllRows(self.group, even, even, sum(even), sum(even)).forward(grads)

    def reduce(self, parts: Tensors) -> Tensors:
        """Sum the ranks' parts."""
        return tuple(self._sum(part) for part in parts)

    def _sum(self, part: Tensor) -> Tensor:
        blocks = part.view(self.num_ranks, self.block, *part.shape[1:])
        wide = torch.float64 if part.dtype == torch.float64 else torch.float32
        total = blocks[0].to(wide)
        for block in blocks[1:]:
            total = total + block
        return total.to(part.dtype)


def all_to_all(
    out: Tensor, tensor: Tensor, recv: list[int], send: list[int], group: dist.ProcessGroup | None
) -> list[Any]:
    """Start an uneven all-to-all of rows; without a group a copy. Returns work handles (none on CUDA)."""
    order = order_of(group)
    if order is not None:
        order.note("all_to_all", tensor, out)
        order.compare_splits(send, recv)

    def begin(out: Tensor) -> list[Any]:
        if group is None or group.size() == 1:
            out.copy_(tensor)
            return []
        _note(group, "all_to_all", tensor, send, recv)
        apart = not tensor.is_cuda
        work = _all_to_all_single(_raw(out), _raw(tensor), recv, send, group=group, async_op=apart)
        return [] if work is None else [work]

    return begin(out) if out.is_cuda else begin_late(out, begin, group)


def all_gather(out: Tensor, tensor: Tensor, group: dist.ProcessGroup | None) -> list[Any]:
    """Start an all-gather of equal blocks; without a group a copy. Returns work handles (none on CUDA)."""
    order = order_of(group)
    if order is not None:
        order.note("all_gather", tensor, out)

    def begin(out: Tensor) -> list[Any]:
        if group is None or group.size() == 1:
            out.copy_(tensor)
            return []
        _note(group, "all_gather", tensor, tensor.shape[:1], tensor.shape[:1])
        with _own_error():
            work = _all_gather_single(_raw(out), _raw(tensor), group=group, async_op=is_async(tensor.device))
        return [] if work is None else [work]

    return begin_late(out, begin, group)


def _all_to_all_single(
    out: Tensor, tensor: Tensor, recv: list[int], send: list[int], *, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    """`torch.distributed.all_to_all_single` without what it looks up and checks at every call."""
    work = _all_to_all_of_group(group, out, tensor, recv, send, _OPTIONS[async_op])
    if async_op or work is None:
        return work
    work.wait()  # on the comm stream: holds up nobody
    return None


@contextlib.contextmanager
def _own_error() -> Iterator[None]:
    """What a collective raised: torch, about to log it, raises another error over a group it does not know (a twin)."""
    try:
        yield
    except ValueError as err:
        if err.__context__ is not None:
            raise err.__context__ from None
        raise


def start_call(
    group: dist.ProcessGroup, call: Call | None, device: torch.device, payload: Tensor | None = None
) -> InFlight:
    """Start a collective for its own sake, or to be the counterpart of another rank's.

    Args:
        group: of the collective.
        call: None: nothing is started, and only the end of what was is looked for.
        device: of this rank's communication.
        payload: what is sent, uint8; None: all bits set.

    Returns:
        what is in flight: what is received, and what is sent.
    """

    def start_it() -> tuple[Tensors, list[Any]]:
        if call is None:
            return (), []
        sent = payload
        if sent is None:
            sent = torch.full((sum(call.send),), 255, dtype=torch.uint8, device=device)
        is_gather = call.kind == "all_gather"
        received = sent.new_empty(sum(call.recv) * (group.size() if is_gather else 1))
        recv, send = list(call.recv), list(call.send)
        with _own_error():
            if is_gather:
                work = _all_gather_single(received, sent, group=group, async_op=is_async(device))
            else:
                work = _all_to_all_single(received, sent, recv, send, group=group, async_op=is_async(device))
        return (received, sent), [] if work is None else [work]

    if device.type != "cuda":
        return any_stream(device, group).issue("meeting of all ranks", start_it)
    with torch.cuda.device(device):  # another thread's current device is another
        return any_stream(device, group).issue("meeting of all ranks", start_it)


def _note(group: dist.ProcessGroup, kind: Kind, tensor: Tensor, send: Sequence[int], recv: Sequence[int]) -> None:
    alarm, device = find_alarm(group) or alarm_of(group, start_call), tensor.device
    row_bytes = tensor.element_size() * math.prod(tensor.shape[1:])
    alarm.note(group, Call(kind, "cuda" if tensor.is_cuda else "cpu", row_bytes, send, recv), device)


def _raw(tensor: Tensor) -> Tensor:
    # rows as bytes where a row has more than one element: moving needs no arithmetic type, and not every
    # process group on CPU offers every floating type
    if tensor.is_cuda or tensor.dim() == 1 or tensor.element_size() == 1:
        return tensor
    return tensor.view(torch.uint8)

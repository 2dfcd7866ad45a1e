"""The collectives of torch.distributed that move rows, each noted for the alarm of its group.

They start and return; whoever calls them on the comm stream, or keeps the work handles, waits. In a group of one rank,
or none, rows have nowhere to go: those in memory that `room_for` gave are there already, others are copied.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions

from ..alarm_registry import alarm_of, find_alarm
from ..calls import Call, Kind
from ..in_flight import InFlight
from ..order import order_of
from ..race import begin_late, race_of
from ..streams import any_stream, is_async

Tensors = tuple[Tensor, ...]
# torch 2.13 renamed all_gather_into_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# the same of the group's own method, which is called without torch's wrapper
_all_to_all_of_group = getattr(dist.ProcessGroup, "all_to_all_single", None) or dist.ProcessGroup.alltoall_base
_OPTIONS = AllToAllOptions(), AllToAllOptions()
for _async_op, _options in enumerate(_OPTIONS):
    _options.asyncOp = bool(_async_op)


def room_for(num_rows: int, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Memory for `num_rows` rows [num_rows, ...] that a collective brings where `tensor` goes.

    With nobody else in the group it is where the first rows of `tensor` are, as far as these are enough; but not under
    MOE_EP_RACE, where rows arrive.
    """
    if _is_alone(group) and num_rows <= tensor.shape[0] and race_of(group) is None:
        return tensor if num_rows == tensor.shape[0] else tensor[:num_rows]
    return tensor.new_empty((num_rows, *tensor.shape[1:]))


def _is_alone(group: dist.ProcessGroup | None) -> bool:
    return group is None or group.size() == 1


def _are_there(out: Tensor, tensor: Tensor, group: dist.ProcessGroup | None) -> bool:
    return _is_alone(group) and out.data_ptr() == tensor.data_ptr()


def all_to_all(
    out: Tensor, tensor: Tensor, recv: list[int], send: list[int], group: dist.ProcessGroup | None
) -> list[Any]:
    """Start an uneven all-to-all of rows into `out`. Returns work handles (none on CUDA)."""
    order = order_of(group)
    if order is not None:
        order.note("all_to_all", tensor, out)
        order.compare_splits(send, recv)
    if _are_there(out, tensor, group):
        return []

    def begin(out: Tensor) -> list[Any]:
        if group is None or _is_alone(group):
            out.copy_(tensor)
            return []
        _note(group, "all_to_all", tensor, send, recv)
        apart = not tensor.is_cuda
        work = _all_to_all_single(_raw(out), _raw(tensor), recv, send, group=group, async_op=apart)
        return [] if work is None else [work]

    return begin(out) if out.is_cuda else begin_late(out, begin, group)


def all_gather(out: Tensor, tensor: Tensor, group: dist.ProcessGroup | None) -> list[Any]:
    """Start an all-gather of equal blocks into `out`. Returns work handles (none on CUDA)."""
    order = order_of(group)
    if order is not None:
        order.note("all_gather", tensor, out)
    if _are_there(out, tensor, group):
        return []

    def begin(out: Tensor) -> list[Any]:
        if group is None or _is_alone(group):
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
    alarm.watched.note(group, Call(kind, "cuda" if tensor.is_cuda else "cpu", row_bytes, send, recv), device)


def _raw(tensor: Tensor) -> Tensor:
    # rows as bytes where a row has more than one element: moving needs no arithmetic type, and not every
    # process group on CPU offers every floating type
    if tensor.is_cuda or tensor.dim() == 1 or tensor.element_size() == 1:
        return tensor
    return tensor.view(torch.uint8)

"""Stacks of layers as schedules: forward, backward, and counts on another stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moe_ep.schedule import schedule, stack, transpose
from moe_ep.schedule_steps import Kind, Step, Stream

FAR: tuple[Kind, ...] = (Kind.RESOLVE, Kind.ATTENTION)


def forward_of(
    num: int,
    outside: tuple[Kind, ...] = (),
    dense: tuple[bool, ...] = (False, False, True, False),
    *,
    host_ahead: bool = False,
) -> tuple[Step, ...]:
    """A stack whose lanes are used again and whose third layer is dense."""
    return stack([schedule(num, dense=d, outside=outside, host_ahead=host_ahead) for d in dense])


def both_ways(
    num: int,
    outside: tuple[Kind, ...] = (),
    dense: tuple[bool, ...] = (False, False, True, False),
    *,
    host_ahead: bool = False,
) -> list[Step]:
    """Forward and backward of it."""
    forward = forward_of(num, outside, dense, host_ahead=host_ahead)
    return [*forward, *transpose(forward)]


def on_comm_stream(steps: Sequence[Step]) -> list[Step]:
    """The same with the counts on the comm stream."""
    return [replace(s, stream=Stream.COMM) if s.stream is Stream.SIDE else s for s in steps]


def place_of(steps: Sequence[Step], kind: Kind, micro_batch: int, layer: int, backward: bool = False) -> int:
    return next(i for i, s in enumerate(steps) if s.key == (kind, micro_batch, layer, backward))

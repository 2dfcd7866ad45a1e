"""A step in which something breaks on some ranks, and what every rank then has to raise."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_ep import DominoStack, PeerError, moe_layers
from moe_ep.step_end import raise_on_all_ranks
from tests.ranks.small_stack import inputs, loss_of

BOUND_S = 5.0  # beyond the point where the others wait; the group's timeout is ten times that, and more
TEXT = "the experts of one rank broke"
Spoil = Callable[[Tensor], Tensor]


class BreakBackward(torch.autograd.Function):
    """Identity whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ZeroDivisionError(TEXT)


def break_at(module: nn.Module, call: int, backward: bool) -> Any:
    """A hook that lets the `call`-th call of a module fail; `remove()` ends it."""
    calls = itertools.count()

    def hook(module: nn.Module, args: Any, y: Tensor) -> Tensor | None:
        if next(calls) != call:
            return None
        if backward:
            return BreakBackward.apply(y)
        raise ZeroDivisionError(TEXT)

    return module.register_forward_hook(hook)


def step(model: DominoStack, rank: int, num: int, group: dist.ProcessGroup, spoil: Spoil | None = None) -> list[Any]:
    """Outputs and gradients of one step; `spoil` may do something to the loss."""
    xs = inputs(rank, num)
    for parameter in model.parameters():
        parameter.grad = None
    with raise_on_all_ranks(group):
        ys, auxes = model(xs)
        loss = torch.stack([loss_of(y, said) for y, said in zip(ys, auxes, strict=True)]).sum()
        (loss if spoil is None else spoil(loss)).backward()
    return [[y.detach() for y in ys], [x.grad for x in xs], [p.grad for p in model.parameters()]]


def all_raise(
    group: dist.ProcessGroup, act: Callable[[], Any], victims: dict[int, type[Exception]], *texts: str
) -> None:
    """Each victim raises its own error, all others a PeerError with these texts, in time."""
    started = time.monotonic()
    victim = victims.get(group.rank(), PeerError)
    with pytest.raises(victim) as caught:
        act()
    assert time.monotonic() - started < BOUND_S
    if group.rank() not in victims:
        assert type(caught.value) is PeerError
        for text in (f"rank {min(victims)} failed in ", *texts):
            assert text in str(caught.value), str(caught.value)
    else:
        assert not getattr(caught.value, "__notes__", None), "the group is given up"


def free(model: nn.Module) -> None:
    gc.collect()  # of an exception with its frames
    gc.freeze()  # the next one is quicker
    lanes = moe_layers(model)[0].dispatcher.lanes
    assert lanes.num_free == lanes.num_lanes

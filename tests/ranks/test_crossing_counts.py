"""Attention outside of a recomputed region, on a host that runs ahead: counts travel before earlier ones are read.

A rank whose router fails launches nothing more; the others do, until they read what it announced. All must stop at one
launch, or every later one is shifted.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import CapacityError, DominoStack, NonFiniteError, PeerError, raise_on_all_ranks, recompute_region
from moe_ep.alarm import PERIOD_S
from moe_ep.in_flight import InFlight
from moe_ep.schedule import schedule
from moe_ep.schedule_steps import Kind
from moe_ep.testing.ranks import RankPool
from tests.ranks.race_runs import host_ahead
from tests.ranks.small_stack import H, inputs, loss_of, same, small_stack

NUM = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=60) as ranks:
        yield ranks


def step(model: DominoStack, xs: list[Tensor], group: dist.ProcessGroup) -> list[Any]:
    model.zero_grad()
    with raise_on_all_ranks(group):
        ys, auxes = model(xs)
        torch.stack([loss_of(y, said) for y, said in zip(ys, auxes, strict=True)]).sum().backward()
    return [p.grad for p in model.parameters()]


def fails(x: Tensor) -> Tensor:
    raise ZeroDivisionError


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], type[Exception]]] = {
    "router": (fails, ZeroDivisionError),
    "not finite": (lambda x: x * math.nan, NonFiniteError),
    "too many": (lambda x: x, CapacityError),
}


@contextlib.contextmanager
def late(is_late: bool) -> Iterator[None]:
    """Counts are read so late that the other rank has read them, raised and been heard."""

    def waiting(call: Any) -> Any:
        def wait(flight: InFlight) -> Any:
            if flight.what.startswith("exchange of "):
                time.sleep(1.5 * PERIOD_S)
            return call(flight)

        return wait

    with contextlib.ExitStack() as patches:
        for name in ("wait", "wait_on_host") if is_late else ():
            patches.enter_context(mock.patch.object(InFlight, name, waiting(getattr(InFlight, name))))
        yield


def body(group: dist.ProcessGroup, rank: int, dispatcher: str, name: str, is_late: bool = False) -> None:
    spoil, kind = FAULTS[name]
    model = small_stack(group, dict(dispatcher=dispatcher), dense=(False, False))
    layer: Any
    for layer in model.layers:
        layer.recompute_in(recompute_region, attention=False)
    with host_ahead(True):
        want = step(model, inputs(0, NUM), group)
        for micro_batch in range(NUM):
            xs, calls = inputs(0, NUM), iter(range(NUM))
            if name == "too many" and rank == 1:
                xs[micro_batch] = torch.ones(13, H)

            def hook(module: Any, args: Any, calls: Any = calls, at: int = micro_batch) -> Any:
                return (spoil(args[0]), *args[1:]) if next(calls) == at else None

            hooked = model.layers[0].moe.router.register_forward_pre_hook(hook) if rank == 1 else None  # type: ignore[union-attr]
            raised = pytest.raises(kind if rank == 1 else PeerError, match="" if rank == 1 else "rank 1 ")
            with raised, late(is_late and rank == 1):
                step(model, xs, group)
            if hooked is not None:
                hooked.remove()
            same(step(model, inputs(0, NUM), group), want, f"the step after micro-batch {micro_batch}")


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("dispatcher", ["all2all", "agrs"])
def test_a_fault_that_others_read_later(pool: RankPool, dispatcher: str, name: str) -> None:
    pool.run(body, dispatcher, name)


@pytest.mark.parametrize("dispatcher", ["all2all", "agrs"])
def test_a_rank_that_hears_of_its_own_fault_first_from_another_raises_its_own(pool: RankPool, dispatcher: str) -> None:
    pool.run(body, dispatcher, "not finite", True)


@pytest.mark.parametrize("num", [1, 2, 3])
def test_which_orders_let_counts_cross(num: int) -> None:
    outside = (Kind.RESOLVE, Kind.ATTENTION)
    assert schedule(num, outside=outside, host_ahead=True).counts_cross == (num > 1)
    assert not schedule(num, outside=outside).counts_cross
    assert not schedule(num, host_ahead=True).counts_cross and not schedule(num).counts_cross

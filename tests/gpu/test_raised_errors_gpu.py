"""One rank's experts raise on a GPU, in forward or backward: all ranks raise in time, over NCCL and over `direct`."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import DominoStack, PeerError, moe_layers
from moe_ep.step_end import raise_on_all_ranks
from moe_ep.testing.ranks import RankPool, run_ranks
from tests.ranks.broken_steps import TEXT, all_raise, break_at
from tests.ranks.small_stack import H, inputs, same, small_stack
from tests.ranks.test_raised_errors import Case, cases

pytestmark = pytest.mark.gpu(2)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=120) as ranks:
        yield ranks


def model_of(group: dist.ProcessGroup, dispatcher: str) -> DominoStack:
    return small_stack(group, dict(dispatcher=dispatcher, experts="loop"), dense=(False,) * 3).to("cuda")


def step(model: DominoStack, rank: int, num: int, group: dist.ProcessGroup) -> list[Any]:
    """Outputs and gradients of one step."""
    xs = [x.detach().to("cuda").requires_grad_() for x in inputs(rank, num)]
    model.zero_grad()
    weight = torch.arange(1.0, H + 1, device="cuda")
    with raise_on_all_ranks(group):
        ys, auxes = model(xs)
        losses = [
            (y.square() * weight).sum() + sum(aux.loss for aux in said) for y, said in zip(ys, auxes, strict=True)
        ]
        torch.stack(losses).sum().backward()
    found: list[list[Tensor | None]] = [list(ys), [x.grad for x in xs], [p.grad for p in model.parameters()]]
    return [[t if t is None else t.detach().cpu() for t in each] for each in found]


def body_cases(group: dist.ProcessGroup, rank: int, chosen: list[Case]) -> None:
    first = chosen[0]
    model = model_of(group, first.dispatcher)
    want = step(model_of(group, first.dispatcher), rank, first.num, group)
    act = functools.partial(step, model, rank, first.num, group)
    for case in chosen:
        layer: Any = model.layers[case.layer]
        hook = break_at(layer.moe.experts, case.micro_batch, case.backward) if rank == 1 else None
        all_raise(group, act, {1: ZeroDivisionError}, f"ZeroDivisionError: {TEXT}")
        if hook is not None:
            hook.remove()
        gc.collect()
        lanes = moe_layers(model)[0].dispatcher.lanes
        assert lanes.num_free == lanes.num_lanes
        same(act(), want, f"the step after {case}")


@pytest.mark.parametrize("dispatcher", ["all2all", "agrs"])
@pytest.mark.parametrize("num", [1, 2, 4])
def test_every_rank_raises_and_the_next_step_is_as_if_new(pool: RankPool, dispatcher: str, num: int) -> None:
    pool.run(body_cases, cases(dispatcher, num))


def body_given_up(group: dist.ProcessGroup, rank: int, backward: bool) -> str:
    """What `direct` has started nobody can make up for: every rank raises, and the group serves no more."""
    model = model_of(group, "direct")
    step(model, rank, 2, group)
    layer: Any = model.layers[1]
    if rank == 1:
        break_at(layer.moe.experts, 0, backward)
    with pytest.raises((ZeroDivisionError, PeerError)) as caught:
        step(model, rank, 2, group)
    with pytest.raises(PeerError, match="serves no more"):
        step(model, rank, 2, group)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("backward", [False, True])
def test_every_rank_raises_over_peer_memory(backward: bool) -> None:
    first, second = run_ranks(body_given_up, 2, backward, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=60)
    # the device's own timeout is the group's, which is longer than what the ranks have here
    assert first.startswith("PeerError: rank 1 failed in ") and TEXT in first
    assert second == f"ZeroDivisionError: {TEXT}"

"""A rank that fails or differs while copies are in flight: all ranks raise, slots come back, the next step is new."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_ep import DominoStack, PeerError, ProtocolError, close_dispatchers, moe_layers, raise_on_all_ranks
from moe_ep.replica import runtime
from moe_ep.replica.transport import SlotBuffers
from moe_ep.testing.ranks import RankPool
from tests.ranks.broken_steps import all_raise, break_at, step
from tests.ranks.small_stack import inputs, loss_of, same, small_stack

ON: dict[str, Any] = dict(replica=dict(slots=2))
JOINT: dict[str, Any] = dict(replica=dict(slots=2, joint=True))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120) as ranks:
        yield ranks


def stack(group: dist.ProcessGroup, changes: dict[str, Any]) -> DominoStack:
    return small_stack(group, changes, dense=(False, False))


def returned(model: nn.Module) -> None:
    """Slots are free, and lanes of the dispatcher."""
    moe = moe_layers(model)[0]
    assert moe.replicas is not None and moe.replicas.lanes
    assert all(lane.holder is None for lane in moe.replicas.lanes)
    moe.replicas.check_returned()


# what breaks on one rank: which module, at which call, in backward
PIECES: dict[str, tuple[Callable[[Any], nn.Module], int, bool]] = {
    "experts": (lambda layers: layers[1].moe.experts, 1, False),
    "experts, backward": (lambda layers: layers[1].moe.experts, 0, True),
    "attention": (lambda layers: layers[1].mix, 1, False),
    "attention, backward": (lambda layers: layers[1].mix, 1, True),
}


def body_piece(group: dist.ProcessGroup, rank: int, changes: dict[str, Any]) -> None:
    want = step(stack(group, changes), rank, 2, group)
    model = stack(group, changes)
    act = functools.partial(step, model, rank, 2, group)
    for name, (find, call, backward) in PIECES.items():
        hook = break_at(find(model.layers), call, backward) if rank == 1 else None
        all_raise(group, act, {1: ZeroDivisionError}, "ZeroDivisionError")
        if hook is not None:
            hook.remove()
        same(act(), want, f"the step after {name}")
        returned(model)


@pytest.mark.parametrize("changes", [ON, JOINT], ids=["alone", "together"])
def test_the_step_behind_an_exception_on_one_rank_is_as_if_new(pool: RankPool, changes: dict[str, Any]) -> None:
    pool.run(body_piece, changes)


def body_within(group: dist.ProcessGroup, rank: int) -> None:
    """What only this rank may run out of, between the router and the dispatcher."""
    want = step(stack(group, ON), rank, 1, group)
    for name in ("make_plans", "reroute"):
        model = stack(group, ON)
        planted = mock.patch.object(runtime, name, side_effect=MemoryError("no room"))
        layer = moe_layers(model)[0]
        if rank == 1:
            planted.start()
        all_raise(group, lambda: layer(inputs(rank, 1)[0]), {1: MemoryError}, "layer 0, micro-batch 0 (replicas): ")  # noqa: B023
        mock.patch.stopall()
        same(step(model, rank, 1, group), want, f"the step after {name}")
        returned(model)


def test_an_exception_where_one_rank_plans_is_raised_by_all(pool: RankPool) -> None:
    pool.run(body_within)


def body_kept(group: dist.ProcessGroup, rank: int) -> None:
    """Whoever catches what backward raised may still have the graph when the next step begins."""
    want = step(stack(group, ON), rank, 1, group)
    model, kept = stack(group, ON), []
    for _ in range(2):
        (y,), (said,) = model(inputs(rank, 1))
        kept.append(loss_of(y, said))
        with pytest.raises(ProtocolError, match="second derivatives"):
            kept[-1].backward(create_graph=True)
    same(step(model, rank, 1, group), want, "the step after")
    returned(model)


def test_a_graph_that_is_kept_behind_a_failed_backward_keeps_no_slots(pool: RankPool) -> None:
    pool.run(body_kept)


def body_held(group: dist.ProcessGroup, rank: int) -> None:
    """Rank 1 keeps what rank 0 drops: the experts of that micro-batch never run."""
    close_dispatchers(group)  # other tests have made slots for two micro-batches
    want = step(stack(group, ON), rank, 1, group)
    model = stack(group, ON)
    layer, (x,) = moe_layers(model)[0], inputs(rank, 1)
    kept: list[Any] = [layer.launch_dispatch(x)]
    if rank == 0:
        kept.clear()
    all_raise(group, lambda: layer(x), {1: ProtocolError}, "no replica slots are free: layer 0, micro-batch 0 holds")
    kept.clear()
    same(step(model, rank, 1, group), want, "the step after")
    returned(model)


def test_slots_that_one_rank_keeps_stop_all_ranks(pool: RankPool) -> None:
    pool.run(body_held)


def body_closed(group: dist.ProcessGroup, rank: int) -> None:
    layer = moe_layers(stack(group, ON))[0]
    layer(inputs(rank, 1)[0])
    close_dispatchers(group)
    with pytest.raises(ProtocolError, match="experts were to be copied behind a closed all2all dispatcher"):
        layer(inputs(rank, 1)[0])


def test_a_layer_whose_dispatcher_is_closed_says_so(pool: RankPool) -> None:
    pool.run(body_closed)


def body_left_out(group: dist.ProcessGroup, rank: int) -> None:
    """A rank without a loss: the other one waits for weights and gradients that never come."""
    want = step(stack(group, ON), rank, 1, group)
    model = stack(group, ON)
    with pytest.raises(PeerError, match="All ranks take layers, micro-batches"), raise_on_all_ranks(group):
        (y,), (said,) = model(inputs(rank, 1))
        if rank == 0:
            loss_of(y, said).backward()
    same(step(model, rank, 1, group), want, "the step after")
    returned(model)


def test_a_rank_without_a_backward_is_named(pool: RankPool) -> None:
    pool.run(body_left_out)


def body_frozen(group: dist.ProcessGroup, rank: int) -> tuple[float, int]:
    """Experts of one rank are frozen; their copies, and those that it holds of others, take part all the same."""
    worst, copies = 0.0, 0
    for frozen in (0, 1):
        grads = []
        for changes in (ON, {}):
            model = stack(group, changes)
            for layer in moe_layers(model):
                layer.experts.requires_grad_(rank != frozen)
            with raise_on_all_ranks(group):
                (y,), (said,) = model(inputs(rank, 1))
                loss_of(y, said).backward()
            copies += int(sum(aux.replicas for aux in said))
            grads.append([p.grad for p in model.parameters() if p.requires_grad])
            if changes:
                returned(model)
        for ours, theirs in zip(*grads, strict=True):
            worst = max(worst, float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6)))
    return worst, copies


def test_experts_may_be_frozen_on_some_ranks(pool: RankPool) -> None:
    for worst, copies in pool.run(body_frozen):
        assert worst < 1e-5 and copies > 0


def body_copied(group: dist.ProcessGroup, rank: int) -> None:
    model = stack(group, ON)
    want = step(model, rank, 1, group)
    twin = copy.deepcopy(model)
    assert moe_layers(twin)[0].replicas is moe_layers(model)[0].replicas
    same(step(twin, rank, 1, group), want, "a copy")
    with pytest.raises(ProtocolError, match="cannot be pickled"):
        pickle.dumps(moe_layers(model)[0].replicas)


def test_a_model_with_replicas_can_be_copied(pool: RankPool) -> None:
    """As weight averages are made."""
    pool.run(body_copied)


def body_float64(group: dist.ProcessGroup, rank: int) -> float:
    grads = []
    for changes in (ON, {}):
        model = stack(group, changes | dict(dtype="float64", experts="loop")).double()
        (y,), (said,) = model([x.detach().double() for x in inputs(rank, 1)])
        loss_of(y, said).backward()
        grads.append([p.grad for p in moe_layers(model)[1].experts.parameters()])
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*grads, strict=True))


def test_float64_stays_float64(pool: RankPool) -> None:
    assert max(pool.run(body_float64)) < 1e-13
    like = [torch.zeros(1, 2, 2, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
    assert [grad.dtype for grad in SlotBuffers(1, like).grads] == [torch.float32, torch.float32, torch.float64]

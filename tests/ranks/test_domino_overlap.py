"""Domino hides communication: slow collectives on a thread of their own, computation that lasts, gloo ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from moe_ep import (
    Pending,
    moe_layers,
)
from moe_ep.domino import DominoStack
from moe_ep.testing.ranks import RankPool
from tests.ranks.small_stack import inputs, loss_of, slow_collectives, small_stack

DELAY_S, NAP_S = 0.05, 0.1
LAYERS = (False, False)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120) as ranks:
        yield ranks


def timed(model: DominoStack, groups: list[list[torch.Tensor]]) -> tuple[float, float, int, int]:
    """Seconds of forward and of backward of all groups; collectives in each."""
    forward_s = backward_s = 0.0
    with slow_collectives(DELAY_S) as works:
        forward = backward = 0
        for xs in groups:
            begin, seen = time.perf_counter(), len(works)
            ys, auxes = model(xs)
            losses = torch.stack([loss_of(y, said) for y, said in zip(ys, auxes, strict=True)]).sum()
            middle, launched = time.perf_counter(), len(works)
            losses.backward()
            backward_s += time.perf_counter() - middle
            forward_s += middle - begin
            forward += launched - seen
            backward += len(works) - launched
    return forward_s, backward_s, forward, backward


def body_overlap(group: dist.ProcessGroup, rank: int) -> tuple[float, float]:
    """Hidden share of the injected time, forward and backward."""
    model = small_stack(group, dense=LAYERS)
    for layer in model.layers:
        layer.log, layer.nap_s = [], NAP_S  # type: ignore[assignment]
    xs = inputs(rank, 2)
    model(xs)  # whatever the first call sets up is no part of the figures
    serial = timed(model, [[x] for x in xs])
    split = timed(model, [xs])
    per_layer = 2 * len(LAYERS)  # micro-batches times layers
    # counts, rows, weights and results one way each; gradients of results, rows and weights
    assert serial[2:] == split[2:] == (4 * per_layer, 3 * per_layer)
    injected = serial[2] * DELAY_S, serial[3] * DELAY_S
    return (serial[0] - split[0]) / injected[0], (serial[1] - split[1]) / injected[1]


def test_two_micro_batches_hide_communication(pool: RankPool) -> None:
    for forward, backward in pool.run(body_overlap):
        assert forward >= 0.4, "forward"
        assert backward >= 0.4, "backward"


def body_unfinished(group: dist.ProcessGroup, rank: int) -> list[bool]:
    """Whether the last collective was over: when the layer returned, and after its output was resolved."""
    model = small_stack(group, dense=(False,))
    xs = inputs(rank, 2)
    with slow_collectives(0.1) as works:
        pending, _ = model.layers[0]([Pending(base=x) for x in xs])
        ended = [works[-1].future.done()]
        for output in pending:
            output.resolve()
        return [*ended, works[-1].future.done()]


def test_a_layer_returns_before_its_last_combine_is_over(pool: RankPool) -> None:
    assert pool.run(body_unfinished) == [[False, True]] * 2


def body_counts(group: dist.ProcessGroup, rank: int, dispatcher: str) -> tuple[bool, bool]:
    """Whether micro-batch 0's rows had arrived when micro-batch 1's were launched, and at the end."""
    (layer,) = moe_layers(small_stack(group, {"dispatcher": dispatcher}, dense=(False,)))
    with slow_collectives(0.5, 0.01) as works:
        first = layer.launch_dispatch(inputs(rank, 2)[0])
        rows = works[1]
        second = layer.launch_dispatch(inputs(rank, 2)[1], micro_batch=1)
        early = rows.future.done()
        for flight in (first, second):
            layer.compute(flight)
        return early, rows.future.done()


@pytest.mark.parametrize("dispatcher", ["all2all", "agrs"])
def test_counts_do_not_stand_in_line_behind_rows(pool: RankPool, dispatcher: str) -> None:
    assert pool.run(body_counts, dispatcher) == [(False, True)] * 2

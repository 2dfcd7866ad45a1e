"""MOE_EP_DEBUG: ranks that communicate in different orders say so instead of mixing rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep import (
    DispatchConfig,
    DominoStack,
    PeerError,
    build_dispatcher,
    close_dispatchers,
    domino,
    moe_layers,
    raise_on_all_ranks,
)  # fmt: skip
from moe_ep.debug import debug
from moe_ep.order import RING, order_of
from moe_ep.schedule import Schedule, schedule
from moe_ep.schedule_steps import Kind
from moe_ep.testing.ranks import RankPool
from tests.ranks.debug_runs import checking
from tests.ranks.race_runs import host_ahead, run_both_ways
from tests.ranks.small_stack import inputs, loss_of, small_stack

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=90) as ranks:
        yield ranks


def body_right(group: dist.ProcessGroup, rank: int, dispatcher: str, ahead: bool = False) -> list[str]:
    """The same bits; what was noted."""
    with host_ahead(ahead):
        return run_right(group, rank, dispatcher)


def run_right(group: dist.ProcessGroup, rank: int, dispatcher: str) -> list[str]:
    want = run_both_ways(small_stack(group, {"dispatcher": dispatcher}), rank, 2, CPU)
    with checking(group) as said:
        model = small_stack(group, {"dispatcher": dispatcher}, dense=(False,))
        run_both_ways(model, rank, 2, CPU)
        order = order_of(group)
        assert order is not None
        lines = [str(record) for record in order.records]
        got = run_both_ways(small_stack(group, {"dispatcher": dispatcher}), rank, 2, CPU)
        for _ in range(4):
            run_both_ways(model, rank, 2, CPU)
        assert len(order.records) == RING < order.num_launches, "a bounded number is kept"
        assert "fails" not in said.getvalue()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert order_of(group) is None, "closed with its dispatchers"
    return lines


@pytest.mark.parametrize("ahead", [False, True])
def test_a_run_in_order_is_noted_and_not_changed(pool: RankPool, ahead: bool) -> None:
    """One order of communication, whatever the host issues in between."""
    for rank, lines in enumerate(pool.run(body_right, "all2all", ahead)):
        assert [line.split(" [")[0] for line in lines] == [
            f"{number}: {what} of layer 0, micro-batch {i}"
            for number, (what, i) in enumerate([
                ("exchange of counts", 0), ("dispatch", 0), ("exchange of counts", 1), ("dispatch", 1),
                ("combine", 0), ("combine", 1), ("backward of combine", 1), ("backward of combine", 0),
                ("backward of dispatch", 1), ("backward of dispatch", 0),
            ])
        ]  # fmt: skip
        assert "[dispatch_preprocess, group moe_ep counts] sends int64 [" in lines[0]
        assert lines[0].endswith("all_to_all int64 [2, 7] to int64 [2, 7]")
        sent = (8, 0)[rank]  # 4 tokens with two routes each, and none
        assert f"sends float32 [{sent}, 16], float32 [{sent}]: all_to_all float32 [{sent}, 16] to float32 [" in lines[1]
        assert lines[1].count("all_to_all") == 2, "rows and weights"
        assert "[backward, " in lines[-1]


def test_gathered_ids_are_noted(pool: RankPool) -> None:
    lines = pool.run(body_right, "agrs")[0]
    assert "exchange of ids of layer 0, micro-batch 0 [dispatch_preprocess, group moe_ep counts]" in lines[0]
    assert "all_gather float32 [12, 16] to float32 [24, 16]" in lines[1]


def swapped(kind: Kind) -> Any:
    """`schedule`, with the two micro-batches' steps of a kind in each other's place."""

    def make(num: int, **options: Any) -> Schedule:
        plan = schedule(num, **options)
        steps = list(plan.steps)
        a, b = (i for i, step in enumerate(steps) if step.key.kind is kind)
        steps[a], steps[b] = steps[b], steps[a]
        return replace(plan, steps=tuple(steps))

    return make


def both_losses(model: DominoStack, rank: int) -> list[torch.Tensor]:
    ys, auxes = model(inputs(rank, 2))
    return [loss_of(y, said) for y, said in zip(ys, auxes, strict=True)]


def body_combines(group: dist.ProcessGroup, rank: int) -> tuple[str, str]:
    with checking(group) as said:
        model = small_stack(group, dense=(False,))

        make = swapped(Kind.COMBINE) if rank == 1 else schedule
        with (
            mock.patch.object(domino, "schedule", lambda num, **o: late_of(make(num, **o))),
            pytest.raises(PeerError) as err,
        ):
            both_losses(model, rank)
        return str(err.value), said.getvalue()


def late_of(plan: Schedule) -> Schedule:
    """All experts first, then the combines, in the order in which they are."""
    rank = {Kind.COMBINE: 1, Kind.SHARED: 2}
    return replace(plan, steps=tuple(sorted(plan.steps, key=lambda step: rank.get(step.key.kind, 0))))


def test_combines_in_another_order_are_named_on_all_ranks(pool: RankPool) -> None:
    for rank, (error, printed) in enumerate(pool.run(body_combines)):
        assert error.startswith(
            "communication 4 is not the same on all ranks: rank 0 makes the combine of layer 0, micro-batch 0, "
            "rank 1 makes the combine of layer 0, micro-batch 1."
        )
        assert printed.count("fails; its last 5 launches, the newest below:") == 1
        assert f"rank {rank} of its group fails" in printed
        assert f"  4: combine of layer 0, micro-batch {rank} [combine, group " in printed.splitlines()[-1]


def body_backwards(group: dist.ProcessGroup, rank: int) -> str:
    with checking(group):
        losses = both_losses(small_stack(group, dense=(False,)), rank)
        with pytest.raises(PeerError) as err:
            losses[rank].backward()
        return str(err.value)


def test_backward_passes_in_another_order_are_named(pool: RankPool) -> None:
    for error in pool.run(body_backwards):
        assert "rank 0 makes the backward of combine of layer 0, micro-batch 0, rank 1 makes the backward" in error
        assert "combine of layer 0, micro-batch 1. All ranks" in error


def body_layers(group: dist.ProcessGroup, rank: int) -> str:
    """Rank 1 begins the next layer where rank 0 combines."""
    with checking(group):
        first, second = moe_layers(small_stack(group, dense=(False, False)))
        flight = first.launch_dispatch(torch.ones(2, 16))
        with pytest.raises(PeerError) as err:
            if rank == 0:
                first.launch_combine(flight)
            else:
                first.compute(flight)
                second.launch_dispatch(torch.ones(2, 16))
        return str(err.value)


def test_a_dispatch_where_others_combine_is_named(pool: RankPool) -> None:
    for error in pool.run(body_layers):
        assert (
            "rank 0 makes the combine of layer 0, micro-batch 0, rank 1 makes the exchange of counts of layer 1"
            in error
        )


def body_absent(group: dist.ProcessGroup, rank: int) -> tuple[str, str]:
    """Rank 1 never combines."""
    short = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    with checking(short) as said:
        (layer,) = moe_layers(small_stack(short, dense=(False,)))
        flight = layer.launch_dispatch(torch.ones(2, 16))
        layer.compute(flight)
        if rank == 1:
            dist.barrier(group=group)
            return "", ""
        with pytest.raises(PeerError) as err:
            layer.dispatcher.combine(flight.ticket)
        dist.barrier(group=group)
        return str(err.value), said.getvalue()


def test_a_rank_that_does_not_come_is_missed_with_the_launches_printed(pool: RankPool) -> None:
    error, printed = pool.run(body_absent)[0]
    assert error.startswith(
        "combine of layer 0, micro-batch 0: rank 1 of 2 did not come to any communication within 2 s"
    )
    assert "rank 0 of its group fails; its last 3 launches" in printed


def body_failure(group: dist.ProcessGroup, rank: int) -> None:
    """One rank's experts raise, the other hears of it while it compares; then they go on together."""
    want = run_both_ways(small_stack(group, dense=(False,)), rank, 2, CPU)
    with checking(group):
        model = small_stack(group, dense=(False,))
        (layer,) = moe_layers(model)

        def fail(*_: object) -> None:
            raise ValueError("planted")

        hook = layer.experts.register_forward_pre_hook(fail) if rank == 1 else None
        with pytest.raises(ValueError if rank == 1 else PeerError, match="planted"):
            run_both_ways(model, rank, 2, CPU)
        if hook is not None:
            hook.remove()
        got = run_both_ways(model, rank, 2, CPU)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_ranks_that_failed_compare_again_from_the_start(pool: RankPool) -> None:
    pool.run(body_failure)


def body_one_rank_only(group: dist.ProcessGroup, rank: int) -> str:
    close_dispatchers(group)
    config = DispatchConfig(name="all2all", num_experts=2, top_k=1, hidden_size=4)
    with mock.patch.dict(os.environ, MOE_EP_DEBUG=str(rank)):
        debug.cache_clear()
        with pytest.raises(PeerError) as err:
            build_dispatcher(config, group)
    debug.cache_clear()
    return str(err.value)


def test_all_ranks_must_check_or_none(pool: RankPool) -> None:
    assert all("MOE_EP_DEBUG is False on rank 0, True on rank 1" in error for error in pool.run(body_one_rank_only))


def body_left_out(group: dist.ProcessGroup, rank: int, changes: dict[str, Any]) -> str:
    """Rank 1 has no loss; the other one compares a launch that never comes, for no longer than it takes to say so."""
    with checking(group):
        model = small_stack(group, changes, dense=(False, False))

        def run(left_out: bool) -> None:
            with raise_on_all_ranks(group):
                (y,), (said,) = model(inputs(rank, 1))
                if not left_out:
                    loss_of(y, said).backward()

        run(False)
        with pytest.raises(PeerError) as caught:
            run(rank == 1)
        run(False)
        return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({}, "backward of combine of layer 1, micro-batch 0"),
        (dict(replica=dict(slots=2)), "weight_sync of replicas (layer 1, micro-batch 0, backward)"),
    ],
    ids=["rows", "copies"],
)
def test_a_rank_at_the_end_of_its_step_is_told_from_one_that_goes_on(
    pool: RankPool, changes: dict[str, Any], waits: str
) -> None:
    for said in pool.run(body_left_out, changes, timeout_s=30):
        assert f"rank 0 makes the {waits}, rank 1 makes the end of a step" in said

"""Ranks that do not do the same in a step: nobody waits for ever, and no gradient is wrong without a word."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import DominoStack, PeerError, raise_on_all_ranks
from moe_ep.domino import launch
from moe_ep.testing.ranks import RankPool
from tests.ranks.small_stack import H, inputs, same, small_stack

BOUND_S = 5.0  # the group's timeout is ten times that


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=60) as ranks:
        yield ranks


def twice() -> list[Tensor]:
    """Micro-batches that are alike on all ranks: whatever is mixed up has the right size."""
    x = torch.randn(4, H, generator=torch.Generator().manual_seed(3))
    return [x.clone().requires_grad_(), x.clone().requires_grad_()]


def total(ys: list[Tensor]) -> Tensor:
    return torch.stack([y.square().sum() for y in ys]).sum()


def no_forward(model: DominoStack, odd: bool) -> None:
    if not odd:
        model(inputs(0, 2))


def no_backward(model: DominoStack, odd: bool) -> None:
    ys, _ = model(inputs(0, 2))
    if not odd:
        total(ys).backward()


def other_parameters(model: DominoStack, odd: bool) -> None:
    """The one rank stops at the last layer, where the others go on to the first."""
    ys, _ = model(inputs(0, 2))
    layer = model.layers[2 if odd else 0]
    total(ys).backward(inputs=list(layer.parameters()))


def other_output(model: DominoStack, odd: bool) -> None:
    ys, _ = model(twice())
    total(ys[:1] if odd else ys[1:]).backward()


def other_order(model: DominoStack, odd: bool) -> None:
    pending, _ = launch(model.layers, twice())
    total([each.resolve() for each in (pending[::-1] if odd else pending)]).backward()


def twice_and_once(model: DominoStack, odd: bool) -> None:
    """A step more on all ranks but one, which is at its end."""
    for _ in range(1 if odd else 2):
        total(model(twice())[0]).backward()


WAITS = "is not there and waits for"
NOT_THE_SAME = "the ranks have not sent the same, or in another order: rank 0"
STEPS: dict[str, tuple[Callable[[DominoStack, bool], None], str]] = {
    "no forward": (no_forward, f"behind no transfer: rank 0 {WAITS} exchange of counts of layer 0, micro-batch 0"),
    "no backward": (no_backward, f"one combine of layer 2, micro-batch 1: rank 0 {WAITS} backward of combine of layer"),
    "other parameters": (other_parameters, f"rank 0 {WAITS} backward of combine of layer 0, micro-batch"),
    "another output": (
        other_output,
        f"{NOT_THE_SAME} is at the end of a step, behind 12 transfers, the last one",
    ),
    "another order": (other_order, f"{NOT_THE_SAME} is at the end of a step, behind 16 transfers, the last one backw"),
    "fewer": (twice_and_once, f"rank 0 {WAITS} exchange of counts of layer 0, micro-batch 0"),
}


def body(group: dist.ProcessGroup, rank: int, name: str) -> list[str]:
    act, _ = STEPS[name]
    model, said = small_stack(group), []

    def step() -> list[Tensor | None]:
        model.zero_grad()
        with raise_on_all_ranks(group):
            total(model(inputs(rank, 2))[0]).backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    want = step()
    for odd in (0, group.size() - 1):
        started = time.monotonic()
        with pytest.raises(PeerError) as caught, raise_on_all_ranks(group):
            act(model, rank == odd)
        assert time.monotonic() - started < BOUND_S
        said.append(str(caught.value))
        same(step(), want, f"the step after {name}")
    return said


def body_pairs(group: dist.ProcessGroup, rank: int, names: tuple[str, str]) -> list[str]:
    """Two cases, each on two ranks of its own: most of their time they wait."""
    first = rank // 2 * 2
    pair = dist.new_group([first, first + 1], use_local_synchronization=True)
    return body(pair, rank - first, names[rank // 2])


@pytest.mark.parametrize("names", list(zip(list(STEPS)[::2], list(STEPS)[1::2], strict=True)))
def test_a_rank_that_does_something_else(pool: RankPool, names: tuple[str, str]) -> None:
    """Ranks are named by their numbers in the job, also those of a group of their own."""
    said = pool.run(body_pairs, names)
    for name, lower, texts in zip(names, (0, 2), (said[:2], said[2:]), strict=True):
        want = STEPS[name][1].replace("rank 0", f"rank {lower}")
        # who is named first: the one that others wait for, or the lower one
        other = want if STEPS[name][1].startswith(NOT_THE_SAME) else want.replace(f"rank {lower}", f"rank {lower + 1}")
        for first, last in texts:
            assert other in first, name
            assert want in last, name
            assert "run backward over the same outputs; a rank without a loss" in last, name


def body_four(group: dist.ProcessGroup, rank: int) -> list[str]:
    return body(group, rank, "no backward")


def test_of_four_ranks_one_is_at_its_end(pool: RankPool) -> None:
    for each in pool.run(body_four):
        assert all("is not there and waits for backward of combine of layer 2" in said for said in each)


def body_slow(group: dist.ProcessGroup, rank: int) -> None:
    """A rank that takes longer than the others' patience is waited for; alike in the step after, with the note left."""
    model = small_stack(group)
    with raise_on_all_ranks(group):
        total(model(inputs(rank, 2))[0]).backward()
        time.sleep(1.4 * rank)
    with raise_on_all_ranks(group):
        total(model(inputs(rank, 2))[0]).backward()
        if rank == 1:
            model(inputs(rank, 2))
        time.sleep(0.7 * rank)
        if rank == 0:
            model(inputs(rank, 2))


def test_a_rank_that_is_slow_is_waited_for(pool: RankPool) -> None:
    pool.run(body_slow, num_ranks=2)


def body_caught(group: dist.ProcessGroup, rank: int) -> None:
    """What failed, and was caught, does not count in the step that goes on."""
    model = small_stack(group)
    with raise_on_all_ranks(group):
        with contextlib.suppress(PeerError, ZeroDivisionError):
            hook = model.layers[0].moe.experts.register_forward_hook(functools.partial(fail, rank))  # type: ignore[union-attr]
            model(inputs(rank, 2))
        hook.remove()
        total(model(inputs(rank, 2))[0]).backward()


def fail(rank: int, *_: object) -> None:
    if rank == 1:
        raise ZeroDivisionError


def test_what_was_caught_is_not_compared(pool: RankPool) -> None:
    pool.run(body_caught, num_ranks=2)

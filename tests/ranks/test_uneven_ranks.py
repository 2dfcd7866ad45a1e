"""Ranks that pass different numbers of micro-batches, or take them in another order: a sentence, and no waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from moe_ep import PeerError
from moe_ep.testing.ranks import RankPool
from tests.ranks.small_stack import inputs, loss_of, same, small_stack

BOUND_S = 5.0  # the group's timeout is many times that


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=120) as ranks:
        yield ranks


def step(model: torch.nn.Module, rank: int, num: int) -> list[torch.Tensor]:
    xs = inputs(rank, num)
    ys, auxes = model(xs)
    torch.stack([loss_of(y, said) for y, said in zip(ys, auxes, strict=True)]).sum().backward()
    return [*ys, *[x.grad for x in xs if x.grad is not None]]


def body(
    group: dist.ProcessGroup, rank: int, dispatcher: str, nums: list[int], dense: tuple[bool, ...], grad: bool
) -> None:
    model = small_stack(group, dict(dispatcher=dispatcher), dense=dense)
    want = step(small_stack(group, dict(dispatcher=dispatcher), dense=dense), rank, 2)
    started = time.monotonic()
    with torch.set_grad_enabled(grad), pytest.raises(PeerError) as caught:
        model(inputs(rank, nums[rank]))
    assert time.monotonic() - started < BOUND_S
    each = ", ".join(f"rank {r} interleaves {num}" for r, num in enumerate(nums))
    assert f"the ranks interleave different numbers of micro-batches: {each}. " in str(caught.value)
    assert not getattr(caught.value, "__notes__", None), "the group is given up"
    same(step(model, rank, 2), want, "the step after")


@pytest.mark.parametrize("nums", [[2, 1], [1, 2], [3, 4], [2, 2, 1, 4]])
@pytest.mark.parametrize("dispatcher", ["all2all", "agrs"])
def test_ranks_that_pass_different_numbers_raise_and_go_on(pool: RankPool, dispatcher: str, nums: list[int]) -> None:
    pool.run(body, dispatcher, nums, (False, True, False), True, num_ranks=len(nums), timeout_s=60)


@pytest.mark.parametrize("dispatcher", ["all2all", "agrs"])
def test_so_they_do_behind_a_dense_layer_and_without_gradients(pool: RankPool, dispatcher: str) -> None:
    pool.run(body, dispatcher, [1, 3], (True, False), False, num_ranks=2, timeout_s=60)

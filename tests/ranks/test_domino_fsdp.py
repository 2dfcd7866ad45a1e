"""Domino under FSDP2 that gives parameters up after forward, on gloo ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from moe_ep import DominoStack, Pending, moe_layers
from moe_ep.recompute import recompute_context_fn
from moe_ep.testing.ranks import RankPool
from tests.ranks.small_stack import inputs, loads, loss_of, masks, same, small_stack


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120) as ranks:
        yield ranks


def shard(model: DominoStack, root: bool, routers: bool) -> None:
    """Experts stay whole: they differ from rank to rank."""
    mesh = init_device_mesh("cpu", (2,))
    plain = {p for layer in moe_layers(model) for p in layer.experts.parameters()}
    for layer in model.layers:
        if routers and layer.moe is not None:
            fully_shard(layer.moe.router, mesh=mesh, reshard_after_forward=True)
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=plain)
    if root:
        fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=plain)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def step(model: DominoStack, rank: int, num: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Outputs, gradients of the inputs, counters."""
    xs, before = inputs(rank, num), loads(model)
    ys, auxes = model(xs, masks(xs))
    torch.stack([loss_of(y, said) for y, said in zip(ys, auxes, strict=True)]).sum().backward()
    return [y.detach() for y in ys], [x.grad for x in xs], loads(model) - before


def body(group: dist.ProcessGroup, rank: int, num: int, root: bool, routers: bool, recompute: bool) -> set[str]:
    """Compares with the model whose gradients are summed by hand; returns the nodes behind what was in flight."""
    whole, sharded = small_stack(group), small_stack(group)
    shard(sharded, root, routers)
    if recompute:
        region = functools.partial(checkpoint, use_reentrant=False, context_fn=recompute_context_fn)
        for layer in sharded.layers:
            layer.recompute_in(region)  # type: ignore[operator]
    nodes = set[str]()
    real = Pending.resolve

    def spying(pending: Pending) -> Tensor:
        nodes.update(type(t.grad_fn).__name__ for t in pending.in_flight)
        return real(pending)

    want = step(whole, rank, num)
    for _ in range(2):  # the second step starts from what the first one left
        with mock.patch.object(Pending, "resolve", spying):
            same(step(sharded, rank, num), want, "outputs, gradients of the inputs, counters")
        same_gradients(group, sharded, whole, exact=not routers)
        sharded.zero_grad()
    return nodes


def same_gradients(group: dist.ProcessGroup, sharded: DominoStack, whole: DominoStack, exact: bool) -> None:
    for (name, got), want in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        assert got.grad is not None and want.grad is not None, name
        total, mine = want.grad.clone(), got.grad
        if isinstance(mine, DTensor):
            mine = mine.full_tensor()
            dist.all_reduce(total, group=group)
        if exact or ".router." not in name:
            assert torch.equal(mine, total), name
        else:  # a unit called once for each micro-batch reduces once for each
            assert (mine - total).norm() <= 1e-6 * total.norm(), name


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize(
    ("root", "routers", "recompute"),
    [(False, False, False), (True, False, False), (True, True, False), (True, True, True)],
)
def test_parameters_given_up_after_forward(
    pool: RankPool, num: int, root: bool, routers: bool, recompute: bool
) -> None:
    for nodes in pool.run(body, num, root, routers, recompute):
        # what layers 1 and 2 resolve went through FSDP2's node, what the stack resolves at its end did not
        assert nodes == {"RegisterPostBackwardFunctionBackward", "_StartBackward"}


def body_accumulation(group: dist.ProcessGroup, rank: int) -> None:
    """Two groups of two, reduced at the last: as one after the other over all four."""
    whole, sharded = small_stack(group), small_stack(group)
    shard(sharded, True, False)
    xs = inputs(rank, 4)

    def run(model: Any, group_of: list[Tensor]) -> None:
        ys, auxes = model(group_of)
        torch.stack([loss_of(y, said) for y, said in zip(ys, auxes, strict=True)]).sum().backward()

    for first in (0, 2):
        run(whole, xs[first : first + 2])
        sharded.set_requires_gradient_sync(first == 2)  # type: ignore[operator]
        run(sharded, xs[first : first + 2])
    same_gradients(group, sharded, whole, exact=True)


def test_groups_accumulate(pool: RankPool) -> None:
    pool.run(body_accumulation)

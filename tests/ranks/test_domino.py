"""Domino on gloo ranks: values and gradients against the serial run, order, recompute, FSDP2. All bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from moe_ep import DominoStack, Routing, Ticket, moe_layers
from moe_ep.recompute import recompute_context_fn
from moe_ep.schedule import schedule, stack, transpose
from moe_ep.schedule_steps import Kind, Step, Stream
from moe_ep.testing.ranks import RankPool
from tests.ranks.race_runs import host_ahead
from tests.ranks.small_stack import inputs, loads, loss_of, masks, recorded, same, small_stack

GROUPED = dict(dispatcher="agrs", router="grouped", num_groups=2, top_k=2)
CONFIGS: dict[str, dict[str, Any]] = {
    "all2all": {},
    "agrs": dict(dispatcher="agrs"),
    "agrs grouped": GROUPED,
    "sigmoid loop": dict(router="sigmoid", bias_update_rate=0.001, experts="loop"),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120) as ranks:
        yield ranks


def each_alone(model: DominoStack, xs: list[Tensor]) -> tuple[list[Any], list[Any], Tensor]:
    """Outputs with their MoEAux, own gradients, and counters of one micro-batch after the other (M = 1)."""
    outputs, gradients, before = [], [], loads(model)
    for x, mask in zip(xs, masks(xs), strict=True):
        (y,), (auxes,) = model([x], [mask])
        leaves = [x, *model.parameters()]
        gradients.append(torch.autograd.grad(loss_of(y, auxes), leaves, allow_unused=True))
        outputs.append((y.detach(), [plain(aux) for aux in auxes]))
    return outputs, gradients, loads(model) - before


def plain(aux: Any) -> list[Tensor]:
    return [getattr(aux, name).detach() for name in aux.__dataclass_fields__]


def together(model: DominoStack, xs: list[Tensor]) -> tuple[list[Any], list[Tensor], Tensor]:
    """The same interleaved: outputs, losses with their graph, counters."""
    before = loads(model)
    ys, auxes = model(xs, masks(xs))
    outputs = [(y.detach(), [plain(aux) for aux in said]) for y, said in zip(ys, auxes, strict=True)]
    return outputs, [loss_of(y, said) for y, said in zip(ys, auxes, strict=True)], loads(model) - before


def compare(model: DominoStack, rank: int, num: int) -> None:
    """Everything that Domino may not change."""
    xs = inputs(rank, num)
    want_outputs, own, want_loads = each_alone(model, xs)
    outputs, losses, counted = together(model, xs)
    same(outputs, want_outputs, "outputs and MoEAux")
    same(counted, want_loads, "counters")
    parameters = list(model.parameters())
    for i, loss in enumerate(losses):
        alone = torch.autograd.grad(loss, [xs[i], *parameters], allow_unused=True, retain_graph=True)
        same(alone, own[i], f"gradients of micro-batch {i}")
    for x in xs:
        x.grad = None
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.stack(losses).sum().backward()
    same([x.grad for x in xs], [gradients[0] for gradients in own], "gradients of the inputs")
    for place, parameter in enumerate(parameters):
        parts = [gradients[1 + place] for gradients in own]
        same(parameter.grad, torch.ones_like(parameter) + descending_sum(parts), f"sum of parameter {place}")
        serial = torch.ones_like(parameter)
        for part in parts:
            serial += part
        assert (parameter.grad - serial).norm() <= 1e-6 * serial.norm()


def descending_sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[-1]
    for part in parts[-2::-1]:
        total = total + part
    return total


def body_equal(group: dist.ProcessGroup, rank: int, changes: dict[str, Any], num: int) -> None:
    for ahead in (False, True):
        with host_ahead(ahead):
            compare(small_stack(group, changes), rank, num)


@pytest.mark.parametrize("num", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_values_do_not_depend_on_m(pool: RankPool, name: str, num: int) -> None:
    pool.run(body_equal, CONFIGS[name], num)


@pytest.mark.parametrize("dispatcher", ["local", "all2all", "agrs"])
def test_values_do_not_depend_on_m_on_one_rank(dispatcher: str) -> None:
    for num in (1, 2, 3, 4):
        compare(small_stack(None, dict(dispatcher=dispatcher)), 0, num)


def body_no_grad(group: dist.ProcessGroup, rank: int, num: int) -> None:
    model = small_stack(group).eval()
    xs = inputs(rank, num)
    with torch.no_grad():
        alone = [model([x])[0][0] for x in xs]
        ys, _ = model(xs)
        with host_ahead(True):
            same(model(xs)[0], alone, "outputs where the host runs ahead")
    same(ys, alone, "outputs under no_grad")
    assert not any(y.requires_grad for y in ys)
    assert loads(model).sum() == 0, "evaluation counts nothing"


@pytest.mark.parametrize("num", [2, 4])
def test_no_grad(pool: RankPool, num: int) -> None:
    pool.run(body_no_grad, num)


def told(steps: Sequence[Step]) -> list[str]:
    """What `recorded` notes when these steps are taken."""
    notes = []
    for step in steps:
        key = step.key
        d = "d" if key.backward else ""
        where = f"{key.layer}.{key.micro_batch}"
        waits = [w for w in step.waits if w.kind in (Kind.DISPATCH, Kind.COMBINE)]
        if step.stream is Stream.COMPUTE:
            notes += [f"wait {d}{w.kind} {w.layer}.{w.micro_batch}" for w in waits]
        if key.kind in (Kind.ATTENTION, Kind.EXPERTS, Kind.SHARED):
            notes.append(f"{d}{key.kind} {where}")
        if key.kind in (Kind.DISPATCH, Kind.COMBINE):
            notes.append(f"launch {d}{key.kind} {where}")
    return notes


def body_order(
    group: dist.ProcessGroup, rank: int, num: int, ahead: bool, changes: dict[str, Any]
) -> tuple[list[str], list[str]]:
    model = small_stack(group, changes, dense=(False, False, True, False, False))
    xs = inputs(rank, num)
    with recorded(model) as log, host_ahead(ahead):
        _, losses, _ = together(model, xs)
        forward = log[:]
        log.clear()
        torch.stack(losses).sum().backward()
        return forward, log[:]


REPLICAS: dict[str, dict[str, Any]] = {
    "no replicas": {},
    "replicas": dict(replica=dict(slots=2)),
    "replicas, placed together": dict(replica=dict(slots=2, joint=True)),
}


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_the_recorded_order_is_the_schedule_both_ways(pool: RankPool, num: int, ahead: bool, replicas: str) -> None:
    """Forward as the host issues it; backward is one order for both, with replicas and without."""
    dense, joint = (False, False, True, False, False), "together" in replicas
    steps = stack([schedule(num, dense=each, host_ahead=ahead, joint=joint) for each in dense])
    bare = "shared 4."  # the last layer has no shared experts, so nothing is noted there
    forward = [line for line in told(steps) if not line.startswith(bare)]
    soon = stack([schedule(num, dense=each, joint=joint) for each in dense])
    backward = [line for line in told(transpose(soon)) if not line.startswith(f"d{bare}")]
    assert len(forward) > 20 * num
    for got in pool.run(body_order, num, ahead, REPLICAS[replicas]):
        assert got == (forward, backward)


def body_recompute(
    group: dist.ProcessGroup,
    rank: int,
    num: int,
    attention: bool,
    early_stop: bool,
    ahead: bool,
    changes: dict[str, Any] | None = None,
) -> list[int]:
    """Launches of (counts and dispatch, combine) in forward and in backward."""
    model = small_stack(group, changes)
    region = functools.partial(checkpoint, use_reentrant=False, context_fn=recompute_context_fn)
    with set_checkpoint_early_stop(early_stop):
        plain_model = small_stack(group, changes)
        want, own, want_loads = each_alone(plain_model, inputs(rank, num))
        for layer in model.layers:
            layer.recompute_in(region, attention=attention)  # type: ignore[operator]
        xs = inputs(rank, num)
        with recorded(model) as log, host_ahead(ahead):
            outputs, losses, counted = together(model, xs)
            torch.stack(losses).sum().backward()
            notes = log[:]
        same((outputs, counted), (want, want_loads), "outputs and counters")
        same([x.grad for x in xs], [gradients[0] for gradients in own], "gradients of the inputs")
        for place, parameter in enumerate(model.parameters()):
            same(parameter.grad, descending_sum([g[1 + place] for g in own]), f"sum of parameter {place}")
    assert all(layer.dispatcher.lanes.num_free == layer.dispatcher.lanes.num_lanes for layer in moe_layers(model))
    return [sum(f"launch {kind}" in line for line in notes) for kind in ("dispatch", "combine", "ddispatch")]


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize(("num", "ahead"), [(1, False), (2, False), (2, True), (3, False), (4, True)])
def test_recompute_changes_nothing_and_combines_once(
    pool: RankPool, num: int, ahead: bool, attention: bool, early_stop: bool
) -> None:
    for launches in pool.run(body_recompute, num, attention, early_stop, ahead):
        assert launches == [2 * 2 * num, 2 * num, 2 * num], "two layers with experts; dispatch again, combine not"


@pytest.mark.parametrize("name", ["agrs", "agrs grouped", "sigmoid loop"])
@pytest.mark.parametrize("ahead", [False, True])
def test_so_it_does_with_other_dispatchers_and_routers(pool: RankPool, name: str, ahead: bool) -> None:
    for launches in pool.run(body_recompute, 4, True, True, ahead, CONFIGS[name]):
        assert launches == [2 * 2 * 4, 2 * 4, 2 * 4]


def body_replay(group: dist.ProcessGroup, rank: int, num: int) -> int:
    """How many (layer, micro-batch) were routed twice, each time alike, by routers that changed their mind."""
    model = small_stack(group)
    region = functools.partial(checkpoint, use_reentrant=False, context_fn=recompute_context_fn)
    ids: dict[tuple[int, int], list[Tensor]] = {}
    (dispatcher,) = {layer.dispatcher for layer in moe_layers(model)}
    real = dispatcher.dispatch_preprocess

    def noting(x: Tensor, routing: Routing, *, layer: int, micro_batch: int, **others: Any) -> Ticket:
        ids.setdefault((layer, micro_batch), []).append(routing.expert_ids)
        return real(x, routing, layer=layer, micro_batch=micro_batch, **others)

    for each in model.layers:
        each.recompute_in(region)  # type: ignore[operator]
    with mock.patch.object(dispatcher, "dispatch_preprocess", noting):
        ys, _ = model(inputs(rank, num))
        for layer in moe_layers(model):
            layer.router.weight.data.neg_()  # the likeliest expert is now the least likely
        torch.stack([y.square().sum() for y in ys]).sum().backward()
    for place, (first, second) in ids.items():
        same(second, first, f"ids of {place}")
    return len(ids)


@pytest.mark.parametrize("num", [1, 3])
def test_recompute_replays_the_routes_of_each_micro_batch(pool: RankPool, num: int) -> None:
    assert pool.run(body_replay, num) == [2 * num] * 2

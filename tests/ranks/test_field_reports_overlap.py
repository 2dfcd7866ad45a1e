"""Field reports of streams, overlap and memory, tried on layers over gloo ranks. See docs/field_reports.md."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.deterministic as deterministic
from torch import Tensor

from moe_ep import DominoStack, ExpertInput, MoEConfig, Routing, build_dispatcher, moe_layers
from moe_ep.dispatch.base import Dispatcher
from moe_ep.lanes import Lane
from moe_ep.testing.ranks import RankPool
from tests.ranks.race_runs import host_ahead
from tests.ranks.small_stack import MOE, H, SmallLayer, inputs, loss_of, recorded, same, small_stack

DISPATCHERS = ["all2all", "agrs"]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120) as ranks:
        yield ranks


def train(model: DominoStack, xs: list[Tensor]) -> list[Any]:
    """Outputs and gradients of a step."""
    model.zero_grad()
    ys, auxes = model(xs)
    torch.stack([loss_of(y, said) for y, said in zip(ys, auxes, strict=True)]).sum().backward()
    return [[y.detach() for y in ys], [x.grad for x in xs], [p.grad for p in model.parameters()]]


def ids_plus_one(rows: ExpertInput, first: int) -> Tensor:
    """Expert e multiplies by e + 1, and by the route's weight."""
    counts = rows.tokens_per_expert.long()
    expert = torch.arange(first, first + counts.numel()).repeat_interleave(counts)
    return rows.rows() * ((expert + 1) * rows.row_weights)[:, None]


def body_in_flight(group: dist.ProcessGroup, rank: int, name: str, num: int) -> None:
    """All dispatches, then all combines; each micro-batch and rank has a number of its own, forward and backward."""
    config = MoEConfig(**(MOE | dict(dispatcher=name, num_shared_experts=0, shared_intermediate_size=0)))
    dispatcher: Dispatcher = build_dispatcher(config.dispatch(), group)
    generator = torch.Generator().manual_seed(rank)
    xs = [torch.full((5 + i, H), 1.0 + rank + 10 * i, requires_grad=True) for i in range(num)]
    ids = [torch.rand(5 + i, 8, generator=generator).argsort(1)[:, :2] for i in range(num)]
    ones = [torch.ones(5 + i, 2) for i in range(num)]
    tickets = []
    for i in range(num):
        routing = Routing(expert_ids=ids[i], weights=ones[i], num_experts=8)
        tickets.append(dispatcher.dispatch_preprocess(xs[i], routing, micro_batch=i))
        dispatcher.dispatch(tickets[i])
    assert dispatcher.lanes.num_lanes - dispatcher.lanes.num_free == num, "a lane for each"
    for ticket in tickets:
        rows = dispatcher.dispatch_postprocess(ticket)
        dispatcher.combine_preprocess(ticket, ids_plus_one(rows, rank * 4))
        dispatcher.combine(ticket)
    ys = [dispatcher.combine_postprocess(ticket) for ticket in tickets]
    factors = [(own + 1).sum(1, keepdim=True).float() for own in ids]
    for i in range(num):
        assert torch.equal(ys[i], factors[i] * xs[i]), f"micro-batch {i}"
    torch.stack([(100.0**i) * y.sum() for i, y in enumerate(ys)]).sum().backward()
    for i in range(num):
        assert torch.equal(xs[i].grad, (100.0**i * factors[i]).expand_as(xs[i])), f"gradient of micro-batch {i}"


@pytest.mark.parametrize("num", [2, 3, 4])
@pytest.mark.parametrize("name", DISPATCHERS)
def test_up_to_four_in_flight_are_not_mixed_up(pool: RankPool, name: str, num: int) -> None:
    """PrimeIntellect-ai/prime-rl#3411, deepseek-ai/DeepEP#580, deepseek-ai/DeepEP#513."""
    pool.run(body_in_flight, name, num)


def body_fill(group: dist.ProcessGroup, rank: int, name: str) -> None:
    model = small_stack(group, dict(dispatcher=name, experts="loop"))
    want = train(model, inputs(rank, 2))
    assert deterministic.fill_uninitialized_memory, "torch's default"  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        for number in range(10):
            same(train(model, inputs(rank, 2)), want, f"step {number}")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", DISPATCHERS)
def test_memory_that_torch_fills_with_nan_is_filled_before_anything_arrives(pool: RankPool, name: str) -> None:
    """deepseek-ai/DeepEP#589."""
    pool.run(body_fill, name)


def body_shared(group: dist.ProcessGroup, rank: int, num: int, ahead: bool) -> list[list[str]]:
    """Turns of everything but shared experts, both ways: with shared experts, and without."""
    found = []
    for shared in (1, 0):
        changes = dict(num_shared_experts=shared, shared_intermediate_size=8 * shared)
        config = MoEConfig(**(MOE | changes))
        model = DominoStack(SmallLayer(config, group, i, dense=False) for i in range(3))
        with recorded(model) as log, host_ahead(ahead):
            train(model, inputs(rank, num))
        found.append([line for line in log if "shared" not in line])
        assert sum("shared" in line for line in log) == shared * 2 * 3 * num
    return found


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num", [1, 2, 4])
def test_shared_experts_move_no_launch_and_no_wait(pool: RankPool, num: int, ahead: bool) -> None:
    """NVIDIA/Megatron-LM#7389: two ways of overlapping that cancel each other."""
    for with_shared, without in pool.run(body_shared, num, ahead):
        assert with_shared == without and len(without) > 20 * num


def held(thing: Any, seen: set[int]) -> list[Tensor]:
    """Tensors that an object of ours reaches."""
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, dict):
        inside: list[Any] = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset):
        inside = list(thing)
    elif type(thing).__module__.startswith("moe_ep"):
        slots = [getattr(thing, name) for name in getattr(type(thing), "__slots__", ()) if hasattr(thing, name)]
        inside = [*getattr(thing, "__dict__", {}).values(), *slots]
    else:
        return []
    return [tensor for one in inside for tensor in held(one, seen)]


def kept(model: DominoStack) -> list[int]:
    """Elements of the tensors that dispatchers and layers hold beside parameters, buffers, counters and free lanes."""
    (dispatcher,) = {layer.dispatcher for layer in moe_layers(model)}
    assert all(isinstance(lane, Lane) for lane in dispatcher.lanes._free)
    known = [*model.parameters(), *model.buffers(), *held(dispatcher.lanes, set())]
    known += [layer.router.load_E for layer in moe_layers(model)]
    ours = {id(tensor) for tensor in known}
    found = [tensor for layer in model.layers for tensor in held(vars(layer), set())]
    return [tensor.numel() for tensor in found if id(tensor) not in ours]


def body_kept(group: dist.ProcessGroup, rank: int, name: str) -> list[list[int]]:
    """What is kept behind each of ten steps, and then what is found of a tensor that was planted."""
    model = small_stack(group, dict(dispatcher=name))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    found = []
    gc.freeze()  # what torch has brought need not be looked through ten times
    for _ in range(10):
        train(model, inputs(rank, 2))
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        found.append(kept(model))
    gc.unfreeze()
    (dispatcher,) = {layer.dispatcher for layer in moe_layers(model)}
    dispatcher.last_weights = torch.ones(3)  # type: ignore[attr-defined]
    found.append(kept(model))
    del dispatcher.last_weights  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("name", DISPATCHERS)
def test_a_dispatcher_keeps_no_tensor_of_a_step(pool: RankPool, name: str) -> None:
    """NVIDIA-NeMo/RL#2319, pytorch/torchtitan#979."""
    for steps in pool.run(body_kept, name):
        assert steps == [[]] * 10 + [[3, 3]], "two layers share it"


def body_layers(group: dist.ProcessGroup, rank: int, name: str) -> tuple[int, int, int]:
    """Dispatchers, lanes, integers in each lane, of 24 layers behind a step of two micro-batches."""
    changes = dict(dispatcher=name, max_tokens=13)  # a dispatcher that no other test has
    model = small_stack(group, changes, dense=(False,) * 24)
    train(model, inputs(rank, 2))
    dispatchers = {layer.dispatcher for layer in moe_layers(model)}
    (dispatcher,) = dispatchers
    return len(dispatchers), dispatcher.lanes.num_lanes, dispatcher.num_lane_ints


@pytest.mark.parametrize("name", DISPATCHERS)
def test_twenty_four_layers_share_the_memory_of_two_micro_batches(pool: RankPool, name: str) -> None:
    """uccl-project/uccl#924, uccl-project/uccl#925, deepseek-ai/DeepEP#510, deepseek-ai/DeepEP#571,
    pytorch/torchtitan#3865."""
    for dispatchers, lanes, ints in pool.run(body_layers, name):
        assert (dispatchers, lanes) == (1, 2) and ints <= 2 * 2 * (4 + 3)

"""Ways to call a layer and a stack that cannot work: a sentence on each rank, nobody waits, and the next step works."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from moe_ep import DominoStack, InputError, MoEError, PeerError, ProtocolError, RecipeError, raise_on_all_ranks
from moe_ep.domino import launch
from moe_ep.pending import Pending
from moe_ep.testing.ranks import RankPool
from tests.ranks.small_stack import H, inputs, loss_of, same, small_stack


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=60) as ranks:
        yield ranks


def step(model: DominoStack, rank: int, group: dist.ProcessGroup) -> list[Any]:
    model.zero_grad()
    with raise_on_all_ranks(group):
        ys, auxes = model(inputs(rank, 2))
        torch.stack([loss_of(y, said) for y, said in zip(ys, auxes, strict=True)]).sum().backward()
    return [[y.detach() for y in ys], [p.grad for p in model.parameters()]]


# what one rank or both do, and which error it is
Wrong = Callable[[DominoStack, int], Any]


def pendings(rank: int) -> list[Pending]:
    return [Pending(base=x) for x in inputs(rank, 2)]


def with_region(region: Any, model: DominoStack, rank: int) -> None:
    layer: Any = model.layers[0]
    layer.recompute_in(region)
    try:
        model(inputs(rank, 2))
    finally:
        layer.recompute_in(None)


def with_moe(change: Callable[[nn.Module], nn.Module], model: DominoStack, rank: int) -> None:
    layer: Any = model.layers[0]
    moe = layer.moe
    layer.moe = change(moe)
    try:
        model(inputs(rank, 2))
    finally:
        layer.moe = moe
        moe._forward_hooks.clear()


def hooked(moe: nn.Module) -> nn.Module:
    moe.register_forward_hook(lambda *_: None)
    return moe


def resolved_with_gradients(model: DominoStack, rank: int) -> None:
    with torch.no_grad():
        pending, _ = launch(model.layers, inputs(rank, 2))
    pending[0].resolve()


def checkpointed(model: DominoStack, rank: int) -> None:
    """Every layer in a checkpoint that records nothing and returns what is no tensor: nothing would be trained."""
    group: Any = pendings(rank)
    for layer in model.layers:
        group, _ = checkpoint(layer, group, use_reentrant=True)
    group[0].resolve()


CALLS: dict[str, tuple[Wrong, type[MoEError], str]] = {
    "tensors for pendings": (lambda model, rank: model.layers[0](inputs(rank, 2)), InputError, "must be a Pending, go"),
    "no pending": (lambda model, rank: model.layers[0]([]), InputError, "got 0 micro-batches; give at least one"),
    "one mask": (lambda model, rank: model.layers[0](pendings(rank), [None]), InputError, "2 micro-batches and 1 mask"),
    "too many": (
        lambda model, rank: model([torch.zeros(0, H)] * 64),
        RecipeError,
        "64 micro-batches are more than the 63 that can be interleaved; pass fewer",
    ),
    "a reentrant region": (
        functools.partial(with_region, functools.partial(checkpoint, use_reentrant=True)),
        RecipeError,
        "runs without recording gradients, and its caller records them, so they would be lost; pass moe_ep.recompute",
    ),
    "a region that is none": (
        functools.partial(with_region, 3),
        RecipeError,
        "region must be a function of a function and tensors, or None, got int; pass",
    ),
    "a region of nothing": (
        functools.partial(with_region, lambda body, *xs: None),
        RecipeError,
        "must call the function that it is given once and return what that returns, got NoneType; pass",
    ),
    "a region of half": (
        functools.partial(with_region, lambda body, *xs: [part[:1] for part in body(*xs)]),
        RecipeError,
        "must call the function that it is given once and return what that returns, got 2 of them; pass",
    ),
    "a checkpoint around experts": (
        functools.partial(with_moe, checkpoint_wrapper),
        RecipeError,
        "never called as a whole, so what is around it would not run: CheckpointWrapper wraps it; wrap or hook",
    ),
    "a hook on experts": (
        functools.partial(with_moe, hooked),
        RecipeError,
        "never called as a whole, so what is around it would not run: MoELayer has hooks; wrap or hook the layer",
    ),
    "resolved with gradients": (resolved_with_gradients, ProtocolError, "gradients are recorded, but were not when"),
    "reentrant checkpoints": (checkpointed, ProtocolError, "gradients are recorded, but were not when the"),
}  # fmt: skip
ON_BOTH = ("resolved with gradients", "reentrant checkpoints")  # one rank alone records none: told with the counts


def body_call(group: dist.ProcessGroup, rank: int, name: str) -> None:
    act, kind, said = CALLS[name]
    model = small_stack(group)
    want = step(model, rank, group)
    for wrong in ((0, 1),) if name in ON_BOTH else ((0, 1), (1,)):
        with pytest.raises(kind if rank in wrong else PeerError) as caught, raise_on_all_ranks(group):
            if rank in wrong:
                act(model, rank)
            else:
                model(inputs(rank, 2))
        assert said in str(caught.value), str(caught.value)
        same(step(model, rank, group), want, f"the step after {name}")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_call_that_cannot_work(pool: RankPool, name: str) -> None:
    pool.run(body_call, name)


def body_untold(group: dist.ProcessGroup, rank: int) -> None:
    """A layer alone, without raise_on_all_ranks: its own check tells."""
    model = small_stack(group)
    with pytest.raises(InputError if rank else PeerError, match="got 0 micro-batches"):
        model.layers[0]([] if rank else pendings(rank))


def test_a_layer_alone_tells_what_it_refuses(pool: RankPool) -> None:
    pool.run(body_untold)


class Spoiled(torch.autograd.Function):
    """Identity whose backward ends the program."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, err: BaseException) -> Tensor:
        ctx.err = err
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ctx.err


def ending(err: BaseException, backward: bool) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, y: Any) -> Any:
        if backward:
            return Spoiled.apply(y, err)
        raise err

    return hook


PLACES: dict[str, tuple[Callable[[Any], nn.Module], bool]] = {
    "router": (lambda layers: layers[2].moe.router, False),
    "experts": (lambda layers: layers[0].moe.experts, False),
    "attention": (lambda layers: layers[1].mix, False),
    "backward": (lambda layers: layers[1].mix, True),
}


def body_ending(group: dist.ProcessGroup, rank: int, name: str) -> None:
    find, backward = PLACES[name]
    model = small_stack(group)
    want = step(model, rank, group)
    for err in (KeyboardInterrupt(), SystemExit(3)):
        hook = find(model.layers).register_forward_hook(ending(err, backward)) if rank == 1 else None
        with pytest.raises(type(err) if rank == 1 else PeerError):
            step(model, rank, group)
        if hook is not None:
            hook.remove()
        same(step(model, rank, group), want, f"the step after {type(err).__name__}")


@pytest.mark.parametrize("name", PLACES)
def test_who_catches_the_end_of_a_program_goes_on_with_all_ranks(pool: RankPool, name: str) -> None:
    pool.run(body_ending, name)

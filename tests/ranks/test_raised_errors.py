"""An exception on one rank, in forward or backward: every rank raises in time, and the next step is as if new."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_ep import MoEConfig, MoELayer
from moe_ep.recompute import recompute_context_fn
from moe_ep.testing.ranks import RankPool
from tests.ranks.broken_steps import TEXT, BreakBackward, all_raise, break_at, free, step
from tests.ranks.race_runs import host_ahead
from tests.ranks.small_stack import MOE, H, same, small_stack


class Case(NamedTuple):
    dispatcher: str
    num: int
    layer: int
    micro_batch: int
    backward: bool

    @property
    def where(self) -> str:
        return f"layer {self.layer}, micro-batch {self.micro_batch}"


def cases(dispatcher: str, num: int) -> list[Case]:
    places = itertools.product((0, 1, 2), sorted({0, min(1, num - 1), num - 1}), (False, True))
    return [Case(dispatcher, num, *place) for place in places]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=120) as ranks:
        yield ranks


def body_cases(group: dist.ProcessGroup, rank: int, chosen: list[Case]) -> None:
    first = chosen[0]
    changes = dict(dispatcher=first.dispatcher)
    model = small_stack(group, changes, dense=(False,) * 3)
    want = step(small_stack(group, changes, dense=(False,) * 3), rank, first.num, group)
    victim = group.size() - 1
    act = functools.partial(step, model, rank, first.num, group)
    for case in chosen:
        layer: Any = model.layers[case.layer]
        hook = break_at(layer.moe.experts, case.micro_batch, case.backward) if rank == victim else None
        place = f"behind backward of combine of {case.where}" if case.backward else f"{case.where} (experts)"
        all_raise(group, act, {victim: ZeroDivisionError}, place, f"ZeroDivisionError: {TEXT}")
        if hook is not None:
            hook.remove()
        free(model)
        same(act(), want, f"the step after {case}")


@pytest.mark.parametrize("dispatcher", ["all2all", "agrs"])
def test_every_rank_raises_and_the_next_step_is_as_if_new(pool: RankPool, dispatcher: str) -> None:
    pool.run(body_cases, [Case(dispatcher, 2, 1, 0, False), Case(dispatcher, 2, 2, 1, True)], num_ranks=2)


def body_ahead(group: dist.ProcessGroup, rank: int, chosen: list[Case]) -> None:
    with host_ahead(True):
        body_cases(group, rank, chosen)


def test_so_they_do_where_the_host_runs_ahead(pool: RankPool) -> None:
    """The others launch the last dispatch, which the failing rank has not launched, and wait for it."""
    pool.run(body_ahead, [Case("all2all", 2, 1, 0, False), Case("all2all", 2, 2, 1, True)], num_ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dispatcher", ["all2all", "agrs"])
@pytest.mark.parametrize("num", [1, 2, 4])
def test_every_layer_micro_batch_and_direction(pool: RankPool, dispatcher: str, num: int, world: int) -> None:
    pool.run(body_cases, cases(dispatcher, num), num_ranks=world, timeout_s=300)


REGION = functools.partial(checkpoint, use_reentrant=False, context_fn=recompute_context_fn)
# what breaks, at which call of it, in forward or backward, and what the others are told of the place
PIECES: dict[str, tuple[Callable[[Any], nn.Module], int, bool, str]] = {
    "attention": (lambda layers: layers[2].mix, 1, False, "layer 2, micro-batch 1 (attention)"),
    "attention, backward": (lambda layers: layers[0].mix, 1, True, "behind backward of dispatch of layer 0, "),
    "shared experts": (lambda layers: layers[0].moe.shared, 0, False, "layer 0, micro-batch 0 (shared)"),
    "a dense layer": (lambda layers: layers[1].mlp, 1, False, "layer 1 of 3"),
    "experts, second pass": (lambda layers: layers[2].moe.experts, 3, False, "layer 2, micro-batch 1 (experts)"),
}  # fmt: skip


def body_piece(group: dist.ProcessGroup, rank: int, name: str) -> None:
    find, call, backward, place = PIECES[name]
    model, fresh = small_stack(group), small_stack(group)
    for each in [*model.layers, *fresh.layers] if "second pass" in name else []:
        each.recompute_in(REGION)  # type: ignore[operator]
    want = step(fresh, rank, 2, group)
    hook = break_at(find(model.layers), call, backward) if rank == 0 else None
    act = functools.partial(step, model, rank, 2, group)
    all_raise(group, act, {0: ZeroDivisionError}, place, f"ZeroDivisionError: {TEXT}")
    if hook is not None:
        hook.remove()
    free(model)
    same(act(), want, f"the step after {name}")


@pytest.mark.parametrize("name", PIECES)
def test_whatever_breaks_between_communications(pool: RankPool, name: str) -> None:
    pool.run(body_piece, name, num_ranks=2)


def raise_value_error(loss: Tensor) -> Tensor:
    raise ValueError("no such loss")


def body_loss(group: dist.ProcessGroup, rank: int) -> None:
    model = small_stack(group)
    want = step(small_stack(group), rank, 2, group)
    spoil = raise_value_error if rank == 0 else None
    act = functools.partial(step, model, rank, 2, group)
    all_raise(group, functools.partial(act, spoil), {0: ValueError}, "a step, behind combine of layer 2, micro-batch 1")
    broken = BreakBackward.apply if rank == 1 else None
    all_raise(group, functools.partial(act, broken), {1: ZeroDivisionError}, TEXT)
    same(act(), want, "the step after")


def test_a_loss_that_raises_on_one_rank(pool: RankPool) -> None:
    pool.run(body_loss, num_ranks=2)


def body_several(group: dist.ProcessGroup, rank: int) -> None:
    model = small_stack(group)
    want = step(small_stack(group), rank, 2, group)
    layers: Any = model.layers
    act = functools.partial(step, model, rank, 2, group)
    for victims in ([1, 3], [0, 1, 2, 3]):  # not at the same place, and one of them in backward
        late = rank % 2 if len(victims) == 2 else 0
        hook = break_at(layers[2 * late].moe.experts, late, rank == 3 and len(victims) == 2)
        if rank not in victims:
            hook.remove()
        expected: dict[int, type[Exception]] = dict.fromkeys(victims, ZeroDivisionError)
        if len(victims) == 2:
            expected[3] = Exception  # who gets as far as to raise in backward is stopped before
        all_raise(group, act, expected)
        hook.remove()
        same(act(), want, f"the step after {victims}")


def test_several_ranks_that_raise_at_different_places(pool: RankPool) -> None:
    pool.run(body_several)


def body_plain(group: dist.ProcessGroup, rank: int, dispatcher: str) -> None:
    """Evaluation with one layer: nothing comes behind the broken rank's combine."""
    layer = MoELayer(MoEConfig(**(MOE | dict(dispatcher=dispatcher))), group, layer_index=5)
    layer.reset_parameters(7)
    x = torch.randn(4, H, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        want, _ = layer(x)
        hook = break_at(layer.experts, 0, False) if rank == 0 else None
        place = "layer 5, micro-batch 0 (experts): ZeroDivisionError"
        all_raise(group, functools.partial(layer, x), {0: ZeroDivisionError}, place)
        if hook is not None:
            hook.remove()
        same(layer(x)[0], want, "the evaluation after")


@pytest.mark.parametrize("dispatcher", ["all2all", "agrs"])
def test_a_layer_on_its_own_under_no_grad(pool: RankPool, dispatcher: str) -> None:
    pool.run(body_plain, dispatcher, num_ranks=2)

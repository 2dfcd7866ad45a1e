"""Random small settings with replicas and without, in float64, where only a mistake makes a difference."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import moe_layers, raise_on_all_ranks, recompute_region
from moe_ep.testing.ranks import RankPool
from tests.ranks.small_stack import H, loss_of, small_stack

TOKENS = (0, 1, 5, 12)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=120) as ranks:
        yield ranks


class Setting(NamedTuple):
    changes: dict[str, Any]
    replica: dict[str, Any]
    tokens: list[list[int]]  # of each micro-batch and rank
    recompute: bool
    frozen: int | None  # the rank whose experts are
    masked: bool
    evaluated: bool  # between forward and backward


def setting(seed: int, num_ranks: int) -> Setting:
    chance = random.Random(seed)
    num_local, num = chance.choice((1, 2, 3)), chance.choice((1, 2, 3, 4))
    num_experts = num_ranks * num_local
    replica: dict[str, Any] = dict(slots=chance.randint(1, num_experts - num_local))
    if replica["slots"] >= num_local and chance.random() < 0.3:
        replica["planner"] = "fixed_rows"
    else:
        replica |= dict(joint=chance.random() < 0.5, min_quota=chance.choice((1, 1, 3)))
    changes = dict(
        num_experts=num_experts,
        top_k=chance.randint(1, num_experts),
        router=chance.choice(("softmax", "sigmoid")),
        dispatcher=chance.choice(("all2all", "agrs")),
        num_micro_batches=num,
        experts="loop",
        dtype="float64",
        init_std=0.3,
    )
    tokens = [[chance.choice(TOKENS) for _ in range(num_ranks)] for _ in range(num)]
    frozen = chance.choice((None, None, 0))
    return Setting(
        changes, replica, tokens, chance.random() < 0.5, frozen, chance.random() < 0.3, chance.random() < 0.5
    )


def run(group: dist.ProcessGroup, rank: int, chosen: Setting, replica: dict[str, Any], seed: int) -> tuple[Any, int]:
    """Outputs of two steps, their added gradients, and copies on this rank."""
    model = small_stack(group, chosen.changes | dict(replica=replica), dense=(False, False)).double()
    for layer in moe_layers(model):
        layer.router.weight.data *= 8  # or nothing is popular
        layer.experts.requires_grad_(rank != chosen.frozen)
    for each in model.layers if chosen.recompute else []:
        each.recompute_in(recompute_region)  # type: ignore[operator]
    outputs: list[Tensor] = []
    copies = 0
    generator = torch.Generator().manual_seed(100 * seed + rank)
    for _ in range(2):
        xs = [1 + torch.randn(some[rank], H, generator=generator, dtype=torch.float64) for some in chosen.tokens]
        valid = [torch.arange(len(x)) % 3 != 1 if chosen.masked else None for x in xs]
        with raise_on_all_ranks(group):
            ys, auxes = model(xs, valid)
            if chosen.evaluated:
                with torch.no_grad():
                    model(xs, valid)
            torch.stack([loss_of(y, said) / 1000 for y, said in zip(ys, auxes, strict=True)]).sum().backward()
        outputs += [y.detach() for y in ys]
        copies += sum(int(aux.replicas) for said in auxes for aux in said)
    for runtime in {layer.replicas for layer in moe_layers(model) if layer.replicas is not None}:
        runtime.check_returned()
    return [*outputs, *(p.grad for p in model.parameters())], copies


def body(group: dist.ProcessGroup, rank: int, seeds: list[int]) -> int:
    total = 0
    for seed in seeds:
        chosen = setting(seed, group.size())
        ours, copies = run(group, rank, chosen, chosen.replica, seed)
        theirs, _ = run(group, rank, chosen, {}, seed)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9, msg=lambda text: f"{seed}: {chosen}: {text}")  # noqa: B023
        total += copies
    return total


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("seeds", [range(2, 6), pytest.param(range(6, 60), marks=pytest.mark.slow)], ids=["4", "54"])
def test_random_settings_come_to_the_numbers_without_replicas(pool: RankPool, num_ranks: int, seeds: range) -> None:
    assert sum(pool.run(body, list(seeds), num_ranks=num_ranks)) > len(seeds), "copies are made"

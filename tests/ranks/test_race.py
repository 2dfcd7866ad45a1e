"""A schedule without one of its waits, run under MOE_EP_RACE, gives wrong numbers; the right schedule never does."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep import MoEError, domino
from moe_ep.dispatch.transfer import Flight
from moe_ep.in_flight import making
from moe_ep.testing.ranks import RankPool
from tests.ranks.race_runs import LAYERS, host_ahead, mutant, necessary_waits, racing, run_both_ways, run_forward
from tests.ranks.small_stack import small_stack

CPU = torch.device("cpu")
# what the caller issued is done when it returns, so on the CPU nothing is launched too early
HOST_ORDER = {("counts", "route"), ("dispatch", "pack"), ("combine", "experts")}
WAITS = necessary_waits(2)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120) as ranks:
        yield ranks


def test_every_wait_of_a_forward_is_necessary() -> None:
    assert sorted(necessary_waits(2, host_ahead=True)) == sorted(WAITS)
    assert [
        (waits, awaited, i)
        for kinds in (["resolve combine", "counts route", "read counts", "dispatch pack"],
                      ["experts dispatch", "combine experts"])
        for i in range(2)
        for waits, awaited in (pair.split() for pair in kinds)
    ] == WAITS  # fmt: skip


def body_mutant(
    group: dist.ProcessGroup, rank: int, dispatcher: str, waits: str, awaited: str, i: int, ahead: bool = False
) -> str:
    """What a schedule without one wait did: "wrong" or "right" numbers, or the error."""
    model = small_stack(group, {"dispatcher": dispatcher}, dense=LAYERS)
    want = run_forward(model, rank, 2, CPU)
    dist.barrier(group)  # else the slower rank hears of the other's error while it is still at what is wanted
    with racing(1), host_ahead(ahead), mock.patch.object(domino, "schedule", mutant(waits, awaited, i)):
        try:
            got = run_forward(model, rank, 2, CPU)
        except MoEError as err:
            return type(err).__name__
    same = [torch.equal(a, b) for a, b in zip(got, want, strict=True)]
    assert same[1 - i], "the other micro-batch waits as before"
    return "right" if same[i] else "wrong"


@pytest.mark.parametrize("dispatcher", ["all2all", "agrs"])
@pytest.mark.parametrize(("waits", "awaited", "micro_batch"), WAITS)
def test_a_removed_wait_gives_wrong_numbers(
    pool: RankPool, dispatcher: str, waits: str, awaited: str, micro_batch: int
) -> None:
    judge(waits, awaited, pool.run(body_mutant, dispatcher, waits, awaited, micro_batch))


@pytest.mark.parametrize(("waits", "awaited", "micro_batch"), WAITS)
def test_a_removed_wait_gives_wrong_numbers_where_the_host_is_ahead(
    pool: RankPool, waits: str, awaited: str, micro_batch: int
) -> None:
    judge(waits, awaited, pool.run(body_mutant, "all2all", waits, awaited, micro_batch, True))


def judge(waits: str, awaited: str, seen: list[str]) -> None:
    if (waits, awaited) in HOST_ORDER:
        assert seen == ["right", "right"]
    elif (waits, awaited) == ("read", "counts"):
        assert "ProtocolError" in seen, "counts that have not come are no counts"
        assert set(seen) <= {"ProtocolError", "PeerError"}, "a rank that hears of it first raises the other's"
    else:
        assert "wrong" in seen and set(seen) <= {"wrong", "right"}, "a rank without tokens has no wrong ones"


def body_backward(group: dist.ProcessGroup, rank: int, dispatcher: str, kind: str, i: int, ahead: bool) -> str:
    """The same where backward does not wait for the transpose of one communication."""
    model = small_stack(group, {"dispatcher": dispatcher}, dense=LAYERS)
    want = run_both_ways(model, rank, 2, CPU)
    real = Flight.wait_backward

    def wait(flight: Flight) -> tuple[torch.Tensor, ...]:
        with making(at_launch=True, at_arrival=flight._what != f"{kind} of layer 0, micro-batch {i}"):
            return real(flight)

    with racing(1), host_ahead(ahead), mock.patch.object(Flight, "wait_backward", wait):
        got = run_both_ways(model, rank, 2, CPU)
    same = [torch.equal(a, b) for a, b in zip(got, want, strict=True)]
    assert all(same[:2]) and same[3 - i], "outputs, and the gradient of the other micro-batch's input"
    return "right" if same[2 + i] else "wrong"


@pytest.mark.parametrize(("dispatcher", "ahead"), [("all2all", False), ("all2all", True), ("agrs", False)])
@pytest.mark.parametrize("micro_batch", [0, 1])
@pytest.mark.parametrize("kind", ["dispatch", "combine"])
def test_a_backward_that_does_not_wait_gives_wrong_gradients(
    pool: RankPool, dispatcher: str, ahead: bool, kind: str, micro_batch: int
) -> None:
    assert "wrong" in pool.run(body_backward, dispatcher, kind, micro_batch, ahead)


def body_seeds(group: dist.ProcessGroup, rank: int, dispatcher: str, num: int) -> None:
    model = small_stack(group, {"dispatcher": dispatcher})
    want = run_both_ways(model, rank, num, CPU)
    for seed in (1, 2, 3):
        with racing(seed), host_ahead(seed != 1):
            got = run_both_ways(model, rank, num, CPU)
        assert len(got) == len(want) > 2 * num
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), f"seed {seed}"


@pytest.mark.parametrize("num", [1, 2, 3, 4])
@pytest.mark.parametrize("dispatcher", ["all2all", "agrs"])
def test_the_schedule_gives_the_same_bits_under_every_seed(pool: RankPool, dispatcher: str, num: int) -> None:
    pool.run(body_seeds, dispatcher, num)

"""MOE_EP_RACE on two GPUs: every wait of a forward is needed, and with all of them no seed changes a number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep import DominoStack, MoEError, domino, moe_layers, race
from moe_ep.dispatch import all2all
from moe_ep.race import Race
from moe_ep.testing.ranks import RankPool
from tests.ranks.race_runs import LAYERS, mutant, necessary_waits, racing, run_both_ways, run_forward
from tests.ranks.small_stack import small_stack

pytestmark = pytest.mark.gpu(2)
LONGEST_S = 0.2
MARGIN_S = 0.03
LATE_S = 0.1
AT_LAUNCH = {("counts", "route"), ("dispatch", "pack"), ("combine", "experts")}
WAITS = necessary_waits(2, host_ahead=True)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=150) as ranks:
        yield ranks


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def model_of(group: dist.ProcessGroup, dense: tuple[bool, ...], dispatcher: str = "all2all") -> DominoStack:
    return small_stack(group, {"experts": "loop", "dispatcher": dispatcher}, dense=dense).to(here())


def telling_seed() -> int:
    """A seed under which rows come later than what the host does meanwhile.

    Rows and counts have a stream each, both with the delays of this sequence, two a launch (before and behind): rows
    D0 D1 C0 C1, counts c0 c1. The host reads c1 once it has issued E0, and nothing behind it; D0 is later than that
    all the same, and each of the others comes a while behind the one before it. The later rank holds up both.
    """
    for seed in count(1):
        ranks = [Race(seed, rank) for rank in range(2)]
        d = [max(one.delay_s() for one in ranks) for _ in range(8)]
        if d[0] > d[2] + d[3] + MARGIN_S and min(d[2], d[4], d[6]) > MARGIN_S:
            return seed
    raise AssertionError


def late() -> None:
    torch.cuda._sleep(int(LATE_S * 2e9))


@contextlib.contextmanager
def late_compute(model: DominoStack) -> Iterator[None]:
    """The compute stream is behind the host: attention, packing and experts each start late."""
    (moe,) = moe_layers(model)

    def later(name: str) -> Any:
        real = getattr(all2all, name)

        def gather(*args: Any, **options: Any) -> Any:
            late()
            return real(*args, **options)

        return mock.patch.object(all2all, name, gather)

    hooks = [part.register_forward_pre_hook(lambda *_: late()) for part in (model.layers[0].mix, moe.experts)]
    with later("gather_routes"), later("gather_rows"):
        yield
    for hook in hooks:
        hook.remove()


def poison(model: DominoStack) -> None:
    """Leave NaN in all memory that the allocator hands out next, on every stream in use."""
    (moe,) = moe_layers(model)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for stream in (
        torch.cuda.current_stream(),
        moe.dispatcher.comm(here()).stream,
        moe.dispatcher.early(here()).stream,
    ):
        with torch.cuda.stream(stream):
            blocks = [torch.full((128 * k,), torch.nan, device="cuda") for k in range(1, 17) for _ in range(500)]
            blocks += [torch.full((2**17,), torch.nan, device="cuda") for _ in range(32)]
            del blocks
    torch.cuda.synchronize()


def body_mutant(group: dist.ProcessGroup, rank: int, waits: str, awaited: str, i: int) -> str:
    """ "wrong" or "right" numbers, or the error."""
    model = model_of(group, LAYERS)
    want = run_forward(model, rank, 2, here())
    at_launch = (waits, awaited) in AT_LAUNCH
    slow = late_compute(model) if at_launch else contextlib.nullcontext()
    with mock.patch.object(race, "LONGEST_S", LONGEST_S):
        seed = telling_seed()
    with racing(seed, 0.0 if at_launch else LONGEST_S), slow:
        right = run_forward(model, rank, 2, here())
        assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(right, want, strict=True)), "nothing removed yet"
        race._race.cache_clear()
        poison(model)
        with mock.patch.object(domino, "schedule", mutant(waits, awaited, i)):
            try:
                got = run_forward(model, rank, 2, here())
                torch.cuda.synchronize()
            except MoEError as err:
                torch.cuda.synchronize()
                return type(err).__name__
    return "right" if torch.allclose(got[i], want[i], rtol=1e-5) else "wrong"


@pytest.mark.parametrize(("waits", "awaited", "micro_batch"), WAITS)
def test_a_removed_wait_gives_wrong_numbers(pool: RankPool, waits: str, awaited: str, micro_batch: int) -> None:
    seen = pool.run(body_mutant, waits, awaited, micro_batch)
    if waits == "read":
        assert "ProtocolError" in seen, "counts that have not come are no counts"
        assert set(seen) <= {"ProtocolError", "PeerError"}, "a rank that hears of it first raises the other's"
    else:
        assert set(seen) & {"wrong", "ProtocolError"}, seen


def body_seeds(group: dist.ProcessGroup, rank: int, dispatcher: str, num: int) -> None:
    model = model_of(group, (False, True, False), dispatcher)
    want = run_both_ways(model, rank, num, here())
    for seed in (1, 2, 3):
        with racing(seed, 0.02):
            got = run_both_ways(model, rank, num, here())
        assert len(got) == len(want) > 2 * num
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num", [1, 2, 3, 4])
@pytest.mark.parametrize("dispatcher", ["all2all", "agrs", "direct"])
def test_the_schedule_gives_the_same_numbers_under_every_seed(pool: RankPool, dispatcher: str, num: int) -> None:
    pool.run(body_seeds, dispatcher, num)

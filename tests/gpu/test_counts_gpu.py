"""Counts have an NCCL communicator and a stream of their own: the host reads them while rows are under way."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from moe_ep import close_dispatchers, moe_layers
from moe_ep.testing.ranks import RankPool
from tests.ranks.race_runs import on, run_both_ways
from tests.ranks.small_stack import small_stack

pytestmark = pytest.mark.gpu(2)
SLEEP_S = 0.5


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=120) as ranks:
        yield ranks


def body_launches(group: dist.ProcessGroup, rank: int, dispatcher: str) -> tuple[float, bool]:
    """Seconds until both micro-batches are launched while the comm stream sleeps; whether it still slept then."""
    device = torch.device("cuda", torch.cuda.current_device())
    model = small_stack(group, {"dispatcher": dispatcher, "experts": "loop"}, dense=(False,)).to(device)
    run_both_ways(model, rank, 2, device)  # communicators are made at their first use
    (layer,) = moe_layers(model)
    torch.cuda.synchronize()
    comm = layer.dispatcher.comm(device).stream
    assert comm is not None
    dist.barrier(group=group)
    with torch.cuda.stream(comm):
        torch.cuda._sleep(int(SLEEP_S * 2e9))
    begin = time.perf_counter()
    flights = [layer.launch_dispatch(x, micro_batch=i) for i, x in enumerate(on(device, rank, 2))]
    seconds, asleep = time.perf_counter() - begin, not comm.query()
    for flight in flights:
        layer.launch_combine(flight)
        layer.resolve(flight)
    torch.cuda.synchronize()
    return seconds, asleep


@pytest.mark.parametrize("dispatcher", ["all2all", "agrs"])
def test_the_second_launch_does_not_wait_for_the_first_ones_rows(pool: RankPool, dispatcher: str) -> None:
    for seconds, asleep in pool.run(body_launches, dispatcher):
        assert asleep and seconds < SLEEP_S / 2


def body_again(group: dist.ProcessGroup, rank: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for _ in range(3):
        run_both_ways(small_stack(group, {"experts": "loop"}).to(device), rank, 2, device)
        torch.cuda.synchronize()
        close_dispatchers(group)


def test_the_communicator_of_counts_is_closed_and_made_again(pool: RankPool) -> None:
    pool.run(body_again)

"""The rank launcher itself: results, sub-groups, exceptions, dead ranks, hangs."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from moe_ep.testing import ranks
from moe_ep.testing.ranks import RankError, RankPool, pick_start_method, run_ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=30) as four:
        yield four


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers of a failed rank get a moment, as always, but a short one."""
    monkeypatch.setattr(ranks, "GRACE_S", 0.5)


def add_ranks(group: dist.ProcessGroup, rank: int, start: float) -> tuple[int, float, int]:
    total = torch.tensor([start + rank])
    dist.all_reduce(total, group=group)
    return rank, total.item(), dist.get_world_size(group)


def process_id(group: dist.ProcessGroup, rank: int) -> int:
    return os.getpid()


def num_threads(group: dist.ProcessGroup, rank: int) -> int:
    return torch.get_num_threads()


def fail_on(group: dist.ProcessGroup, rank: int, bad: int) -> None:
    if rank == bad:
        raise KeyError(f"only rank {bad}")


def skip_collective_on(group: dist.ProcessGroup, rank: int, bad: int) -> None:
    if rank != bad:
        dist.barrier(group)


def fail_before_collective(group: dist.ProcessGroup, rank: int) -> None:
    fail_on(group, rank, 1)
    dist.barrier(group)


def kill_self_on(group: dist.ProcessGroup, rank: int, bad: int) -> None:
    if rank == bad:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_sub_groups_of_one_pool(pool: RankPool, num_ranks: int) -> None:
    want = 10.0 * num_ranks + sum(range(num_ranks))
    assert pool.run(add_ranks, 10.0, num_ranks=num_ranks) == [(r, want, num_ranks) for r in range(num_ranks)]


def test_ranks_start_once(pool: RankPool) -> None:
    first = pool.run(process_id)
    assert len({*first, os.getpid()}) == 5
    assert pool.run(process_id) == first


def test_ranks_share_the_cores(pool: RankPool) -> None:
    assert pool.run(num_threads) == [1, 1, 1, 1]


def test_an_exception_comes_back_with_rank_and_traceback_and_the_pool_goes_on(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 2 failed") as error:
        pool.run(fail_on, 2)
    assert list(error.value.failures) == [2]
    assert "KeyError: 'only rank 2'" in str(error.value) and "in fail_on" in str(error.value)
    assert [value[0] for value in pool.run(add_ranks, 0.0)] == [0, 1, 2, 3]


def test_a_hang_ends_in_time_with_every_late_ranks_stack(pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[0, 1, 2\] were not done after 1 s") as error:
        pool.run(skip_collective_on, 3, timeout_s=1)
    assert time.monotonic() - start < 10
    assert sorted(error.value.failures) == [0, 1, 2]
    for text in error.value.failures.values():
        assert "skip_collective_on" in text and "barrier" in text


@pytest.mark.usefixtures("impatient")
def test_peers_of_a_failed_rank_are_not_waited_for(pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="only rank 1") as error:
        pool.run(fail_before_collective, timeout_s=60)
    assert time.monotonic() - start < 15
    assert sorted(error.value.failures) == [0, 1, 2, 3]
    assert "fail_before_collective" in error.value.failures[3]


def test_a_killed_rank_is_named_with_its_exit_code(pool: RankPool) -> None:
    pool.run(process_id)  # all have joined: a rank that dies earlier takes others' start down with it
    with pytest.raises(RankError, match="died with exit code -9") as error:
        pool.run(kill_self_on, 0)
    assert list(error.value.failures) == [0]


@pytest.mark.usefixtures("impatient")
def test_a_rank_killed_between_calls_is_reported_at_the_next(pool: RankPool) -> None:
    os.kill(pool.run(process_id)[1], signal.SIGKILL)
    with pytest.raises(RankError, match="died with exit code -9"):
        pool.run(add_ranks, 0.0)


def test_forkserver_ranks_find_functions_by_name() -> None:
    assert [value[1] for value in run_ranks(add_ranks, 2, 1.0, start_method="forkserver")] == [3.0, 3.0]


def test_start_method_is_fork_only_where_that_is_safe() -> None:
    assert pick_start_method("cuda") == "forkserver"
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert pick_start_method() == "forkserver"
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("num_ranks", [0, 5])
def test_a_count_outside_the_pool_is_refused(pool: RankPool, num_ranks: int) -> None:
    with pytest.raises(ValueError, match=rf"num_ranks must be in \[1, 4\] for this pool, got {num_ranks}"):
        pool.run(process_id, num_ranks=num_ranks)


def test_a_function_without_a_name_is_refused_before_any_rank_sees_it(pool: RankPool) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pool.run(lambda group, rank: rank)
    assert len(pool.run(process_id)) == 4

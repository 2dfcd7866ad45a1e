"""Process groups beside a group: made by its ranks alone, closed and made again, with the group's own timeout."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep import DispatchConfig, Routing, build_dispatcher, close_dispatchers, streams
from moe_ep.dispatch import twin
from moe_ep.dispatch.collectives import all_gather
from moe_ep.dispatch.twin import close_twins, open_twin
from moe_ep.testing.ranks import RankPool

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3, timeout_s=60) as ranks:
        yield ranks


def timeout_of(group: Any) -> timedelta:
    return group._get_backend(CPU).options._timeout


def talk(group: Any) -> list[int]:
    said = torch.zeros(group.size(), dtype=torch.int64)
    dist.all_gather_into_tensor(said, torch.tensor([10 * group.rank()]), group=group)
    return said.tolist()


def body_twins(world: dist.ProcessGroup, rank: int) -> None:
    """Ranks 1 and 2 make twins while rank 0 does nothing, and while they know different numbers of groups."""
    group = dist.new_group([1, 2], timeout=timedelta(seconds=17))
    if rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    if rank == 0:
        return
    assert open_twin(None, "counts") is None
    seen = set()
    for _ in range(3):
        first, second = open_twin(group, "counts"), open_twin(group, "checks")
        assert len({id(g) for g in (group, first, second)}) == 3
        assert open_twin(group, "counts") is first
        assert timeout_of(first) == timeout_of(second) == timedelta(seconds=17)
        assert talk(second) == talk(first) == talk(group) == [0, 10]
        seen |= {first.group_name, second.group_name}  # type: ignore[union-attr]
        assert set(map(id, close_twins(group))) == {id(first), id(second)}
    assert len(seen) == 6, "a name is never used again"


def test_twins_are_made_by_their_ranks_alone(pool: RankPool) -> None:
    pool.run(body_twins)


def body_dispatchers(group: dist.ProcessGroup, rank: int) -> None:
    """Dispatchers of a group share its twin; closing them closes it."""
    for _ in range(2):
        made = [
            build_dispatcher(DispatchConfig(name=name, num_experts=6, top_k=2, hidden_size=hidden, max_tokens=4), group)
            for name, hidden in (("all2all", 4), ("all2all", 8), ("agrs", 4))
        ]
        groups = {d.early(CPU).group for d in made}
        assert len(groups) == 1 and group not in groups
        assert {id(d.comm(CPU).group) for d in made} == {id(group)}
        close_dispatchers(group)
        assert not any(key[0] is group for key in twin._twins)
        names = {group.group_name for group in groups}
        assert not any(key[1] in names for key in streams._streams), "no stream is left of a closed group"


def test_dispatchers_share_a_groups_twin_and_close_it(pool: RankPool) -> None:
    pool.run(body_dispatchers)


def body_strange(group: dist.ProcessGroup, rank: int) -> None:
    """Over a back end that is not known here, counts travel in the group itself, and the log says so."""
    close_dispatchers(group)
    config = DispatchConfig(name="all2all", num_experts=3, top_k=1, hidden_size=4)
    with mock.patch.object(twin, "_like", lambda *_: None):
        dispatcher = build_dispatcher(config, group)
    assert dispatcher.early(CPU).group is group and dispatcher.early(CPU) is not dispatcher.comm(CPU)
    assert "counts in line behind rows (the group's back end cannot be opened twice)" in dispatcher.describe()
    ids = torch.full((rank, 1), 2)
    ticket = dispatcher.dispatch_preprocess(
        torch.ones(rank, 4), Routing(expert_ids=ids, weights=torch.ones(rank, 1), num_experts=3)
    )
    dispatcher.dispatch(ticket)
    assert dispatcher.dispatch_postprocess(ticket).capacity == (3 if rank == 2 else 0)
    close_dispatchers(group)
    assert "counts in line" not in build_dispatcher(config, group).describe()


def test_a_group_that_cannot_be_opened_twice_serves_alone(pool: RankPool) -> None:
    pool.run(body_strange)


def body_error(group: dist.ProcessGroup, rank: int) -> None:
    """What a collective of a twin raises is the collective's own error."""
    config = DispatchConfig(name="all2all", num_experts=3, top_k=1, hidden_size=4)
    counts = build_dispatcher(config, group).early(CPU).group
    with pytest.raises((RuntimeError, ValueError)) as err:
        all_gather(torch.zeros(7), torch.zeros(3), counts)
    assert "world group map" not in str(err.value), "torch's own, about a group that it does not know"


def test_the_error_of_a_twin_is_its_own(pool: RankPool) -> None:
    pool.run(body_error)

"""The contract suite on gloo: every dispatcher of this package on every case, and what is said about it elsewhere."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import build_dispatcher, close_dispatchers
from moe_ep.errors import InputError, MoEError, PeerError
from moe_ep.routing import Routing
from moe_ep.testing import contract
from moe_ep.testing.ranks import RankPool
from moe_ep.testing.table import COLUMNS, TABLE

KINDS = list(dict.fromkeys(case.name.split("/")[0] for case in contract.CASES))
PAIRED = ("all2all", "agrs")


def in_fast_tier(name: str, case: contract.Case) -> bool:
    """What runs on 2 and on 4 ranks runs here on 4 with one dispatcher and on 2 with the other, in turn.

    So every case meets every dispatcher, either number of ranks meets every case, and each dispatcher meets both.
    """
    kind = case.name.split("/")[0]
    own_form = name == "agrs" and kind.startswith("grouped-static-rows")
    if name not in PAIRED or own_form or case.num_ranks == 1 or not {f"{kind}/R2", f"{kind}/R4"} <= TABLE.keys():
        return True
    return case.num_ranks == (2, 4)[(KINDS.index(kind) + PAIRED.index(name)) % 2]


CELLS = [
    pytest.param(
        name,
        case,
        TABLE[case.name][column],
        id=f"{name}-{case.name}",
        marks=[] if in_fast_tier(name, case) else [pytest.mark.slow],
    )
    for column, name in enumerate(COLUMNS)
    for case in contract.CASES
    if case.name in TABLE
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=60) as ranks:
        yield ranks


@pytest.mark.parametrize(("name", "case", "refusal"), CELLS)
def test_contract(pool: RankPool, name: str, case: contract.Case, refusal: str) -> None:
    contract.check(pool, name, case, refusal=refusal)


def test_the_table_has_a_row_for_every_case_and_no_other() -> None:
    assert list(TABLE) == [case.name for case in contract.CASES]
    assert all(len(row) == len(COLUMNS) for row in TABLE.values())


def test_a_dispatcher_that_runs_where_a_refusal_is_expected_is_found(pool: RankPool) -> None:
    case = contract.CASES[0]
    assert contract.find_problems(pool, "all2all", case, refusal="any text") == [
        "rank 0: the refusal is None, expected 'any text' in it"
    ]


def random_case(seed: int) -> contract.Case:
    """Sizes, routing, layouts and the order of up to four micro-batches, drawn by the seed."""
    draw = random.Random(seed)
    num_ranks = draw.choice([1, 2, 4])
    num_experts = num_ranks * draw.randint(1, 4)
    routing = draw.choice(["uniform", "skewed", "holes", "duplicates", "no_routes_on_last_rank"])
    batches = draw.randint(1, 4)
    left = {index: list("pdecf") for index in range(batches)}
    steps = []
    while any(left.values()):
        index = draw.choice([index for index, stages in left.items() if stages])
        steps.append(f"{left[index].pop(0)}{index}")
    backward = " ".join(map(str, draw.sample(range(batches), batches)))
    return contract.Case(
        name=f"random-{seed}/R{num_ranks}",
        num_ranks=num_ranks,
        num_experts=num_experts,
        top_k=draw.randint(1, min(num_experts, 5)),
        tokens=tuple(draw.choice([0, 1, 3, 6, 9]) for _ in range(num_ranks)),
        hidden=draw.randint(1, 9),
        routing=routing,
        dtype=draw.choice(["float32", "bfloat16"]),
        x_layout=draw.choice(["plain", "transposed", "slice"]),
        dy_layout=draw.choice(["plain", "transposed", "expanded"]),
        driver="schedule",
        argument=f"{' '.join(steps)} | {draw.choice(['joint', backward])}",
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("name", ["all2all", "agrs"])
def test_random_shapes_and_orders(pool: RankPool, name: str, seed: int) -> None:
    contract.check(pool, name, random_case(seed))


def count_forwards_alone(group: dist.ProcessGroup, rank: int, name: str) -> int:
    """Without a group ranks owe each other nothing: rank r makes r + 1 steps."""
    config = DispatchConfig(name=name, num_experts=4, top_k=2, hidden_size=4, max_tokens=8)
    dispatcher = build_dispatcher(config)
    for _ in range(rank + 1):
        x = torch.ones(3, 4, requires_grad=True)
        routing = Routing(expert_ids=torch.tensor([[0, 3]] * 3), weights=torch.ones(3, 2), num_experts=4)
        ticket = dispatcher.dispatch_preprocess(x, routing)
        dispatcher.dispatch(ticket)
        rows = dispatcher.dispatch_postprocess(ticket).rows()
        dispatcher.combine_preprocess(ticket, rows)
        dispatcher.combine(ticket)
        y = dispatcher.combine_postprocess(ticket)
        y.sum().backward()
        assert y.tolist() == [[2.0] * 4] * 3 and x.grad is not None and x.grad.tolist() == [[2.0] * 4] * 3
    close_dispatchers(None)
    return rank + 1


@pytest.mark.parametrize("name", COLUMNS)
def test_one_rank_needs_no_group_and_makes_no_collective(pool: RankPool, name: str) -> None:
    assert pool.run(count_forwards_alone, name) == [1, 2, 3, 4]


def stray_group(group: dist.ProcessGroup, rank: int) -> str:
    """agrs in its grouped form trusts the router's promise, so it has to check it."""
    config = DispatchConfig(
        name="agrs", num_experts=4, top_k=2, hidden_size=4, max_tokens=2, router="grouped", num_groups=2
    )
    dispatcher = build_dispatcher(config, group)
    ids = torch.tensor([[1, 0]]) if rank == 1 else torch.tensor([[1, 3]])
    try:
        ticket = dispatcher.dispatch_preprocess(
            torch.ones(1, 4), Routing(expert_ids=ids, weights=torch.ones(1, 2), num_experts=4), layer=5
        )
        dispatcher.dispatch(ticket)
    except MoEError as err:
        return f"{type(err).__name__}: {err}"
    finally:
        close_dispatchers(group)
    return "nothing was raised"


def test_a_broken_promise_of_the_grouped_router_is_refused_on_every_rank(pool: RankPool) -> None:
    peer, own = pool.run(stray_group, num_ranks=2)
    words = "layer 5, micro-batch 0: 1 routes of the grouped router name an expert outside their column's rank"
    assert own == f"{InputError.__name__}: {words}"
    assert peer == f"{PeerError.__name__}: rank 1 reported a fault, so that no rank goes on: {words}"


def other_software(group: dist.ProcessGroup, rank: int) -> str:
    built = {"moe_ep": "0.1.0", "its kernels": ["aaaa", "bbbb"][rank], "torch": ["2.11.0", "2.13.0"][rank]}
    with mock.patch("moe_ep.dispatch.registry.versions", lambda: built):
        try:
            build_dispatcher(DispatchConfig(name="all2all", num_experts=4, top_k=1, hidden_size=4), group)
        except MoEError as err:
            return f"{type(err).__name__}: {err}"
    return "nothing was raised"


def test_ranks_of_other_versions_all_hear_of_it(pool: RankPool) -> None:
    said = pool.run(other_software, num_ranks=2)
    differ = "its kernels is 'aaaa' on rank 0, 'bbbb' on rank 1; torch is '2.11.0' on rank 0, '2.13.0' on rank 1"
    words = f"the ranks disagree about the dispatcher: {differ}. Give all ranks the same recipe and the same software"
    assert said == [f"PeerError: {words}"] * 2


def disagree(group: dist.ProcessGroup, rank: int) -> str:
    config = DispatchConfig(name="all2all", num_experts=4, top_k=1 + rank, hidden_size=4)
    try:
        build_dispatcher(config, group)
    except MoEError as err:
        return f"{type(err).__name__}: {err}"
    return "nothing was raised"


def test_ranks_that_disagree_about_the_configuration_all_hear_of_it(pool: RankPool) -> None:
    said = pool.run(disagree, num_ranks=2)
    assert said[0] == said[1]
    assert said[0].startswith("PeerError: the ranks disagree about the dispatcher: ")
    assert re.search("top_k is 1 on rank 0.* 2 on rank 1", said[0])

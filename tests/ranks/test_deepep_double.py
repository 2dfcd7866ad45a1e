"""Every contract that the doubles of DeepEP list, broken once: a double that lets one pass would prove nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.testing.ranks import RankPool
from tests.ranks import deepep_double
from tests.ranks.deepep_double import Buffer, Config, ElasticBuffer

E, K, T, H = 8, 2, 4, 256
IDS = torch.tensor([[0, 5], [1, 2], [-1, 7], [4, 3]])


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=60) as ranks:
        yield ranks


def rows(**changes: Any) -> dict[str, Tensor]:
    return {"x": torch.ones(T, H).bfloat16(), "topk_idx": IDS, "topk_weights": torch.ones(T, K)} | changes


class First:
    """V1 with the calls made right, to be made wrong in one point."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.config = Config(8, 24, 256)
        self.buffer = Buffer(group, self.config.get_nvl_buffer_size_hint(2 * H, 2), explicitly_destroy=True)
        self.rank = group.rank()

    def dispatch(self, layout_of: Tensor | None = None, config: Config | None = None, **changes: Any) -> Any:
        given = rows(**changes)
        ids = given["topk_idx"] if layout_of is None else layout_of
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(ids, E)
        layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=in_rank)
        return self.buffer.dispatch(**given, **layout, config=config or self.config)

    def then(self, call: str, rows_changed: Callable[[Tensor], Tensor] = lambda x: x, **changes: Any) -> None:
        source, *_, handle, _ = self.dispatch()
        given = rows_changed(source if call == "combine" else rows()["x"])
        getattr(self.buffer, call)(given, handle=handle, **({"config": self.config} | changes))


class Second:
    """V2, alike."""

    def __init__(self, group: dist.ProcessGroup, **changes: Any) -> None:
        sizes = dict(num_max_tokens_per_rank=T, hidden=H, num_topk=K, allow_hybrid_mode=False, explicitly_destroy=True)
        os.environ["EP_DISABLE_GIN"] = "1"
        self.buffer = ElasticBuffer(group, **(sizes | changes))

    def dispatch(self, **changes: Any) -> Any:
        return self.buffer.dispatch(**(rows(num_experts=E, num_sms=8) | changes))

    def then(self, call: str, do_expand: bool = False, **changes: Any) -> None:
        source, _, _, handle, _ = self.dispatch(do_expand=do_expand)
        given = source if call == "combine" else rows()["x"]
        getattr(self.buffer, call)(**({"x": given, "handle": handle} | changes))


def other_order(one: First) -> None:
    if one.rank == 0:
        one.dispatch()
    else:
        one.buffer.destroy()


def another_bound(group: dist.ProcessGroup) -> None:
    Second(group, num_max_tokens_per_rank=T + group.rank())


def without_gin(group: dist.ProcessGroup) -> None:
    os.environ.pop("EP_DISABLE_GIN", None)
    ElasticBuffer(group, num_max_tokens_per_rank=T, hidden=H, num_topk=K, allow_hybrid_mode=False)


def changed_ids(group: dist.ProcessGroup) -> None:
    two, ids = Second(group), IDS.clone()
    *_, handle, _ = two.dispatch(topk_idx=ids, do_handle_copy=False)
    ids.fill_(0)
    two.buffer.dispatch(rows()["x"], handle=handle, num_sms=8)


def twice_destroyed(group: dist.ProcessGroup) -> None:
    one = First(group)
    one.buffer.destroy()
    one.buffer.destroy()


def used_after_destroy(one: First) -> None:
    one.buffer.destroy()
    one.dispatch()


def other_sms(one: First) -> None:
    one.dispatch(config=Config(8 + 2 * one.rank, 24, 256))


def too_many_experts(one: First) -> None:
    """129 of a rank."""
    per_rank, _, per_expert, in_rank, _ = one.buffer.get_dispatch_layout(IDS, 258)
    layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=in_rank)
    one.buffer.dispatch(**rows(), **layout, config=one.config)


def freed_ids(one: First) -> None:
    """The host lets go of them right behind the call, while kernels still read them."""
    one.buffer.lags, given = True, rows()
    one.dispatch(**(given | {"topk_idx": IDS.clone()}))
    one.buffer.under_way().wait()


def early_reuse(one: First) -> None:
    """Another computation gets the memory of x before the stream was waited for."""
    one.buffer.lags, x = True, torch.ones(T, H).bfloat16()
    one.dispatch(x=x)
    x.fill_(2)
    one.buffer.under_way().wait()


def freed_handle(one: First) -> None:
    source, *_, handle, _ = one.dispatch()
    one.buffer.lags = True
    one.buffer.combine(source, handle=handle, config=one.config)
    del handle
    one.buffer.under_way().wait()


ODD = Config(10, 24, 256)
WIDE = torch.ones(T, 2 * K)
DOUBLED = torch.tensor([[0, 0], [1, 2], [-1, 7], [4, 3]])
BROKEN: list[tuple[str, Callable[[dist.ProcessGroup], Any]]] = [
    ("B1", lambda g: other_order(First(g))),
    ("B2", lambda g: First(g).dispatch(x=torch.ones(H, T).bfloat16().t())),
    ("B2", lambda g: First(g).dispatch(topk_weights=WIDE[:, ::2])),
    ("B2", lambda g: First(g).dispatch(topk_weights=torch.ones(T, K).double())),
    ("B2", lambda g: First(g).dispatch(topk_idx=IDS.int())),
    ("B2 (tokens", lambda g: First(g).dispatch(x=torch.ones(T + 1, H).bfloat16())),
    ("B2", lambda g: First(g).then("combine", lambda x: x[:-1])),
    ("B2 (weights of combine", lambda g: First(g).then("combine", topk_weights=torch.ones(1, K))),
    ("B2", lambda g: First(g).then("combine", lambda x: x.t().contiguous().t())),
    ("B3", lambda g: First(g).then("combine", lambda x: x.float())),
    ("B3", lambda g: Second(g).then("combine", x=torch.ones(T, H))),
    ("B4", lambda g: Second(g).dispatch(topk_idx=IDS + 1)),
    ("B5", twice_destroyed),
    ("B5 (used after destroy", lambda g: used_after_destroy(First(g))),
    ("B6", changed_ids),
    ("B6 (ids of dispatch was freed", lambda g: freed_ids(First(g))),
    ("B6 (x of dispatch was changed", lambda g: early_reuse(First(g))),
    ("B6 (handle_sizes of combine was freed", lambda g: freed_handle(First(g))),
    ("B7", lambda g: First(g).dispatch(**{k: v[:0] for k, v in rows().items()})),
    ("B7", lambda g: Second(g).dispatch(**{k: v[:0] for k, v in rows().items()})),
    ("V1a", lambda g: Buffer.set_num_sms(7)),
    ("V1a", lambda g: First(g).then("dispatch", config=ODD)),
    ("V1a", lambda g: First(g).then("combine", config=ODD)),
    ("V1a", lambda g: First(g).then("combine", config=None)),
    ("V1a (ranks use different numbers of SMs", lambda g: other_sms(First(g))),
    ("V1b", lambda g: First(g).dispatch(layout_of=IDS.flip(0))),
    ("V1c", lambda g: First(g).then("dispatch", topk_idx=IDS, topk_weights=torch.ones(T, K))),
    ("V1c (rows", lambda g: First(g).then("dispatch", lambda x: x[:-1])),
    ("V1e", lambda g: First(g).dispatch(x=torch.ones(T, 64 * H).bfloat16())),
    ("V1e", lambda g: Buffer(g, 128, 128, explicitly_destroy=True)),
    ("V1f", lambda g: First(g).dispatch(x=torch.ones(T, 8).bfloat16())),
    ("V1f", lambda g: too_many_experts(First(g))),
    ("V2a", another_bound),
    ("V2a", lambda g: Second(g).dispatch(**{k: torch.cat([v, v]) for k, v in rows().items()})),
    ("V2b", lambda g: Second(g).dispatch(num_sms=0)),
    ("V2b", lambda g: Second(g).then("dispatch")),
    ("V2b", lambda g: Second(g).then("combine", num_sms=10)),
    ("V2e", lambda g: Second(g).dispatch(topk_idx=DOUBLED)),
    ("V2f", lambda g: Second(g).then("dispatch", do_expand=True, num_sms=8)),
    ("V2f", lambda g: Second(g).then("combine", do_expand=True, x=torch.ones(1, H).bfloat16())),
    ("V2f (rows)", lambda g: Second(g).then("dispatch", x=torch.ones(T - 1, H).bfloat16(), num_sms=8)),
    ("V2f (weights of combine", lambda g: Second(g).then("combine", topk_weights=torch.ones(1, K))),
    ("V2g", lambda g: Second(g, hidden=128)),
    ("V2g", lambda g: Second(g).dispatch(x=torch.ones(T, 2 * H).bfloat16())),
    ("V2i", lambda g: Second(g, num_topk=0)),
    ("V2i", lambda g: Second(g, num_topk=K - 1).dispatch()),
    ("V2h", without_gin),
    ("V2h", lambda g: Second(g, allow_hybrid_mode=True)),
]


def break_it(group: dist.ProcessGroup, rank: int, number: int) -> str:
    try:
        BROKEN[number][1](group)
    except AssertionError as err:
        return str(err)
    return "nothing was raised"


@pytest.mark.parametrize("number", range(len(BROKEN)), ids=[f"{name}-{i}" for i, (name, _) in enumerate(BROKEN)])
def test_a_broken_contract_is_seen(pool: RankPool, number: int) -> None:
    for said in pool.run(break_it, number):
        assert said.startswith(f"contract {BROKEN[number][0]}") and "is broken" in said


# contracts on what the library hands over: there is nothing to call wrong
HANDED_OVER = {"V1d", "V2c", "V2d"}


def test_every_contract_that_is_listed_is_broken_once() -> None:
    listed = set(re.findall(r"^  (B\d|V\d\w) ", deepep_double.__doc__ or "", re.MULTILINE))
    assert len(listed) > 20
    assert {name.split()[0] for name, _ in BROKEN} | HANDED_OVER == listed


def weights_that_came(group: dist.ProcessGroup, rank: int) -> list[tuple[list[int], Tensor, Tensor]]:
    """Of each interface: the source tokens of the rows in their order, ids and weights."""
    weights = 1 + torch.arange(float(T * K)).view(T, K)
    one, two = First(group).dispatch(topk_weights=weights), Second(group).dispatch(topk_weights=weights)
    return [(one[4][3].tolist(), *one[1:3]), (two[3].recv_src_metadata[:, 0].tolist(), *two[1:3])]


def test_what_is_handed_over_is_what_the_contracts_say(pool: RankPool) -> None:
    """V1d and V2d; where neither slot has a route here, the token has not come."""
    for rank, ((tokens, ids, weights), (sources, ids2, weights2)) in enumerate(pool.run(weights_that_came)):
        owned = [t for t in range(T) if any(expert // 4 == rank for expert in IDS[t].tolist() if expert >= 0)]
        sent = 1 + torch.arange(float(T * K)).view(T, K)
        assert tokens == owned * 2, "by source rank and token"
        assert torch.equal(weights, torch.where(ids >= 0, sent[tokens], 0.0)) and (ids < 0).any()
        assert torch.equal(weights2, sent[[source % T for source in sources]]) and (ids2 < 0).any()


def made_right(group: dist.ProcessGroup, rank: int) -> None:
    one, two = First(group), Second(group)
    one.buffer.lags, given = True, rows()
    source, *_, handle, _ = one.dispatch(**given)  # the handle lives
    assert source.isnan().all(), "rows were there before anybody waited"
    one.buffer.under_way().wait()
    assert source.eq(1).all() and len(handle) == 6
    one.dispatch()
    one.then("dispatch")
    one.then("combine")
    for expand in (False, True):
        two.then("combine", do_expand=expand)
    one.buffer.destroy()
    two.buffer.destroy()


def test_calls_made_right_pass(pool: RankPool) -> None:
    pool.run(made_right)


def arrivals(group: dist.ProcessGroup, rank: int) -> list[list[int]]:
    """V2c: the same call twice, and the sources of the rows that came."""
    two = Second(group, num_max_tokens_per_rank=64)
    big = dict(
        x=torch.ones(64, H).bfloat16(), topk_idx=torch.arange(128).view(64, 2) % E, topk_weights=torch.ones(64, 2)
    )
    return [two.dispatch(**big)[3].recv_src_metadata[:, 0].tolist() for _ in range(2)]


def test_the_order_of_arrival_changes(pool: RankPool) -> None:
    for first, second in pool.run(arrivals):
        assert first != second and sorted(first) == sorted(second)

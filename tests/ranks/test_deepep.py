"""`deepep` over doubles of the library (see deepep_double): the contract suite, and what it does beside it."""

from __future__ import annotations

import contextlib
import io
import re
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import Capabilities, build_dispatcher, close_dispatchers, register_dispatcher
from moe_ep.dispatch.deepep import DeepEP
from moe_ep.dispatch.deepep_library import limit_reasons
from moe_ep.dispatch.deepep_transfer import DispatchTransfer
from moe_ep.errors import MoEError, PeerError
from moe_ep.routing import Routing
from moe_ep.testing import contract
from moe_ep.testing.ranks import RankPool
from moe_ep.testing.table_deepep import DEEPEP, DTYPE, FORMS, HIDDEN
from tests.gpu.small_training import Setup, interleaved_equals_serial, train
from tests.ranks import deepep_double


@register_dispatcher("deepep_double")
class DoubledDeepEP(DeepEP):
    """The adapter as it is, over the doubles and on the CPU."""

    name: ClassVar[str] = "deepep_double"
    capabilities: ClassVar[Capabilities] = replace(DeepEP.capabilities, devices=("cpu",))
    library: ClassVar[Any] = None

    @classmethod
    def load_library(cls) -> tuple[Any, str]:
        both = {**vars(deepep_double.V1), **vars(deepep_double.V2)}
        return type("deep_ep", (), both), ""

    @classmethod
    def machine_reasons(cls, api: str, num_sms: int) -> list[str]:
        return []

    @classmethod
    def _own_device(cls) -> torch.device:
        return torch.device("cpu")

    def comm(self, device: torch.device) -> Any:
        link: Any = self.link
        return deepep_double.LateStream(super().comm(device), link._buffer)


# what api v2 does differently; the rest of its cases, and four ranks, are left to the slow tier
OWN_OF_V2 = {
    *("uniform", "bfloat16", "no-route-slots", "duplicates", "zero-tokens-on-some-ranks", "zero-tokens-everywhere"),
    *("top-1", "transposed-x", "expanded-gradient", "no-grad", "two-tickets-crossed", "four-tickets", "recompute"),
    *("recompute-with-an-empty-rank", "tensors-are-freed", "backward-twice", "poisoned-memory-3-steps"),
    *("fault-bad-id", "fault-too-many-tokens", "512-experts", "max-tokens-unset", "abandoned-tickets"),
}


def in_fast_tier(form: str, case: contract.Case) -> bool:
    return case.num_ranks == 2 and (form == "v1" or case.name.split("/")[0] in OWN_OF_V2)


CELLS = [
    pytest.param(
        form,
        case,
        DEEPEP[case.name][column],
        id=f"{form}-{case.name}",
        marks=[] if in_fast_tier(form, case) else [pytest.mark.slow],
    )
    for column, form in enumerate(FORMS)
    for case in contract.CASES
    if case.num_ranks == 2 or (form == "v1" and case.num_ranks == 4 and case.driver in ("repeat", "fault"))
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=60) as ranks:
        yield ranks


def fit(case: contract.Case, form: str) -> contract.Case:
    return contract.fitted(case, DTYPE, HIDDEN, FORMS[form])


@pytest.mark.parametrize(("form", "case", "refusal"), CELLS)
def test_contract(pool: RankPool, form: str, case: contract.Case, refusal: str) -> None:
    contract.check(pool, "deepep_double", fit(case, form), refusal=refusal, modules=(__name__,))


def test_the_table_has_a_row_for_every_case_and_no_other() -> None:
    assert list(DEEPEP) == [case.name for case in contract.CASES]
    assert all(len(row) == len(FORMS) for row in DEEPEP.values())


def config(**changes: Any) -> DispatchConfig:
    sizes = dict(name="deepep_double", num_experts=8, top_k=2, hidden_size=HIDDEN, dtype=DTYPE, max_tokens=8)
    return DispatchConfig(**(sizes | changes))  # type: ignore[arg-type]


def micro_batch(rank: int, num_tokens: int = 4) -> tuple[torch.Tensor, Routing]:
    gen = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, HIDDEN, generator=gen).bfloat16().requires_grad_()
    ids = torch.rand(num_tokens, 8, generator=gen).argsort(1)[:, :2]
    return x, Routing(expert_ids=ids, weights=torch.rand(num_tokens, 2, generator=gen), num_experts=8)


def said_at_construction(group: dist.ProcessGroup, rank: int, changes: list[dict[str, Any]]) -> str:
    try:
        build_dispatcher(config(**changes[rank]), group)
    except MoEError as err:
        return f"{type(err).__name__}: {err}"
    finally:
        close_dispatchers(group)
    return "built"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(options=(("api", "v3"),)), "api must be 'v1' or 'v2', got 'v3'"),
        (dict(options=(("expand", 1),)), "expand must be true or false, got 1"),
        (dict(options=(("api", "v1"), ("expand", True))), "expand = true needs api = 'v2'"),
        (dict(num_sms=7), "num_sms must be even and at least 2 (half of them send, half receive), got 7"),
        (dict(hidden_size=8192), "at most 8176, got 8192; take api = 'v2'"),
        (dict(options=(("api", "v2"),), hidden_size=272), "a multiple of 256, got 272"),
        (dict(options=(("api", "v2"),), num_experts=4096), "at most 2048 experts and 256 per rank, got 4096 and 2048"),
        (dict(top_k=33, num_experts=64), "a top_k of at most 32, got 33"),
    ],
)
def test_what_the_library_cannot_do_is_refused_at_construction(
    pool: RankPool, changes: dict[str, Any], words: str
) -> None:
    for said in pool.run(said_at_construction, [changes] * 2, num_ranks=2):
        assert said.startswith("Unavailable: ") and words in said


def test_hidden_sizes_at_the_librarys_limits_are_built(pool: RankPool) -> None:
    for changes in (dict(hidden_size=272), dict(hidden_size=8176), dict(options=(("api", "v2"),), hidden_size=8192)):
        assert pool.run(said_at_construction, [changes] * 2, num_ranks=2) == ["built"] * 2, changes


def test_ranks_with_another_form_hear_of_it(pool: RankPool) -> None:
    first, second = pool.run(
        said_at_construction, [dict(options=(("api", "v1"),)), dict(options=(("api", "v2"),))], num_ranks=2
    )
    assert first == second
    assert first.startswith("PeerError: the ranks disagree about the dispatcher: options is")


@pytest.mark.parametrize(
    ("key", "value"), [("max_tokens", 7), ("top_k", 4), ("hidden_size", 512), ("num_experts", 16), ("num_sms", 8)]
)
def test_every_rank_names_a_size_that_differs_on_one(pool: RankPool, key: str, value: int) -> None:
    first, second = pool.run(said_at_construction, [{}, {key: value}], num_ranks=2)
    assert first == second
    assert f"{key} is {getattr(config(), key)!r} on rank 0, {value} on rank 1" in first


def test_a_dtype_that_one_rank_alone_cannot_have_is_told_to_the_other(pool: RankPool) -> None:
    for said in pool.run(said_at_construction, [{}, {"dtype": "float32"}], num_ranks=2):
        assert "dtype is 'bfloat16' on rank 0, 'float32' on rank 1" in said


def other_release(group: dist.ProcessGroup, rank: int) -> str:
    releases = ["tokenspeed-deepep 1.2.1", "a-fork 9.8"]
    with mock.patch("moe_ep.dispatch.deepep_library.distribution", lambda: releases[rank]):
        return said_at_construction(group, rank, [{}, {}])


def test_ranks_with_other_releases_hear_of_it_before_anything_is_allocated(pool: RankPool) -> None:
    first, second = pool.run(other_release, num_ranks=2)
    assert first == second
    assert "deep_ep is 'tokenspeed-deepep 1.2.1' on rank 0, 'a-fork 9.8' on rank 1" in first


def over_two_groups(group: dist.ProcessGroup, rank: int) -> tuple[bool, bool, bool]:
    """The same ranks in a second group, micro-batches of both under way at once: buffers apart, results right."""
    second = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
    both: list[Any] = [build_dispatcher(config(), each) for each in (group, second)]
    inputs = [micro_batch(2 * rank + i) for i in range(2)]
    tickets = [d.dispatch_preprocess(x, routing) for d, (x, routing) in zip(both, inputs, strict=True)]
    for dispatcher, ticket in zip(both, tickets, strict=True):
        dispatcher.dispatch(ticket)
    for dispatcher, ticket in zip(both, tickets, strict=True):
        dispatcher.combine_preprocess(ticket, dispatcher.dispatch_postprocess(ticket).rows())
        dispatcher.combine(ticket)
    found = [d.combine_postprocess(ticket).float() for d, ticket in zip(both, tickets, strict=True)]
    # experts that change nothing and weigh nothing: every token comes home K times
    right = [torch.allclose(y, 2 * x.float(), rtol=2**-7) for y, (x, _) in zip(found, inputs, strict=True)]
    apart = both[0].link._buffer is not both[1].link._buffer
    close_dispatchers(second)
    close_dispatchers(group)
    dist.destroy_process_group(second)
    return apart, right[0], right[1]


def test_a_second_group_gets_a_buffer_of_its_own(pool: RankPool) -> None:
    assert pool.run(over_two_groups, num_ranks=2) == [(True, True, True)] * 2


def without_the_fix(group: dist.ProcessGroup, rank: int) -> str:
    """A release whose constructor lacks the argument that came shortly after the fix of other hidden sizes."""

    class Old(deepep_double.Buffer):
        def __init__(self, group: Any, num_nvl_bytes: int = 0, *, explicitly_destroy: bool = False) -> None: ...

    library = type("deep_ep", (), {"Buffer": Old})
    return "; ".join(limit_reasons(library, "v1", config(hidden_size=272), 2))


def test_an_older_release_serves_fewer_hidden_sizes(pool: RankPool) -> None:
    assert "a multiple of 256, got 272" in pool.run(without_the_fix, num_ranks=2)[0]


def sms_used(group: dist.ProcessGroup, rank: int) -> tuple[int, int, str]:
    before = deepep_double.Buffer.num_sms
    dispatcher = build_dispatcher(config(num_sms=8), group)
    text = dispatcher.describe()
    close_dispatchers(group)
    return before, deepep_double.Buffer.num_sms, text


def test_the_librarys_global_number_of_sms_is_left_alone(pool: RankPool) -> None:
    for before, after, text in pool.run(sms_used, num_ranks=2):
        assert before == after == 20
        assert re.search(r"api v1, 8 SMs, \d+ MiB$", text)


def lose_a_call(group: dist.ProcessGroup, rank: int, stage: str) -> str:
    """The library gives up after its own timeout, in a call of the stage."""
    dispatcher: Any = build_dispatcher(config(), group)
    x, routing = micro_batch(rank)

    def give_up(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("DeepEP error: CPU recv timeout")

    setattr(dispatcher.link._buffer, stage, give_up)
    ticket = dispatcher.dispatch_preprocess(x, routing, layer=3, micro_batch=1)
    try:
        dispatcher.dispatch(ticket)
        dispatcher.combine_preprocess(ticket, dispatcher.dispatch_postprocess(ticket).rows())
        dispatcher.combine(ticket)
    except PeerError as err:
        dispatcher.close()  # must not wait for the others
        return str(err)
    return "nothing was raised"


@pytest.mark.parametrize("stage", ["dispatch", "combine"])
def test_a_timeout_of_the_library_names_the_call(pool: RankPool, stage: str) -> None:
    for rank, said in enumerate(pool.run(lose_a_call, stage, num_ranks=2)):
        number = {"dispatch": 1, "combine": 2}[stage]
        assert f"rank {rank} of 2, deepep_double (2 ranks, 4 experts on each), api v1" in said
        assert f"communication {number}: {stage} of layer 3, micro-batch 1" in said
        assert "DeepEP error: CPU recv timeout" in said


def come_late(group: dist.ProcessGroup, rank: int) -> list[str]:
    """Rank 1 is late for the dispatch, rank 0 for the combine: what the watchdog of each prints."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        _come_late(group, rank)
    return [line for line in printed.getvalue().splitlines() if "has not ended" in line]


def _come_late(group: dist.ProcessGroup, rank: int) -> None:
    dispatcher: Any = build_dispatcher(config(), group)
    dispatcher.watchdog.overdue_s = 0.1
    x, routing = micro_batch(rank)
    ticket = dispatcher.dispatch_preprocess(x, routing, layer=3, micro_batch=1)
    time.sleep(1.0 * rank)
    dispatcher.dispatch(ticket)
    dispatcher.combine_preprocess(ticket, dispatcher.dispatch_postprocess(ticket).rows())
    time.sleep(1.0 * (1 - rank))
    dispatcher.combine(ticket)
    dispatcher.combine_postprocess(ticket)
    close_dispatchers(group)


def test_ranks_that_wait_say_for_what_and_a_late_one_says_nothing(pool: RankPool) -> None:
    said = pool.run(come_late, num_ranks=2)
    for rank, (number, stage) in enumerate([(1, "dispatch"), (2, "combine")]):
        (line,) = said[rank]
        assert f"rank {rank} of 2" in line
        assert f"communication {number}: {stage} of layer 3, micro-batch 1 was issued" in line


def close_twice(group: dist.ProcessGroup, rank: int) -> list[str]:
    """close() frees the buffer once, on all ranks; the object is of no use after it."""
    dispatcher: Any = build_dispatcher(config(options=(("api", "v2"),)), group)
    close_dispatchers(group)
    dispatcher.close()
    said = [str(dispatcher.link._buffer)]
    try:
        dispatcher.dispatch_preprocess(*micro_batch(rank))
    except MoEError as err:
        said.append(str(err))
    return said


def test_closing(pool: RankPool) -> None:
    for said in pool.run(close_twice, num_ranks=2):
        assert said[0] == "None" and "closed deepep_double dispatcher" in said[1]


def handles_in_flight(group: dist.ProcessGroup, rank: int, options: tuple[tuple[str, object], ...]) -> int:
    """No call leaves anything behind on the dispatcher or its link: handles live with the ticket."""
    dispatcher: Any = build_dispatcher(config(options=options), group)
    seen = []
    for _ in range(3):
        x, routing = micro_batch(rank)
        ticket = dispatcher.dispatch_preprocess(x, routing)
        dispatcher.dispatch(ticket)
        inp = dispatcher.dispatch_postprocess(ticket)
        handle = ticket.state.handle
        seen.append(weakref.ref(handle.handle if options else handle[3]))
        dispatcher.combine_preprocess(ticket, inp.rows())
        dispatcher.combine(ticket)
        y = dispatcher.combine_postprocess(ticket)
        y.sum().backward()
        del ticket, inp, handle, y
    close_dispatchers(group)
    return sum(ref() is not None for ref in seen)


@pytest.mark.parametrize("form", FORMS)
def test_handles_die_with_their_micro_batch(pool: RankPool, form: str) -> None:
    options = () if form == "v1" else FORMS[form]
    assert pool.run(handles_in_flight, options, num_ranks=2) == [0, 0]


def inputs_under_way(group: dist.ProcessGroup, rank: int, options: tuple[tuple[str, object], ...]) -> list[list[bool]]:
    """Which of rows, ids and weights of a dispatch are alive: when it was launched, and when it was awaited."""
    dispatcher: Any = build_dispatcher(config(options=options), group)
    given: list[weakref.ref[torch.Tensor]] = []
    real = dispatcher.link.dispatch

    def dispatch(*inputs: torch.Tensor) -> Any:
        given.extend(map(weakref.ref, inputs))
        return real(*inputs)

    x, routing = micro_batch(rank)
    with torch.no_grad(), mock.patch.object(dispatcher.link, "dispatch", dispatch):
        ticket = dispatcher.dispatch_preprocess(x[1:], routing_of(routing, 1))
        dispatcher.dispatch(ticket)
        launched = [ref() is not None for ref in given]
        dispatcher.dispatch_postprocess(ticket)
        awaited = [ref() is not None for ref in given]
        ticket.release()
    close_dispatchers(group)
    return [launched, awaited]


def routing_of(routing: Routing, first: int) -> Routing:
    """Of the tokens from `first` on: tensors that nobody else holds."""
    ids, weights = routing.expert_ids[first:].clone(), routing.weights[first:].clone()
    return Routing(expert_ids=ids, weights=weights, num_experts=routing.num_experts)


@pytest.mark.parametrize("form", FORMS)
def test_what_a_dispatch_reads_lives_until_it_is_awaited(pool: RankPool, form: str) -> None:
    """The kernels read ids, too, while the host is far ahead; api v2 keeps them in its handle."""
    options = () if form == "v1" else FORMS[form]
    assert pool.run(inputs_under_way, options, num_ranks=2) == [[[True] * 3, [False, form != "v1", False]]] * 2


class Forgetful(DispatchTransfer):
    """Lets go of the ids as soon as the library's call returns."""

    def forward(self, payload: tuple[torch.Tensor, ...]) -> Any:
        arriving = super().forward(payload)
        self._ids = None
        return arriving


def forgotten_ids(group: dist.ProcessGroup, rank: int, options: tuple[tuple[str, object], ...]) -> str:
    """What the double says of it."""
    dispatcher: Any = build_dispatcher(config(options=options), group)
    with mock.patch("moe_ep.dispatch.deepep.DispatchTransfer", Forgetful):
        ticket = dispatcher.dispatch_preprocess(*micro_batch(rank))
        dispatcher.dispatch(ticket)
        try:
            dispatcher.dispatch_postprocess(ticket)
        except AssertionError as err:
            return str(err)
        finally:
            close_dispatchers(group)
    return "nothing was said"


@pytest.mark.parametrize(("form", "words"), [("v1", "B6 (ids of dispatch was freed while"), ("v2", "nothing was said")])
def test_ids_that_are_let_go_early_are_seen(pool: RankPool, form: str, words: str) -> None:
    """So that the contract suite above proves that nothing is; without it, two tickets on GPUs lose rows."""
    for said in pool.run(forgotten_ids, FORMS[form], num_ranks=2):
        assert words in said


FEW = Setup(dispatcher="agrs", steps=4, tokens=24, device="cpu")


@pytest.fixture(scope="module")
def curve(pool: RankPool) -> list[float]:
    found: list[float] = pool.run(train, FEW, num_ranks=2)[0]
    return found


def trained(group: dist.ProcessGroup, rank: int, setup: Setup) -> tuple[list[float], list[str]]:
    return train(group, rank, setup), interleaved_equals_serial(group, rank, setup)


@pytest.mark.parametrize("form", FORMS)
def test_training_and_interleaving(pool: RankPool, curve: list[float], form: str) -> None:
    """Whole layers, two interleaved micro-batches, some steps: the bits of agrs, which rounds the same partial sums."""
    setup = replace(FEW, dispatcher="deepep_double", options=FORMS[form])
    assert pool.run(trained, setup, num_ranks=2) == [(curve, [])] * 2

"""What `deepep` does beside the contract, over doubles of the library: waits, ends, SMs, and what lives how long."""

from __future__ import annotations

import contextlib
import io
import re
import time
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep.dispatch import build_dispatcher, close_dispatchers
from moe_ep.dispatch.deepep_transfer import DispatchTransfer
from moe_ep.errors import MoEError, PeerError
from moe_ep.routing import Routing
from moe_ep.testing.ranks import RankPool
from moe_ep.testing.table_deepep import FORMS
from tests.ranks import deepep_double
from tests.ranks.small_deepep import config, micro_batch


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=60) as ranks:
        yield ranks


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


def too_wide_together(group: dist.ProcessGroup, rank: int) -> tuple[str, str]:
    """A buffer of 100 SMs beside another group's of 80 and 40, which share a stream; then without those."""
    second = dist.new_group(dist.get_process_group_ranks(group))
    for num_sms in (80, 40):
        build_dispatcher(config(num_sms=num_sms), group)
    try:
        build_dispatcher(config(num_sms=100), second)
    except MoEError as err:
        said = f"{type(err).__name__}: {err}"
    close_dispatchers(group)
    text = build_dispatcher(config(num_sms=100), second).describe()
    close_dispatchers(second)
    dist.destroy_process_group(second)
    return said, text


def test_groups_whose_kernels_do_not_fit_beside_each_other_are_refused(pool: RankPool) -> None:
    for said, text in pool.run(too_wide_together, num_ranks=2):
        assert said.startswith("Unavailable: ")
        assert "take 180 SMs of 132 (num_sms: 100, 80)" in said and "close_dispatchers" in said
        assert "100 SMs" in text


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
        dispatcher.close()
        assert not dispatcher.link._buffer._destroyed, "the library's barrier would wait for a rank that is lost"
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

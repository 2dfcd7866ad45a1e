"""Named ranges: what is written can be read, no profiler costs next to nothing, and every stage has one."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from moe_ep.tracing import Place, parse_place, parse_step, stage_range, step_range, transfer_range
from tests.ranks.small_stack import inputs, loss_of, small_stack


def names_of(ranges: list[str]) -> list[str]:
    return [name for name in ranges if name.startswith("moe_ep: ")]


@pytest.fixture
def made() -> Iterator[list[str]]:
    """Names that reach the profiler inside a test that says it is on."""
    names: list[str] = []
    note = mock.patch.object(torch.autograd.profiler, "record_function", lambda name: names.append(name))
    with note, mock.patch.object(torch.autograd.profiler, "_is_profiler_enabled", True):
        yield names


def test_what_is_written_can_be_read(made: list[str]) -> None:
    stage_range("dispatch_postprocess", 12, 3)
    stage_range("attention", None, 0)
    transfer_range("launch", "exchange of counts of layer 0, micro-batch 1")
    transfer_range("wait", "backward of combine of layer 7, micro-batch 2")
    transfer_range("launch", "backward of grad_reduce of layer 7, micro-batch 1 to 3")
    step_range(41)
    assert [parse_place(name) for name in made] == [
        Place("stage", "dispatch_postprocess", 12, 3),
        Place("stage", "attention", None, 0),
        Place("launch", "exchange of counts", 0, 1),
        Place("wait", "combine", 7, 2, backward=True),
        Place("launch", "grad_reduce", 7, 1, backward=True),
        None,
    ]
    assert [parse_step(name) for name in made] == [None] * 5 + [41]
    assert parse_step("ProfilerStep#3") == 3


@pytest.mark.parametrize("name", ["aten::mm", "moe_ep: experts", "experts of layer 1, micro-batch 0", "step 3", ""])
def test_other_names_say_nothing(name: str) -> None:
    assert parse_place(name) is None and parse_step(name) is None


def test_without_a_profiler_nothing_reaches_it() -> None:
    with mock.patch.object(torch.autograd.profiler, "record_function", mock.Mock(side_effect=AssertionError)):
        ranges = [stage_range("experts", 0, 0), transfer_range("wait", "x"), step_range(1)]
    assert len({id(each) for each in ranges}) == 1, "one object that does nothing"
    for each in ranges:
        with each:
            pass


def trace_names() -> list[str]:
    """Names of one forward and backward of two layers with two micro-batches on one rank, in order of time."""
    model = small_stack(None, dict(dispatcher="all2all"), dense=(False, True))
    xs = [inputs(0, 1)[0], torch.randn(3, 16, requires_grad=True)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, step_range(5):
        ys, auxes = model(xs)
        torch.stack([loss_of(y, said) for y, said in zip(ys, auxes, strict=True)]).sum().backward()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return names_of([event.name for event in events])


def test_every_stage_and_transfer_stands_in_a_trace() -> None:
    names = trace_names()
    assert names[0] == "moe_ep: step 5"
    places = [parse_place(name) for name in names[1:]]
    assert None not in places
    first = [place for place in places if place is not None and place.layer == 0 and place.micro_batch == 1]
    stages = [place.stage for place in first if place.role == "stage"]
    assert stages == [
        *("attention", "route", "dispatch_preprocess", "dispatch", "dispatch_postprocess", "experts"),
        *("combine_preprocess", "combine", "shared", "resolve", "combine_postprocess"),
    ]  # fmt: skip
    for role in ("launch", "wait"):
        transfers = [(place.stage, place.backward) for place in first if place.role == role]
        assert transfers == [
            *(("exchange of counts", False), ("dispatch", False), ("combine", False)),
            *(("combine", True), ("dispatch", True)),
        ]  # fmt: skip
    dense = [place.stage for place in places if place is not None and place.layer is None]
    assert dense == ["attention", "shared"] * 2

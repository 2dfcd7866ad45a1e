"""Pending outputs, the executor, and how a stack is called, on one rank."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.utils import _pytree as pytree

from moe_ep import (
    InputError,
    Pending,
    ProtocolError,
    RecipeError,
    domino,
)
from moe_ep.domino import DominoLayer, DominoStack, launch
from moe_ep.schedule import schedule
from moe_ep.schedule_steps import Key, Kind
from tests.ranks.small_stack import inputs, recorded, small_stack


def test_a_pending_output_is_resolved_once() -> None:
    model = small_stack(None, dense=(False,))
    (pending,), _ = launch(model.layers, inputs(0, 1))
    pending.resolve()
    with pytest.raises(ProtocolError, match="layer 0, micro-batch 0: its pending output was resolved before"):
        pending.resolve()
    x = torch.ones(2, 3)
    assert Pending(base=x).resolve() is x


def test_resolve_works_on_the_tensors_found_in_the_pending_output() -> None:
    """FSDP2 puts others in their place."""
    model = small_stack(None, dense=(False,))
    (plain,), _ = launch(model.layers, inputs(0, 1))
    (other,), _ = launch(model.layers, inputs(0, 1))
    leaves, spec = pytree.tree_flatten(other)
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) == 1 + len(other.in_flight) > 1
    doubled = pytree.tree_unflatten([2 * leaf if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
    assert torch.equal(doubled.resolve(), 2 * plain.resolve())
    assert doubled.in_flight == (), "the rows are needed no more"


def test_the_executor_follows_the_schedule_it_is_given() -> None:
    model = small_stack(None, dense=(False,))
    given = schedule(2)
    serial = replace(given, steps=tuple(sorted(given.steps, key=lambda step: step.key.micro_batch)))
    with recorded(model) as log:
        launch(model.layers, inputs(0, 2))
        log.append("serial")
        with mock.patch.object(domino, "schedule", lambda *_, **__: serial):
            launch(model.layers, inputs(0, 2))
    turns = [line.split(".")[0] for line in log if not line.startswith(("launch", "wait"))]
    one = ["attention 0", "experts 0"]
    assert turns == ["attention 0", "attention 0", "experts 0", "experts 0", "serial", *one, *one]


def test_a_wait_that_no_stage_makes_is_refused() -> None:
    model = small_stack(None, dense=(False,))
    given = schedule(1)
    steps = [
        replace(step, waits=(Key(Kind.ATTENTION, 0),)) if step.key.kind is Kind.SHARED else step for step in given.steps
    ]
    with (
        mock.patch.object(domino, "schedule", lambda *_, **__: replace(given, steps=tuple(steps))),
        pytest.raises(ProtocolError, match="the schedule has waits that no stage makes: shared for attention"),
    ):
        model(inputs(0, 1))


def test_misuse_is_refused() -> None:
    model = small_stack(None)
    with pytest.raises(InputError, match="got 0 micro-batches; give at least one"):
        model([])
    with pytest.raises(InputError, match="got 2 micro-batches and 1 masks"):
        model(inputs(0, 2), [None])
    with pytest.raises(RecipeError, match=r"layer 0 \(Linear\) has no attention, shared, moe"):
        DominoStack([torch.nn.Linear(2, 2)])
    with pytest.raises(NotImplementedError, match="DominoLayer must define attention"):
        DominoLayer().attention(torch.ones(1))

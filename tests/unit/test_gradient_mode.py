"""Gradients on in one part of a micro-batch's way and off in another: refused wherever backward would lose them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_ep import MoELayer, ProtocolError, RecipeError, moe_layers
from moe_ep.domino_executor import Region
from moe_ep.layer import LayerFlight
from tests.ranks.small_stack import H, inputs, same, small_stack

DISPATCHERS = ["local", "all2all", "agrs"]
STAGES: dict[str, Callable[[MoELayer, LayerFlight], Any]] = {
    "dispatch": lambda layer, flight: layer.dispatcher.dispatch(flight.ticket),
    "dispatch_postprocess": lambda layer, flight: layer.compute(flight),
    "combine": lambda layer, flight: layer.dispatcher.combine(flight.ticket),
    "combine_postprocess": lambda layer, flight: layer.resolve(flight),
}


def walk(layer: MoELayer, prepare: bool, other: str) -> torch.Tensor:
    """A micro-batch with gradients on (`prepare`) or off, and the other way in one stage and those behind it."""
    y, recording = torch.empty(0), prepare
    with torch.set_grad_enabled(recording):
        flight = layer.prepare(torch.randn(4, H, requires_grad=True))
    for name, stage in STAGES.items():
        recording = recording != (name == other)
        with torch.set_grad_enabled(recording):
            y = stage(layer, flight)
    return y


@pytest.mark.parametrize("other", STAGES)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_stages_with_and_without_gradients_do_not_mix(dispatcher: str, other: str) -> None:
    (layer,) = moe_layers(small_stack(None, dict(dispatcher=dispatcher), dense=(False,)))
    for prepare, said in ((True, "are not recorded, but were when"), (False, "are recorded, but were not when")):
        with pytest.raises(ProtocolError, match=f"micro-batch 0, {other}: gradients {said} the ticket was made"):
            walk(layer, prepare, other)
    assert layer.dispatcher.lanes.num_free == layer.dispatcher.lanes.num_lanes
    assert walk(layer, True, "").requires_grad


def without_gradients(fn: Callable[..., Any], *args: torch.Tensor) -> Any:
    with torch.no_grad():
        return fn(*args)


REGIONS: dict[str, Region] = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "no_grad": without_gradients,
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # in the evaluation
@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("name", REGIONS)
def test_a_region_that_turns_gradients_off_is_refused(name: str, number: int, attention: bool) -> None:
    """The other layers would train on, without the gradients of those before it."""
    model = small_stack(None)
    model.layers[number].recompute_in(REGIONS[name], attention=attention)  # type: ignore[operator]
    with pytest.raises(RecipeError, match="the region of recompute_in runs without recording gradients"):
        model(inputs(0, 2))
    with torch.no_grad():
        same(model(inputs(0, 2))[0], small_stack(None)(inputs(0, 2))[0], "an evaluation")

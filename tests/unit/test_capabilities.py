"""Limits of a back end hold at each call, too: what it says that it cannot do is refused, not tried."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from moe_ep import (
    Capabilities,
    DispatchConfig,
    InputError,
    MoEConfig,
    MoELayer,
    ProtocolError,
    RecipeError,
    Routing,
    Unavailable,
    build_dispatcher,
    recompute_region,
    register_dispatcher,
)  # fmt: skip
from moe_ep.dispatch import base
from moe_ep.dispatch.all2all import All2All
from moe_ep.dispatch.capabilities import capability_reasons, capture_refusal, row_capacity
from moe_ep.dispatch.local import Local
from moe_ep.dispatch.registry import unavailable_reasons
from moe_ep.testing.contract import CASES
from tests.ranks.race_runs import host_ahead
from tests.ranks.small_stack import MOE, inputs, small_stack

CONFIG = DispatchConfig(name="picky", num_experts=4, top_k=2, hidden_size=8)


class Picky(Local):
    """A back end of one rank that serves neither duplicates nor empty micro-batches."""

    name: ClassVar[str] = "picky"
    capabilities: ClassVar[Capabilities] = replace(Local.capabilities, duplicates=False, zero_tokens=False)


def routing(ids: list[list[int]]) -> Routing:
    expert_ids = torch.tensor(ids, dtype=torch.int64).reshape(-1, 2)
    return Routing(expert_ids=expert_ids, weights=torch.ones(expert_ids.shape), num_experts=4)


@pytest.mark.parametrize(
    ("ids", "text"), [([[1, 1]], "1 tokens name an expert twice"), ([], "T = 0, dispatcher 'picky'")]
)
def test_what_a_back_end_cannot_serve_is_refused_at_the_call(ids: list[list[int]], text: str) -> None:
    value = routing(ids)
    with pytest.raises(InputError, match=text):
        Picky(CONFIG, None).dispatch_preprocess(torch.ones(len(ids), 8), value)
    Local(replace(CONFIG, name="local"), None).dispatch_preprocess(torch.ones(len(ids), 8), value)


@pytest.mark.parametrize(("factor", "num_ranks", "rows"), [(1.25, 4, 20), (3.0, 2, 32), (0.01, 2, 1), (None, 2, None)])
def test_room_for_rows_is_a_multiple_of_equal_loads(factor: float | None, num_ranks: int, rows: int | None) -> None:
    config = replace(CONFIG, capacity_factor=factor, max_tokens=8)
    assert row_capacity(config, num_ranks) == rows


def test_what_the_room_takes_is_said() -> None:
    config = replace(CONFIG, hidden_size=4096, max_tokens=256, capacity_factor=1.0)
    assert Picky(config, None).describe() == (
        "picky (1 rank, 4 experts on each, room for 512 expert rows of each micro-batch, 8.0 MiB a tensor of them)"
    )


def test_capture_of_a_graph_is_refused_where_it_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatchers = {"all2all": All2All(replace(CONFIG, name="all2all"), None), "local": Local(CONFIG, None)}
    monkeypatch.setattr(base, "is_captured", lambda x: True)
    x, value = torch.ones(1, 8), routing([[1, -1]])
    dispatchers["local"].dispatch_preprocess(x, value)
    with pytest.raises(
        ProtocolError,
        match="layer 3, micro-batch 1: a CUDA graph is being captured, and dispatcher 'all2all' does not serve that; "
        "take 'direct' with capacity_factor",
    ):
        dispatchers["all2all"].dispatch_preprocess(x, value, layer=3, micro_batch=1)
    monkeypatch.undo()
    dispatchers["all2all"].dispatch_preprocess(x, value)  # as if nothing had been


def test_capture_needs_rows_without_the_host() -> None:
    caps = Capabilities(graph_capture=True, host_syncs=1)
    assert capture_refusal("direct", caps, 0) is None
    assert "reads counts on the host as it is configured; set capacity_factor" in str(
        capture_refusal("direct", caps, 1)
    )


def test_what_it_serves_goes_through() -> None:
    Picky(CONFIG, None).dispatch_preprocess(torch.ones(1, 8), routing([[1, -1]]))


@register_dispatcher("single_file")
class SingleFile(Local):
    """A back end that holds one micro-batch at a time."""

    name: ClassVar[str] = "single_file"
    capabilities: ClassVar[Capabilities] = replace(Local.capabilities, max_tickets=1)


ONE = "it holds 1 micro-batch(es) in flight, and 2 are to be interleaved; lower the number"


def test_more_micro_batches_than_a_back_end_holds_are_refused_at_construction() -> None:
    for build in (
        lambda num: build_dispatcher(replace(CONFIG, name="single_file", num_micro_batches=num)),
        lambda num: MoELayer(MoEConfig(**MOE, dispatcher="single_file", num_micro_batches=num)),
        lambda num: small_stack(None, dict(dispatcher="single_file", num_micro_batches=num)),
    ):
        build(1)
        with pytest.raises(Unavailable, match=re.escape(ONE)):
            build(2)


def test_a_stack_that_was_not_told_refuses_at_the_first_call() -> None:
    model = small_stack(None, dict(dispatcher="single_file"))
    for _ in range(2):
        with pytest.raises(RecipeError, match=re.escape(f"dispatcher 'single_file' cannot run here: {ONE}")):
            model(inputs(0, 2))
        for _ in range(2):
            (y,), _ = model(inputs(0, 1))
            y.sum().backward()
    small_stack(None)(inputs(0, 4))


@register_dispatcher("pair")
class Pair(Local):
    """A back end that holds two."""

    name: ClassVar[str] = "pair"
    capabilities: ClassVar[Capabilities] = replace(Local.capabilities, max_tickets=2)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_m_micro_batches_never_hold_more_than_m_tickets(ahead: bool, recompute: bool) -> None:
    """From layer to layer, in the second pass of a recompute, and from step to step."""
    model = small_stack(None, dict(dispatcher="pair"), dense=(False, False, True, False))
    for layer in model.layers:
        layer.recompute_in(recompute_region if recompute else None)  # type: ignore[operator]
    for early_stop in (True, False):
        with host_ahead(ahead), set_checkpoint_early_stop(early_stop):
            ys, _ = model(inputs(0, 2))
            torch.stack([y.sum() for y in ys]).sum().backward()
            with torch.no_grad():
                model(inputs(0, 2))


def test_a_ticket_more_than_a_back_end_holds_is_refused() -> None:
    dispatcher = SingleFile(replace(CONFIG, name="single_file"), None)
    x, value = torch.ones(1, 8), routing([[1, 2]])
    first = dispatcher.dispatch_preprocess(x, value, layer=3)
    with pytest.raises(ProtocolError, match=r"layer 3, micro-batch 1: .* layer 3, micro-batch 0 is under way"):
        dispatcher.dispatch_preprocess(x, value, layer=3, micro_batch=1)
    first.release()
    second = dispatcher.dispatch_preprocess(x, value, layer=3, micro_batch=1)
    del second  # abandoned
    dispatcher.dispatch_preprocess(x, value, layer=3, micro_batch=2)


def test_the_contract_asks_for_as_many_tickets_as_its_cases_hold() -> None:
    asked = {case.name.partition("/")[0]: case.num_tickets for case in CASES if case.num_tickets > 1}
    assert asked["two-tickets"] == asked["source-is-kept"] == 2 and asked["four-tickets"] == 4
    for case in CASES:
        reasons = capability_reasons(SingleFile.capabilities, case.dispatch_config("single_file"), 1)
        assert any("micro-batch(es) in flight" in reason for reason in reasons) == (case.num_tickets > 1)


@pytest.mark.parametrize("name", ["agrs", "all2all", "deepep", "direct", "nccl_ep"])
def test_a_wrong_configuration_does_not_hide_what_the_machine_lacks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    sizes: dict[str, Any] = dict(name=name, num_experts=8, top_k=2, hidden_size=256, max_tokens=64, kernels="cuda")
    lacking = unavailable_reasons(DispatchConfig(**sizes, dtype="bfloat16"), None)
    assert any("GPU" in reason for reason in lacking), lacking
    wrong = unavailable_reasons(DispatchConfig(**sizes, dtype="bfloat16", options={"no such": 1}), None)
    assert set(wrong) > set(lacking)
    if name in ("deepep", "nccl_ep"):
        other = unavailable_reasons(DispatchConfig(**sizes, dtype="float64"), None)
        assert any("dtype is float64" in reason for reason in other) and set(other) > set(lacking)

"""Limits of a back end hold at each call, too: what it says that it cannot do is refused, not tried."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from moe_ep import Capabilities, DispatchConfig, InputError, Routing
from moe_ep.dispatch.local import Local

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


def test_what_it_serves_goes_through() -> None:
    Picky(CONFIG, None).dispatch_preprocess(torch.ones(1, 8), routing([[1, -1]]))

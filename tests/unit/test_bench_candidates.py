"""Candidates of a benchmark: a dispatcher with keys, read strictly, and told apart in every table and file name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from moe_ep.dispatch import Capabilities, register_dispatcher, registry
from moe_ep.dispatch.direct_transfer import SMS_BESIDE_GEMMS, default_blocks
from moe_ep.dispatch.local import Local
from moe_ep.errors import RecipeError
from tools.bench_candidates import Candidate, parse_candidate
from tools.bench_options import Options, for_each_experts
from tools.bench_trace import trace_file


@pytest.fixture(autouse=True)
def fancy() -> Iterator[None]:
    @register_dispatcher("fancy")
    class Fancy(Local):
        name: ClassVar[str] = "fancy"
        capabilities: ClassVar[Capabilities] = Capabilities(options=("api", "expand"))

    yield
    del registry._classes["fancy"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("fancy", {"options": ()}),
        ("nobody_knows", {"options": ()}),  # becomes a row that says so, as ever
        ("fancy:capacity_factor=1.25", {"capacity_factor": 1.25, "options": ()}),
        ("fancy:capacity_factor=2", {"capacity_factor": 2.0, "options": ()}),
        ("fancy:num_sms=8:kernels=torch", {"num_sms": 8, "kernels": "torch", "options": ()}),
        ("fancy:expand=true:api=v2", {"options": (("api", "v2"), ("expand", True))}),
        ("fancy:kernels=torch:expand=false", {"kernels": "torch", "options": (("expand", False),)}),
    ],
)
def test_keys_become_fields_and_options_in_their_types(text: str, values: dict[str, Any]) -> None:
    found = parse_candidate(text)
    assert found.values == values
    assert [type(value) for value in found.values.values()] == [type(values[key]) for key in found.values]
    assert parse_candidate(str(found)) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fancy:capacity=1.2", "unknown key 'capacity'; did you mean 'capacity_factor'?"),
        ("fancy:expnd=true", "did you mean 'expand'?"),
        ("fancy:max_tokens=3", "unknown key 'max_tokens'"),
        ("fancy:capacity_factor=much", "capacity_factor = 'much' must be float"),
        ("fancy:num_sms=1.5", "num_sms = 1.5 must be int"),
        ("fancy:kernels=cuda11", "kernels = 'cuda11' is not one of 'auto', 'cuda', 'torch'"),
        ("fancy:expand", "'expand' is not KEY=VALUE"),
        ("fancy:expand=", "'expand=' is not KEY=VALUE"),
        ("fancy:expand=true:expand=false", "has expand twice"),
        ("fncy:expand=true", "did you mean 'fancy'?"),
    ],
)
def test_what_means_nothing_is_refused_with_the_nearest(text: str, said: str) -> None:
    for refused in (lambda: parse_candidate(text), Options(dispatchers=(text,), shapes=()).check):
        with pytest.raises(RecipeError, match=re.escape(said)):
            refused()


def test_the_same_keys_in_another_order_are_the_same_candidate_and_the_baseline_comes_first() -> None:
    texts = ("fancy:expand=true:api=v2", "fancy", "fancy:api=v2:expand=true", "all2all:kernels=torch", "all2all")
    names = [str(candidate) for candidate in Options(dispatchers=texts, shapes=()).candidates]
    assert names == ["all2all", "fancy:api=v2:expand=true", "fancy", "all2all:kernels=torch"]
    assert [candidate.api for candidate in map(parse_candidate, texts[:2])] == ["api=v2,expand=true", None]


def test_file_names_are_plain_and_tell_candidates_apart() -> None:
    candidates = [
        Candidate("direct"),
        Candidate("direct", (("expand", True),)),
        Candidate("direct", (("expand", False),)),
    ]
    names = [
        trace_file(f"stage-4x8-{candidate}-{pass_}", 1) for candidate in candidates for pass_ in ("fwd", "fwd+bwd")
    ]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+-rank1\.json\.gz", name) for name in names)


@pytest.mark.parametrize(
    ("num_sms", "beside_gemms", "most"),
    [(None, False, 132), (None, True, SMS_BESIDE_GEMMS), (20, True, 20), (20, False, 20), (500, True, 132)],
)
def test_direct_keeps_so_many_sms_busy(
    num_sms: int | None, beside_gemms: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    blocks = default_blocks(torch.device("cuda", 0), num_sms, beside_gemms=beside_gemms)
    assert blocks.sms == most
    for sending, in_all in (blocks.push, blocks.expand, blocks.give_back):
        assert 1 <= sending <= in_all <= 2 * most  # two blocks an SM


def test_experts_are_measured_one_after_the_other_and_stages_once() -> None:
    options = Options(dispatchers=(), shapes=(), levels=("stage", "layer"))
    each = [(one.experts, one.levels) for one in for_each_experts(options, "quack, torch,quack")]
    assert each == [("quack", ("stage", "layer")), ("torch", ("layer",))]
    stages = Options(dispatchers=(), shapes=(), levels=("stage",))
    assert [one.experts for one in for_each_experts(stages, "torch,quack")] == ["torch"]

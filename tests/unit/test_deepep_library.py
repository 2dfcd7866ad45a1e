"""Which DeepEP was found is told by what it offers; what is missing is said with the way to get it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import deepep_library as found
from moe_ep.dispatch import deepep_v2, unavailable_reasons
from moe_ep.dispatch.deepep import DeepEP
from moe_ep.doctor import examine


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """`load` looks once in a process."""
    found.load.cache_clear()
    yield
    found.load.cache_clear()
    sys.modules.pop("deep_ep", None)


def install(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "deep_ep.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))


def test_no_module_at_all() -> None:
    library, why = found.load()
    assert library is None
    (reason,) = found.library_reasons(library, why, "v1")
    assert "no module deep_ep is installed" in reason and "pip install tokenspeed-deepep==1.2.1" in reason


def test_a_module_that_breaks_while_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "assert False, 'Duplicate NCCL runtime found'", monkeypatch)
    (reason,) = found.library_reasons(*found.load(), "v2")
    assert "importing deep_ep fails: AssertionError: Duplicate NCCL runtime found" in reason


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ("class Buffer: ...", ["v1"]),
        ("class Buffer: ...\nclass ElasticBuffer: ...", ["v1", "v2"]),
        ("class EPBuffer: ...", []),
    ],
)
def test_what_counts_is_what_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, offered: list[str]
) -> None:
    install(tmp_path, text, monkeypatch)
    library, why = found.load()
    assert found.offers(library) == offered
    for api in ("v1", "v2"):
        reasons = found.library_reasons(library, why, api)
        assert (reasons == []) == (api in offered)
        assert all(f"api = '{api}' needs deep_ep.{found.ENTRY[api]}" in reason for reason in reasons)


def test_the_doctor_says_which_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "class Buffer: ...", monkeypatch)
    monkeypatch.setattr(found.importlib.metadata, "packages_distributions", lambda: {"deep_ep": ["a-fork", "a-fork"]})
    monkeypatch.setattr(found.importlib.metadata, "version", lambda name: "9.8")
    report = examine("deepep")
    assert report["findings"][0].startswith("DeepEP: a-fork 9.8 with v1 (Buffer)")
    assert not report["usable"]


def test_a_wrong_option_is_said_before_anything_is_looked_for() -> None:
    config = SimpleNamespace(options=(("api", "v2"), ("expand", 2)), num_sms=None)
    assert DeepEP.unavailable_reasons(config, None) == [  # type: ignore[arg-type]
        "[moe.deepep] expand must be true or false, got 2"
    ]


def test_one_rank_is_refused() -> None:
    from moe_ep.config import DispatchConfig

    config = DispatchConfig(name="deepep", num_experts=8, top_k=2, hidden_size=256, dtype="bfloat16")
    reason = unavailable_reasons(config, None)[0]  # behind it, what this machine lacks
    assert "it serves 2, 3, 4, 5, 6, 7, 8 rank(s), the group has 1" in reason


def test_nearby_bounds_share_kernels_and_top_k_sizes_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#46404: each bound of tokens is compiled for; sgl-project/sglang#24443: top-k 0 means 32."""
    seen: list[dict[str, Any]] = []

    class Sized:
        @staticmethod
        def get_buffer_size_hint(_: Any, **sizes: Any) -> int:
            seen.append(sizes)
            return 1

    monkeypatch.setenv("EP_DISABLE_GIN", "1")
    monkeypatch.setattr(deepep_v2, "_make_communicator", lambda group: None)
    library = SimpleNamespace(ElasticBuffer=Sized)
    for max_tokens in (1, 64, 65, 4096, 4097):
        config = DispatchConfig(name="deepep", num_experts=8, top_k=3, hidden_size=256, max_tokens=max_tokens)
        deepep_v2.V2Link(library, config, mock.Mock(), num_sms=24, expand=False, timeout_s=60.0, kernels=False)
    assert [sizes["num_max_tokens_per_rank"] for sizes in seen] == [64, 64, 128, 4096, 4160]
    assert {sizes["num_topk"] for sizes in seen} == {3}

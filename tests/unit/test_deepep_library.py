"""Which DeepEP was found is told by what it offers; what is missing is said with the way to get it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

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


def test_what_a_gpu_or_a_process_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """deepseek-ai/DeepEP#162: an older GPU; too many SMs; memory that torch fills (#589); no compiler for api v2."""
    gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    assert found.machine_reasons("v1", 24) == []
    assert found.machine_reasons("v1", 134) == ["num_sms = 134 is more than the GPU's 132 SMs; lower it"]
    gpu.major = 8
    assert "compute capability 9.0 and newer, this GPU has 8.0" in found.machine_reasons("v1", 24)[0]
    gpu.major = 9
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found.machine_reasons("v1", 24) == []
    assert "finds no nvcc; set CUDA_HOME" in found.machine_reasons("v2", 24)[0]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "set torch.utils.deterministic.fill_uninitialized_memory = False" in found.machine_reasons("v1", 24)[0]


def test_ranks_and_experts_beyond_the_kernels_are_refused() -> None:
    class Buffer:
        def __init__(self, enable_shrink: bool = False) -> None: ...

    config = DispatchConfig(name="deepep", num_experts=768, top_k=3, hidden_size=256, max_tokens=8)
    library = SimpleNamespace(Buffer=Buffer, ElasticBuffer=Buffer)
    ranks, experts = found.limit_reasons(library, "v1", config, 3)
    assert ranks == "api = 'v1' serves 2, 4 or 8 ranks of one host, the group has 3"
    assert experts.startswith("api = 'v1' serves at most 128 experts per rank, got 256; take more ranks or")
    assert found.limit_reasons(library, "v2", config, 3) == []
    (experts,) = found.limit_reasons(library, "v2", config, 2)
    assert experts.startswith("api = 'v2' serves at most 2048 experts and 256 per rank, got 768 and 384")

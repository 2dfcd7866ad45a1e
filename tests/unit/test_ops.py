"""Who moves rows: what each value of `kernels` gives on machines with and without GPU and compiler."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
from moe_ep.kernels import library

from moe_ep import ops
from moe_ep.config import DispatchConfig, MoEConfig
from moe_ep.dispatch import build_dispatcher, unavailable_reasons
from moe_ep.dispatch.registry import versions
from moe_ep.errors import InputError, Unavailable
from moe_ep.layer import MoELayer
from moe_ep.routing import Routing


def config(kernels: str, num_experts: int = 4) -> DispatchConfig:
    return DispatchConfig(name="local", num_experts=num_experts, top_k=1, hidden_size=4, kernels=kernels)  # type: ignore[arg-type]


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """torch says that there is a GPU; whether kernels can be had for it is each test's matter."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return monkeypatch


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_cuda_is_refused_and_auto_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not ops.choose_kernels(config("auto"), None)
        assert not ops.choose_kernels(config("torch"), None)
    sentence = "kernels = 'cuda' cannot be had, because torch finds no CUDA GPU here; take 'auto' or 'torch'"
    assert unavailable_reasons(config("cuda"), None) == [sentence]
    with pytest.raises(Unavailable, match=sentence):
        MoELayer(MoEConfig(hidden_size=4, expert_intermediate_size=4, num_experts=4, top_k=1, kernels="cuda"))


def test_where_kernels_can_be_had_auto_takes_them(pretended_gpu: pytest.MonkeyPatch) -> None:
    pretended_gpu.setattr(library, "missing", lambda index: None)
    assert [ops.choose_kernels(config(kernels), None) for kernels in ("auto", "cuda", "torch")] == [True, True, False]
    assert ops.kernel_reasons(config("cuda"), None) == []


def test_without_a_compiler_auto_says_one_line_and_cuda_refuses(pretended_gpu: pytest.MonkeyPatch) -> None:
    pretended_gpu.setattr(library, "missing", lambda index: "no nvcc is found")
    with pytest.warns(RuntimeWarning, match="kernels = 'auto': plain torch moves the rows, because no nvcc is found"):
        assert not ops.choose_kernels(config("auto"), None)
    assert ops.kernel_reasons(config("cuda"), None) == [
        "kernels = 'cuda' cannot be had, because no nvcc is found; take 'auto' or 'torch'"
    ]


def test_more_experts_than_the_kernels_serve(pretended_gpu: pytest.MonkeyPatch) -> None:
    pretended_gpu.setattr(library, "missing", lambda index: None)
    (reason,) = ops.kernel_reasons(config("cuda", 8193), None)
    assert "num_experts = 8193 is more than the 8192 that they serve" in reason


def test_rows_on_a_cpu_are_refused_with_cuda_and_moved_by_torch_with_auto(pretended_gpu: pytest.MonkeyPatch) -> None:
    pretended_gpu.setattr(library, "missing", lambda index: None)
    routing = Routing(expert_ids=torch.tensor([[1], [0]]), weights=torch.ones(2, 1), num_experts=4)
    dispatcher = build_dispatcher(config("cuda"))
    assert "rows moved by CUDA kernels" in dispatcher.describe()
    with pytest.raises(InputError, match="x is on cpu, kernels = 'cuda' move rows on a GPU only"):
        dispatcher.dispatch_preprocess(torch.randn(2, 4), routing)
    auto = build_dispatcher(config("auto"))
    ticket = auto.dispatch_preprocess(torch.randn(2, 4), routing)
    auto.dispatch(ticket)
    assert auto.dispatch_postprocess(ticket).rows().shape == (2, 4)


def test_a_checkout_without_its_kernels_moves_rows_by_torch(pretended_gpu: pytest.MonkeyPatch) -> None:
    """On the path instead of installed: `moe_ep.kernels` is a folder elsewhere, which only an installation maps."""
    for name in ("moe_ep.kernels", "moe_ep.kernels.build", "moe_ep.kernels.library"):
        pretended_gpu.setitem(sys.modules, name, None)
    assert versions()["its kernels"] == "not installed"
    with pytest.warns(RuntimeWarning, match="plain torch moves the rows, because moe_ep.kernels is not installed"):
        assert not ops.choose_kernels(config("auto"), None)
    assert "not installed" in ops.kernel_reasons(config("cuda"), None)[0]

"""The short way to a kernel: past torch where nobody watches, and addresses in place of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_ep.kernels import library
from moe_ep.kernels.registry import KernelOp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_kernel_is_called_directly_only_for_plain_tensors_on_a_gpu_that_nobody_watches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = KernelOp(lambda *arguments: ("op", *arguments), lambda *arguments: ("kernel", *arguments))
    x = torch.zeros(2)
    assert call(x, 3) == ("op", x, 3), "on a CPU"
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert call(x, 3, None) == ("kernel", x, 3, None)
    assert call(nn.Parameter(x), 3)[0] == "op"
    with Watching():
        assert call(x, 3)[0] == "op"
    assert call(x, 3)[0] == "kernel"


class Library:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.functions = {"moe_ep_scale_rows": lambda *raw: self.calls.append(raw) or len(self.calls) - 1}

    def raise_error(self, name: str, error: int) -> None:
        raise library.KernelError(f"{name}: {error}")


def test_a_launch_hands_over_addresses_sizes_and_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Library()
    monkeypatch.setattr(library, "library", lambda index: fake)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    rows, weights = torch.zeros(3, 4), torch.ones(3)
    arguments: tuple[int | Tensor | None, ...] = (0, rows, weights, None, 3, 4)
    library.launch("moe_ep_scale_rows", rows, *arguments)
    assert fake.calls == [(0, rows.data_ptr(), weights.data_ptr(), None, 3, 4, 71)]
    with pytest.raises(library.KernelError, match="moe_ep_scale_rows: 1"):
        library.launch("moe_ep_scale_rows", rows, *arguments)

"""SMs that a GEMM leaves free for communication beside it.

A persistent GEMM starts one thread block for each SM and gives every block its share of the tiles beforehand. Where
communication holds some SMs, the blocks for those wait until others are done, and the GEMM takes up to twice as long;
a stream's priority does not help, because nothing is preempted. A GEMM that is told of fewer SMs fits beside it.

torch has one switch for that, `torch._C._set_sm_carveout_experimental`, read on the host when a GEMM is launched. It
acts on the CUTLASS kernels behind `torch.nn.functional.grouped_mm` and on cuBLASLt, not on plain matrix products.
The switch is one for the process: threads that drive several GPUs share it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

_nothing = contextlib.nullcontext()
# grouped_mm runs one plain product for each expert elsewhere, and those look at no switch (ATen's GroupedBlas.cpp)
_GROUPED_MM_CAPABILITIES = ((9, 0), (10, 0))


def leave_free(num_sms: int) -> AbstractContextManager[None]:
    """GEMMs launched inside leave that many SMs free; 0: as it was outside."""
    return _leaving(num_sms) if num_sms else _nothing


@contextlib.contextmanager
def _leaving(num_sms: int) -> Iterator[None]:
    before = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(num_sms)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(before)


def left_free() -> int:
    """What GEMMs launched now leave free."""
    return torch._C._get_sm_carveout_experimental() or 0


def grouped_mm_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why `torch.nn.functional.grouped_mm` cannot leave SMs free there; None: it can."""
    if device.type != "cuda":
        return f"tensors are on {device.type}, which has no SMs"
    if dtype != torch.bfloat16:
        return f"torch.nn.functional.grouped_mm can be limited in bfloat16 only, not in {dtype}"
    found = _capability(device)
    if found not in _GROUPED_MM_CAPABILITIES:
        return (
            "torch.nn.functional.grouped_mm can be limited on GPUs of compute capability 9.0 and 10.0 only, this one "
            f"has {found[0]}.{found[1]}"
        )
    return None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def num_sms(device: torch.device) -> int:
    """All SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count

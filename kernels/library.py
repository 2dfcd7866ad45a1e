"""The compiled kernels of this process: found or built, loaded with ctypes, launched on torch's current stream."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .build import KernelError, arch_of, build, find_library, find_nvcc

# Arguments of each C function: p pointer (a tensor or None), i int, l int64, d double. The stream comes last of all.
_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_CODES: dict[str, Any] = {"p": _POINTER, "i": _INT, "l": _LONG, "d": ctypes.c_double}
SIGNATURES = {
    "moe_ep_gather_rows": "ppppplill",
    "moe_ep_sum_rows": "ipppplill",
    "moe_ep_sort_routes": "ppppppppliiil",
    "moe_ep_regroup_rows": "pliiippppll",
    "moe_ep_direct_rank": "piiiippp",
    "moe_ep_direct_exchange": "pp",
    "moe_ep_direct_push": "ppi",
    "moe_ep_direct_return": "ppii",
    "moe_ep_plan_fixed_rows": "pppppiiii",
    "moe_ep_plan_replicas": "pppppiiiiii",
    "moe_ep_replica_push": "ppi",
    "moe_ep_replica_pull": "ppi",
    "moe_ep_reroute": "pppppppppppppliiii",
    "moe_ep_mask_logits": "ppppplii",
    "moe_ep_top_experts": "pppliii",
    "moe_ep_weigh_routes": "ppppliiidd",
    "moe_ep_weigh_backward": "ppppliiidd",
    "moe_ep_balance_loss": "pppppplii",
    "moe_ep_balance_backward": "ppppli",
    "moe_ep_split_bfloat16": "pplliii",
    "moe_ep_swiglu": "ippppll",
    "moe_ep_swiglu_backward": "ipppppppll",
    "moe_ep_scale_rows": "ipppll",
    "moe_ep_zero_tail": "ppll",
    "moe_ep_write_message": "pipppplllllliip",
}
_POINTERS = {name: [i for i, code in enumerate(codes) if code == "p"] for name, codes in SIGNATURES.items()}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


class Library:
    """One loaded library, for one architecture."""

    def __init__(self, path: str) -> None:
        try:
            self._dll = ctypes.CDLL(path)
        except OSError as err:
            raise KernelError(f"the kernel library cannot be loaded: {err}") from err
        self._text = self._dll.moe_ep_error_text
        self._text.argtypes, self._text.restype = [_INT], ctypes.c_char_p
        self.functions = {name: self._bind(name, codes) for name, codes in SIGNATURES.items()}
        workspace = self._dll.moe_ep_sort_workspace
        workspace.argtypes, workspace.restype = [_LONG, _INT], _LONG
        self.sort_workspace: Callable[[int, int], int] = workspace
        balance = self._dll.moe_ep_balance_workspace
        balance.argtypes, balance.restype = [_INT], _LONG
        self.balance_workspace: Callable[[int], int] = balance
        shared_bytes = self._dll.moe_ep_plan_shared_bytes
        shared_bytes.argtypes, shared_bytes.restype = [_INT, _INT, _INT], _LONG
        self.plan_shared_bytes: Callable[[int, int, int], int] = shared_bytes

    def _bind(self, name: str, codes: str) -> Any:
        function = getattr(self._dll, name)
        function.argtypes = [*(_CODES[code] for code in codes), _POINTER]
        function.restype = _INT
        return function

    def plain(self, name: str) -> Any:
        """A C function that launches nothing, arguments and result as ctypes takes ints and arrays."""
        return getattr(self._dll, name)

    def raise_error(self, name: str, error: int) -> None:
        """KernelError with CUDA's own words."""
        raise KernelError(f"{name} was refused by the device: {self._text(error).decode()} (CUDA error {error})")


@functools.cache
def library(index: int) -> Library:
    """The library for GPU `index`, built at first use.

    Raises:
        KernelError: it can be neither found nor built nor loaded.
    """
    return Library(str(build(arch_of(torch.cuda.get_device_capability(index)))))


@functools.cache
def missing(index: int) -> str | None:
    """Why GPU `index` cannot run the kernels, in one sentence, or None. Builds them if need be."""
    try:
        library(index)
    except KernelError as err:
        return " ".join(str(err).split())
    return None


def state(capability: tuple[int, int]) -> str:
    """One line for a report on what a GPU of that compute capability gets, without building anything."""
    arch = arch_of(capability)
    try:
        if find_library(arch) is not None:
            return f"built for {arch}"
    except KernelError as err:
        return f"not to be had: {err}"
    return f"not built for {arch} yet; nvcc is {'there' if find_nvcc() else 'missing, so torch moves the rows'}"


def launch(name: str, anchor: Tensor, *arguments: Any) -> None:
    """Call a C function on the anchor's device and torch's current stream there. Tensors stand for their addresses.

    Raises:
        KernelError: the launch failed.
    """
    index = anchor.get_device()
    lib = library(index)
    raw = list(arguments)
    for i in _POINTERS[name]:
        if isinstance(raw[i], Tensor):
            raw[i] = raw[i].data_ptr()
    stream = torch._C._cuda_getCurrentRawStream(index)  # as torch's own compiled code asks: no Stream object is made
    if index == torch._C._cuda_getDevice():
        error = lib.functions[name](*raw, stream)
    else:
        with torch.cuda.device(index):
            error = lib.functions[name](*raw, stream)
    if error != 0:
        lib.raise_error(name, error)

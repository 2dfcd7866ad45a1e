"""Finds DeepEP and says what it offers. Several distributions ship a module `deep_ep`; what counts is what is in it.

Nothing here is imported before a configuration names the dispatcher, and `deep_ep` not before a function is called.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..config import DispatchConfig
from ..machine import loaded_nccl

INSTALL = {
    "v1": "pip install tokenspeed-deepep==1.2.1.post20251110 (Python 3.12, CUDA 13; runs on the NCCL of torch 2.11)",
    "v2": "pip install tokenspeed-deepep==2.1.0.post20260801 with NCCL 2.30.7 in place of torch's own",
}
DEFAULT_SMS = 24
ENTRY = {"v1": "Buffer", "v2": "ElasticBuffer"}
NOTES = (
    "api v1 is deep_ep.Buffer: 2, 4 or 8 GPUs of one host, hidden sizes that are multiples of 16 up to 8176 "
    "(intranode.cu), at most 128 experts per rank (notify_dispatch)",
    "api v2 is deep_ep.ElasticBuffer: one NVLink domain, hidden sizes that are multiples of 256 (combine.cuh), at most "
    "2048 experts and 256 per rank (layout.cuh), no expert twice in a token (dispatch_copy_epilogue.cuh), kernels "
    "compiled by nvcc at first use",
    "both sum in combine over bfloat16 rows only (SWITCH_TYPES, combine.cuh), and over at most 32 experts a token",
)


def settings(config: DispatchConfig) -> tuple[str, bool, int]:
    """(api, expand, num_sms) of a configuration."""
    options = dict(config.options)
    num_sms = DEFAULT_SMS if config.num_sms is None else config.num_sms
    return options.get("api", "v1"), options.get("expand", False), num_sms


def option_reasons(api: Any, expand: Any, num_sms: int) -> list[str]:
    """What is wrong with `[moe.deepep]` itself, sentences."""
    checks = [
        (api not in ("v1", "v2"), f"[moe.deepep] api must be 'v1' or 'v2', got {api!r}"),
        (not isinstance(expand, bool), f"[moe.deepep] expand must be true or false, got {expand!r}"),
        (expand is True and api == "v1", "[moe.deepep] expand = true needs api = 'v2'; leave it out or change api"),
        (num_sms < 2 or num_sms % 2 == 1,
         f"num_sms must be even and at least 2 (half of them send, half receive), got {num_sms}"),
    ]  # fmt: skip
    return [sentence for broken, sentence in checks if broken]


@functools.cache
def load() -> tuple[Any, str]:
    """The module `deep_ep` and "", or None and why it cannot be imported. Tried once in a process."""
    if importlib.util.find_spec("deep_ep") is None:
        return None, "no module deep_ep is installed"
    try:
        return importlib.import_module("deep_ep"), ""
    except Exception as err:  # its 2.x form checks NCCL with assertions while it is imported
        text = " ".join(str(err).split()) or "no message"
        return None, f"{distribution()} is installed, but importing deep_ep fails: {type(err).__name__}: {text}"


def distribution() -> str:
    """Name and version of what installed `deep_ep`, such as "tokenspeed-deepep 1.2.1"."""
    owners = sorted(set(importlib.metadata.packages_distributions().get("deep_ep", ())))
    named = [f"{name} {importlib.metadata.version(name)}" for name in owners]
    return " and ".join(named) if named else "a deep_ep that no installed distribution owns"


def offers(library: Any) -> list[str]:
    """Which of its two interfaces a module has: "v1", "v2"."""
    return [api for api, entry in ENTRY.items() if hasattr(library, entry)]


def findings() -> list[str]:
    """What was found, for a person."""
    library, why = load()
    if library is None:
        return [f"DeepEP: {why}"]
    apis = " and ".join(f"{api} ({ENTRY[api]})" for api in offers(library)) or "neither Buffer nor ElasticBuffer"
    return [f"DeepEP: {distribution()} with {apis}; NCCL loaded: {loaded_nccl() or 'with torch itself'}"]


def library_reasons(library: Any, why: str, api: str) -> list[str]:
    """Why an interface is not there; empty: it is."""
    if library is None:
        return [f"{why}; {INSTALL[api]}"]
    if api not in offers(library):
        return [
            f"api = {api!r} needs deep_ep.{ENTRY[api]}, which {distribution()} does not have (it has: "
            f"{', '.join(offers(library)) or 'neither form'}); set [moe.deepep] api or {INSTALL[api]}"
        ]
    return []


def machine_reasons(api: str, num_sms: int) -> list[str]:
    """What this machine or process lacks for an interface that was found."""
    if not torch.cuda.is_available():
        return ["it needs a CUDA GPU, and torch finds none"]
    reasons = []
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    if gpu.major < 9:
        reasons.append(
            f"its kernels are built for compute capability 9.0 and newer, this GPU has {gpu.major}.{gpu.minor}"
        )
    if num_sms > gpu.multi_processor_count:
        reasons.append(f"num_sms = {num_sms} is more than the GPU's {gpu.multi_processor_count} SMs; lower it")
    # check_torch_deterministic() of deep_ep/utils/envs.py asserts this in every call
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
        reasons.append(
            "deterministic algorithms with fill_uninitialized_memory write into its buffers while it communicates; "
            "set torch.utils.deterministic.fill_uninitialized_memory = False"
        )
    if api == "v2" and not _compiler_exists():
        reasons.append("api = 'v2' compiles its kernels at first use and finds no nvcc; set CUDA_HOME")
    return reasons


def together_reasons(num_sms: int, others: Sequence[int], num_on_gpu: int) -> list[str]:
    """Why a buffer cannot be open beside those of other process groups, whose kernels may run at the same time.

    Args:
        num_sms: SMs that its kernels take.
        others: those that each other group's kernels take, on this GPU.
        num_on_gpu: SMs of the GPU.
    """
    total = num_sms + sum(others)
    if not others or total <= num_on_gpu:
        return []
    return [
        f"process groups with a buffer on one GPU communicate at the same time, and with this one their kernels, which "
        f"wait for peers, take {total} SMs of {num_on_gpu} (num_sms: {', '.join(map(str, [num_sms, *others]))}), so "
        "that ranks could wait for each other for ever; lower num_sms, build all layers over one group, or call "
        "close_dispatchers for the other group before"
    ]


def _compiler_exists() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return os.access(os.path.join(home, "bin", "nvcc"), os.X_OK) or any(
        os.access(os.path.join(folder, "nvcc"), os.X_OK) for folder in os.environ.get("PATH", "").split(os.pathsep)
    )


def limit_reasons(library: Any, api: str, config: DispatchConfig, num_ranks: int) -> list[str]:
    """Where a configuration exceeds what an interface documents or asserts: limit, value, way out."""
    hidden, num_local = config.hidden_size, config.num_experts // num_ranks
    if api == "v1":
        # 1.2.1 before #413; the argument enable_shrink came 9 days after that fix
        multiple = 16 if _takes(library.Buffer.__init__, "enable_shrink") else 256
        checks = [
            (num_ranks not in (2, 4, 8), f"api = 'v1' serves 2, 4 or 8 ranks of one host, the group has {num_ranks}"),
            (hidden % multiple != 0,
             f"api = 'v1' needs a hidden_size that is a multiple of {multiple}, got {hidden}; pad the model's"),
            (hidden > 8176,  # half a row and 8 bytes in 8192 bytes of shared memory, intranode.cu
             f"api = 'v1' serves a hidden_size of at most 8176, got {hidden}; take api = 'v2'"),
            (num_local > 128,  # notify_dispatch: num_experts / num_ranks <= kNumThreads
             f"api = 'v1' serves at most 128 experts per rank, got {num_local}; take more ranks or api = 'v2'"),
        ]  # fmt: skip
    else:
        checks = [
            (hidden % 256 != 0,  # combine.cuh: kHidden % (32 * 16 bytes / bfloat16) == 0
             f"api = 'v2' needs a hidden_size that is a multiple of 256, got {hidden}; pad the model's or take 'v1'"),
            (config.num_experts > 2048 or num_local > 256,  # WorkspaceLayout of layout.cuh
             f"api = 'v2' serves at most 2048 experts and 256 per rank, got {config.num_experts} and {num_local}; "
             "take more ranks"),
            (config.max_tokens is None,
             "api = 'v2' sizes its buffer by max_tokens, which is not set; set it to the most tokens of one rank's "
             "micro-batch"),
        ]  # fmt: skip
    return [sentence for broken, sentence in checks if broken]


def _takes(function: Callable[..., Any], argument: str) -> bool:
    return argument in inspect.signature(function).parameters

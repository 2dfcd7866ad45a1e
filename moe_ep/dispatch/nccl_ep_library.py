"""Where the package nccl.ep is, whether it can run here, and which versions were found. Imports it only when asked."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from ..machine import loaded_nccl

PIP = "pip install --no-deps nccl-extensions==0.1.0 nccl4py==0.6.0"
PRELOAD = "start with LD_PRELOAD=.../nvidia/nccl/lib/libnccl.so.2 of nvidia-nccl-cu13 2.30.7"
# what libnccl_ep.so of nccl-extensions 0.1.0 takes from NCCL and older ones lack
NCCL_SYMBOLS = ("ncclCommQueryProperties", "ncclGetPeerDevicePointer", "ncclWinGetUserPtr", "ncclDevCommCreate")
# what this adapter calls; a distribution of the same name without them is no use
_NEEDED = {
    "nccl.ep": ("Group", "GroupConfig", "Tensor", "LayoutInfo", "DispatchInputs", "DispatchOutputs", "DispatchConfig",
                "CombineInputs", "CombineOutputs", "CombineConfig", "HandleConfig", "Algorithm", "Layout", "PassDir",
                "OverflowPolicy", "ExpertIdKind", "get_lib_version"),
    "nccl.ep.interop.torch": ("get_nccl_comm_from_group",),
}  # fmt: skip
_MIN_CAPABILITY = (9, 0)


@functools.cache
def library() -> Any:
    """The module nccl.ep.

    Raises:
        Exception: whatever its import raises; see `library_reasons`.
    """
    return importlib.import_module("nccl.ep")


def make_communicator(group: Any) -> Any:
    """A communicator of the library's own for the ranks of a process group. Collective."""
    return importlib.import_module("nccl.ep.interop.torch").get_nccl_comm_from_group(group)


def library_reasons() -> list[str]:
    """Sentences that say what this machine lacks for NCCL EP, each with the way out. Empty: nothing."""
    if not torch.cuda.is_available():
        return ["it needs a CUDA GPU, and torch finds none"]
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < _MIN_CAPABILITY:
        return [f"it needs a GPU of compute capability 9.0 or newer, this one has {major}.{minor}"]
    reasons = [*_nccl_reasons(loaded_nccl()), *_compiler_reasons()]
    # an import beside an NCCL that lacks its symbols fails in the loader; the reason above says more
    return reasons or _import_reasons()


def _import_reasons() -> list[str]:
    for module, names in _NEEDED.items():
        try:
            found = importlib.import_module(module)
        except Exception as err:  # a missing package, a missing symbol, a library of another CUDA: any kind
            return [f"{module} cannot be imported ({type(err).__name__}: {_first_line(err)}); {PIP}"]
        missing = [name for name in names if not hasattr(found, name)]
        if missing:
            return [f"the {module} that was found lacks {', '.join(missing)}; {PIP}"]
    return []


def _nccl_reasons(version: str | None) -> list[str]:
    if version is None:
        return [f"no NCCL library is loaded beside torch; {PRELOAD}"]
    try:
        nccl: Any = ctypes.CDLL("libnccl.so.2")
    except OSError as err:
        return [f"libnccl.so.2 cannot be opened ({_first_line(err)}); {PRELOAD}"]
    missing = [name for name in NCCL_SYMBOLS if not hasattr(nccl, name)]
    if missing:
        return [f"the NCCL that is loaded, {version}, lacks {', '.join(missing)}; {PRELOAD}"]
    headers = header_version()
    if headers is None:
        return ["it compiles kernels against NCCL's headers, and finds none; set NCCL_HOME to a folder with "
                f"include/nccl.h of NCCL {version}"]  # fmt: skip
    if headers != version:
        return [f"it would compile kernels against the headers of NCCL {headers}, and NCCL {version} is loaded; "
                "set NCCL_HOME to the folder of the one that is loaded"]  # fmt: skip
    return []


def nccl_home() -> Path | None:
    """The folder of NCCL's headers as the package resolves it: NCCL_HOME, else the package nvidia.nccl."""
    if os.environ.get("NCCL_HOME"):
        return Path(os.environ["NCCL_HOME"])
    try:
        found: Any = importlib.import_module("nvidia.nccl")
    except ImportError:
        return None
    return Path(next(iter(found.__path__)))


def header_version() -> str | None:
    """Version of the NCCL headers that kernels would be compiled against, None where there are none."""
    home = nccl_home()
    header = None if home is None else home / "include" / "nccl.h"
    if header is None or not header.exists():
        return None
    text = header.read_text(errors="replace")
    parts = [re.search(rf"#define NCCL_{part} (\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part.group(1) for part in parts if part) if all(parts) else None


def find_nvcc() -> str | None:
    """The compiler as the library looks for it (nvcc_compiler.cc), None where there is none."""
    for name in ("NCCL_EP_JIT_NVCC", "NVCC"):
        if os.environ.get(name):
            return shutil.which(os.environ[name])
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    own = Path(home or "/", "bin", "nvcc")
    return str(own) if home and own.exists() else shutil.which("nvcc")


def _compiler_reasons() -> list[str]:
    if find_nvcc() is None:
        return ["it compiles kernels at first use, and no nvcc is found; set CUDA_HOME to a CUDA toolkit"]
    return []


def found_versions() -> dict[str, str]:
    """What is there, by name: packages, library, NCCL loaded and its headers, compiler; "none" where it is missing."""
    found = {name: _package_version(name) for name in ("nccl-extensions", "nccl4py")}
    found["NCCL loaded"] = loaded_nccl() or "none"
    found["NCCL headers"] = header_version() or "none"
    found["nvcc"] = _nvcc_version()
    return found


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _nvcc_version() -> str:
    nvcc = find_nvcc()
    if nvcc is None:
        return "none"
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "does not run"
    version = re.search(r"release ([\d.]+)", said)
    return version.group(1) if version else "version unknown"


def _first_line(err: BaseException) -> str:
    return (str(err).splitlines() or [""])[0]

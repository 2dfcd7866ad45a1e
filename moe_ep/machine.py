"""Versions, GPUs and links of this machine as plain values for JSON: no host names, no serial numbers, no paths."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import __version__


def machine() -> dict[str, Any]:
    """Versions, GPUs and links. What is not there is None; `cuda_missing` and `nccl_missing` then say why.

    `peer_access[i][j]`: GPU i can read and write GPU j's memory directly. `links[i][j]`: how it gets there, as
    nvidia-smi names it ("NV18", "PIX", ...), None where nvidia-smi cannot tell.
    """
    return {
        "moe_ep": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        **_cuda(),
        **_nccl(),
        "nvcc": _nvcc_version(),
        "gpus": _gpus(),
        "peer_access": _peer_access(),
        "links": parse_topology(_nvidia_smi("topo", "-m")),
    }


def _cuda() -> dict[str, Any]:
    missing = None
    if torch.version.cuda is None:
        missing = "this torch is built without CUDA"
    elif not torch.cuda.is_available():
        missing = f"torch is built for CUDA {torch.version.cuda}, but finds no driver or no GPU"
    driver = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return {"cuda": torch.version.cuda, "cuda_missing": missing, "driver": driver.split("\n")[0] if driver else None}


def _nccl() -> dict[str, Any]:
    if not (dist.is_available() and dist.is_nccl_available()):
        return {"nccl_compiled": None, "nccl_loaded": None, "nccl_missing": "this torch is built without NCCL"}
    compiled = ".".join(map(str, torch.cuda.nccl.version()[:3]))
    return {"nccl_compiled": compiled, "nccl_loaded": loaded_nccl(), "nccl_missing": None}


def loaded_nccl() -> str | None:
    """Version of the NCCL library in this process; torch itself only tells the one that it was compiled with.

    None where no such library is loaded (a torch with NCCL linked in, or none at all).
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split(maxsplit=5)[5] for line in lines if re.search(r"/libnccl\.so", line)}
    if not paths:
        return None
    version = ctypes.c_int()
    ctypes.CDLL(sorted(paths)[0]).ncclGetVersion(ctypes.byref(version))
    return f"{version.value // 10000}.{version.value % 10000 // 100}.{version.value % 100}"


def num_gpus() -> int:
    """CUDA GPUs that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _nvcc_version() -> str | None:
    """Release of the CUDA compiler that would build the kernels, None where there is none."""
    from .kernels.build import find_nvcc

    nvcc = find_nvcc()
    text = "" if nvcc is None else _output(nvcc, "--version")
    found = re.search(r"release (\S+),", text)
    return found[1] if found else None


def _gpus() -> list[dict[str, Any]]:
    from .kernels.library import state

    found = [torch.cuda.get_device_properties(index) for index in range(num_gpus())]
    return [
        {
            "name": p.name,
            "memory_mib": p.total_memory >> 20,
            "sm": f"{p.major}.{p.minor}",
            "sms": p.multi_processor_count,
            "kernels": state((p.major, p.minor)),
        }
        for p in found
    ]


def _peer_access() -> list[list[bool]]:
    gpus = range(num_gpus())
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in gpus] for i in gpus]


def parse_topology(text: str) -> list[list[str]] | None:
    """The GPU to GPU part of what `nvidia-smi topo -m` prints; None where the text has none."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    rows = [row for row in rows if re.fullmatch(r"GPU\d+", " ".join(row[:1])) and "X" in row]
    return [row[1 : len(rows) + 1] for row in rows] or None


def _nvidia_smi(*arguments: str) -> str:
    """Its output, "" where it is not installed, fails or hangs."""
    return "" if shutil.which("nvidia-smi") is None else _output("nvidia-smi", *arguments)


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):  # a file of that name that is no program of this machine, or hangs
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

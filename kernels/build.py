"""Compiles the CUDA sources of this folder with plain nvcc into one library per architecture, kept in a cache.

A library's name holds its architecture and a hash of sources and flags, so a changed source never meets an old binary,
and one binary serves every torch: the sources include no header of it. Its last 32 bytes are the SHA-256 of the rest,
so a file that was cut off or damaged is seen before it is loaded, and built again.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-cudart", "static", "-t", "0")
_DIGEST_BYTES = 32
_OLDEST = 80  # __reduce_max_sync, cp.async


class KernelError(RuntimeError):
    """Kernels that cannot be compiled or loaded here, or a launch that the device refused."""


def find_nvcc() -> str | None:
    """Path of the CUDA compiler: on PATH, below CUDA_HOME or CUDA_PATH, or where CUDA installs itself."""
    roots = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [shutil.which("nvcc"), *(f"{root}/bin/nvcc" for root in [*roots, "/usr/local/cuda"] if root)]
    return next((place for place in places if place and os.access(place, os.X_OK)), None)


@functools.cache
def source_hash() -> str:
    """Of every source, header and flag, 16 hex digits."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted([*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh")]):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def check_arch(arch: str) -> str:
    """The architecture itself.

    Raises:
        KernelError: not of the form sm_80, sm_90a; or older than the kernels' instructions.
    """
    if re.fullmatch(r"sm_\d{2,3}[af]?", arch) is None:
        raise KernelError(f"architecture {arch!r} is none; give sm_ and a compute capability, such as sm_80 or sm_90a")
    if int(re.sub(r"\D", "", arch)) < _OLDEST:
        raise KernelError(f"the kernels use instructions of sm_{_OLDEST} and newer, and {arch} is older")
    return arch


def arch_of(capability: tuple[int, int]) -> str:
    """Architecture to compile for on a GPU of that compute capability: (9, 0) -> sm_90a."""
    major, minor = capability
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


def cache_folder() -> Path:
    """Where libraries are kept: moe_ep below XDG_CACHE_HOME, by default ~/.cache. Absolute: nvcc runs elsewhere.

    Raises:
        KernelError: neither XDG_CACHE_HOME is set nor has this user a home.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache").absolute() / "moe_ep"
    except RuntimeError as err:
        raise KernelError("this user has no home folder to keep built kernels in; set XDG_CACHE_HOME to one") from err


def library_path(arch: str) -> Path:
    """Where the library of these sources for an architecture belongs, whether it is there or not."""
    return cache_folder() / f"kernels-{check_arch(arch)}-{source_hash()}.so"


def find_library(arch: str) -> Path | None:
    """The library if it has been built and is whole, else None."""
    path = library_path(arch)
    try:
        content = path.read_bytes()
    except OSError:
        return None
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return path if hashlib.sha256(body).digest() == digest else None


def build(arch: str) -> Path:
    """The library for an architecture, compiled now unless it is there. Safe to call from many processes at once.

    Raises:
        KernelError: no compiler, a failed compilation (its last lines), or a cache that cannot be written.
    """
    if (path := find_library(arch)) is not None:
        return path
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelError(
            f"no nvcc is found to compile the kernels for {arch}, and the cache holds none; install the CUDA toolkit, "
            "or set CUDA_HOME to where it is"
        )
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        with _lock(library_path(arch).with_suffix(".lock")):
            return find_library(arch) or _compile(nvcc, arch)
    except OSError as err:
        raise KernelError(
            f"the kernel cache cannot be written ({err}); set XDG_CACHE_HOME to a folder that can"
        ) from err


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a file lock; the system lets go of it if this process dies. What such a process left is removed."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for left in path.parent.glob(f"{path.stem}-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def command(nvcc: str, arch: str, out: Path) -> list[str]:
    """What is run to compile every source for one architecture."""
    number = check_arch(arch).removeprefix("sm_")
    sources = [str(path) for path in sorted(FOLDER.glob("*.cu"))]
    return [nvcc, *FLAGS, f"-gencode=arch=compute_{number},code=sm_{number}", *sources, "-o", str(out)]


def _compile(nvcc: str, arch: str) -> Path:
    path = library_path(arch)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.stem}-") as scratch:
        out = Path(scratch) / path.name
        try:
            done = subprocess.run(command(nvcc, arch, out), capture_output=True, text=True, cwd=scratch)
        except OSError as err:
            raise KernelError(f"{nvcc} cannot be run ({err.strerror}); set CUDA_HOME to a CUDA toolkit") from err
        if done.returncode != 0:
            last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
            raise KernelError(f"nvcc failed to compile the kernels for {arch}:\n{last}")
        content = out.read_bytes()
        out.write_bytes(content + hashlib.sha256(content).digest())
        out.chmod(0o755)
        out.replace(path)
    return path

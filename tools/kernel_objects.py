#!/usr/bin/env python3
"""What machine code a built kernel library holds: every kernel of the sources, for its own architecture, none empty.

    python tools/kernel_objects.py sm_80 sm_90a sm_100

Builds what is not built yet and prints the bytes of machine code of each kernel. Exit status: 0 all hold real code,
1 something is missing, 2 a library cannot be had. The objects are read here, since a toolkit of nvcc alone has no
cuobjdump: nvcc leaves the device code of each source file in the library as an ELF image of its own.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no installed package

from moe_ep.kernels.build import FOLDER, KernelError, build, check_arch

MIN_BYTES = 512  # 32 instructions; a body that is compiled out leaves an exit and padding, 128 or 256 bytes
_EM_CUDA = 190
_GLOBAL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(")


@dataclass
class Objects:
    """Device code of one library.

    Attributes:
        archs: compute capabilities that its images are for, such as {90}.
        code: bytes of machine code of each kernel instance, by its name without what differs between builds.
    """

    archs: set[int] = field(default_factory=set)
    code: dict[str, int] = field(default_factory=dict)


def read_objects(library: bytes) -> Objects:
    """The images inside a library (ELF64, little endian), and the sections of code in each."""
    found = Objects()
    for match in re.finditer(rb"\x7fELF\x02\x01", library):
        image = memoryview(library)[match.start() :]
        if len(image) < 64 or struct.unpack_from("<H", image, 18)[0] != _EM_CUDA:
            continue
        found.archs.add(struct.unpack_from("<I", image, 48)[0] >> 8 & 0xFF)
        for name, size in _sections(image):
            if name.startswith(".text."):
                found.code[plain_name(name.removeprefix(".text."))] = size
    return found


def _sections(image: memoryview) -> list[tuple[str, int]]:
    (table,) = struct.unpack_from("<Q", image, 40)
    entry, count, names_at = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * entry) for i in range(count)]
    names = bytes(image[headers[names_at][4] : headers[names_at][4] + headers[names_at][5]])
    return [(names[h[0] : names.index(b"\0", h[0])].decode(), h[5]) for h in headers]


def plain_name(symbol: str) -> str:
    """A mangled name without the hashes that nvcc puts into an unnamed namespace."""
    return re.sub(r"\d+_GLOBAL__N__[0-9a-f]+_\d+_(\w+?_cu)_[0-9a-f]{8}", r"\1.", symbol)


def source_kernels(folder: Path) -> set[str]:
    """Names behind `__global__` in all sources of a folder."""
    texts = [path.read_text() for pattern in ("*.cu", "*.cuh") for path in folder.glob(pattern)]
    return {name for text in texts for name in _GLOBAL.findall(text)}


def problems(libraries: Mapping[str, Objects], kernels: set[str]) -> list[str]:
    """Sentences on what is missing in the libraries, by architecture; empty: nothing."""
    said = []
    everything = {name for objects in libraries.values() for name in objects.code}
    for arch, objects in libraries.items():
        number = int(re.sub(r"\D", "", arch))
        if objects.archs != {number}:
            said.append(f"{arch}: its images are for {sorted(objects.archs)}")
        for kernel in sorted(kernels):
            if not instances(objects, kernel):
                said.append(f"{arch}: kernel {kernel} of the sources has no code")
        said += [
            f"{arch}: {name} is there for other architectures alone" for name in sorted(everything - set(objects.code))
        ]
        small = sorted(name for name, size in objects.code.items() if size < MIN_BYTES)
        said += [f"{arch}: {name} has {objects.code[name]} bytes of code, less than {MIN_BYTES}" for name in small]
    return said


def instances(objects: Objects, kernel: str) -> list[int]:
    """Bytes of code of every instance of a kernel."""
    return [
        size for name, size in objects.code.items() if re.search(rf"(?<!\d){len(kernel)}{kernel}(?![a-z0-9_])", name)
    ]


def table(libraries: Mapping[str, Objects], kernels: set[str]) -> str:
    """A line a kernel: instances and bytes for each architecture."""
    lines = [f"{'kernel':<20}" + "".join(f"{arch:>20}" for arch in libraries)]
    for kernel in sorted(kernels):
        sizes = [instances(objects, kernel) for objects in libraries.values()]
        lines.append(f"{kernel:<20}" + "".join(f"{f'{len(one)} x, {sum(one)} B':>20}" for one in sizes))
    return "\n".join(lines)


def main(archs: Sequence[str]) -> int:
    """Build, read, print; returns the exit status."""
    if not archs or any(word.startswith("-") for word in archs):
        print("usage: kernel_objects.py ARCH [ARCH ...], such as sm_80 sm_90a sm_100", file=sys.stderr)
        return 2
    try:
        libraries = {arch: read_objects(build(check_arch(arch)).read_bytes()) for arch in archs}
    except KernelError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    kernels = source_kernels(FOLDER)
    print(table(libraries, kernels))
    wrong = problems(libraries, kernels)
    for sentence in wrong:
        print(f"WRONG: {sentence}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

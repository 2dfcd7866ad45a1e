"""Checks an installed wheel against the sources that it was built from: check_wheel.py SITE SOURCES."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path

PLACES = {"moe_ep": "moe_ep", "kernels": "moe_ep/kernels"}
SUFFIXES = {".py", ".typed", ".cu", ".cuh", ".h"}


def missing_files(site: Path, sources: Path) -> list[str]:
    """Source files that the wheel should have brought, and did not."""
    found = []
    for folder, place in PLACES.items():
        for file in (sources / folder).rglob("*"):
            name = file.relative_to(sources / folder)
            if file.suffix in SUFFIXES and not (site / place / name).is_file():
                found.append(f"{folder}/{name}")
    return sorted(found)


def main(site: Path, sources: Path) -> None:
    """Exit with a message at the first thing that is wrong."""
    if missing := missing_files(site, sources):
        sys.exit(f"not in the wheel: {', '.join(missing)}; see [tool.setuptools] in pyproject.toml")
    folders = {path.name for path in site.iterdir() if path.suffix != ".dist-info"}
    if folders != {"moe_ep"}:
        sys.exit(f"the wheel installs {sorted(folders)} at top level; only moe_ep may be there")
    for name in ("moe_ep", "moe_ep.kernels", "moe_ep.layer", "moe_ep.testing"):
        file = Path(importlib.import_module(name).__file__ or "")
        if not file.is_relative_to(site):
            sys.exit(f"{name} was imported from {file}, not from the wheel")
    version = importlib.metadata.version("moe-ep")
    if version != importlib.import_module("moe_ep").__version__:
        sys.exit(f"the wheel's version is {version}, the package's another")
    print(f"moe-ep {version}: the wheel has every source file and imports from its own place")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())

"""`python -m moe_ep`: the commands of the package."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import torch

from .doctor import diagnose, to_text
from .machine import num_gpus


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Wrong usage exits with 2."""
    parser = argparse.ArgumentParser(prog="python -m moe_ep", description=sys.modules[__package__].__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    text = "report versions, GPUs, links, and which dispatchers can run here; exit 0 when the default one can, else 1"
    doctor = commands.add_parser("doctor", help=text, description=text)
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    text = "compile the CUDA kernels into the cache; exit 0 when all are there, else 1"
    build = commands.add_parser("build", help=text, description=text)
    text = "such as sm_80 sm_90a sm_100; default: those of this machine's GPUs"
    build.add_argument("--arch", nargs="+", metavar="ARCH", default=[], help=text)
    options = parser.parse_args(arguments)
    return _build(options.arch) if options.command == "build" else _doctor(options.json)


def _doctor(as_json: bool) -> int:
    report = diagnose()
    print(json.dumps(report, indent=2) if as_json else to_text(report))
    return 0 if report["works"] else 1


def _build(archs: Sequence[str]) -> int:
    from .kernels.build import KernelError, arch_of, build, check_arch

    archs = archs or sorted({arch_of(torch.cuda.get_device_capability(index)) for index in range(num_gpus())})
    if not archs:
        print("error: this machine has no CUDA GPU to build for; name one with --arch, such as sm_90a", file=sys.stderr)
        return 1
    try:
        for arch in archs:
            check_arch(arch)  # all of them before the first, which takes half a minute
        for arch in archs:
            print(f"{arch}: {build(arch)}", flush=True)
    except KernelError as err:
        print(f"error: {err}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

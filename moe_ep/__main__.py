"""`python -m moe_ep`: the commands of the package."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from .doctor import diagnose, to_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Wrong usage exits with 2."""
    parser = argparse.ArgumentParser(prog="python -m moe_ep", description=sys.modules[__package__].__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    text = "report versions, GPUs, links, and which dispatchers can run here; exit 0 when the default one can, else 1"
    doctor = commands.add_parser("doctor", help=text, description=text)
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    report = diagnose()
    print(json.dumps(report, indent=2) if options.json else to_text(report))
    return 0 if report["works"] else 1


if __name__ == "__main__":
    sys.exit(main())

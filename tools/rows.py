"""Result rows: one JSON object a line, a machine header first, every field in every row, nothing that names a host."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_ep.machine import machine
from moe_ep.schema import require

ROOT = Path(__file__).resolve().parents[1]
MACHINE_FIELDS = (
    *("kind", "gpu", "gpus", "link", "driver", "torch", "cuda", "nccl_loaded", "python", "commit", "dirty", "argv"),
)
ROW_FIELDS = (
    *("kind", "level", "stage", "pass", "dispatcher", "api", "experts", "shape", "R", "skew", "skew_realised"),
    *("M", "S", "variant", "attention", "layers", "reserve_sms", "dtype", "form"),
    *("us_p10", "us_p50", "us_p90", "floor_us", "ratio"),
    *("route_bytes", "dedup_bytes", "algbw", "busbw", "wrong", "err", "peak_mib", "host_syncs", "sms"),
    *("comm_us", "exposed_us", "hidden_share", "hidden_share_steps", "gemm_us", "gemm_rate", "status", "reason"),
)
CHOICES: dict[str, tuple[str | None, ...]] = {
    "level": ("kernel", "stage", "layer", "stack", "step"),
    "stage": (
        *("dispatch", "combine", "dispatch+combine", None),
        *("plan", "reroute", "weight_sync", "grad_reduce"),  # of copies of experts
    ),
    "pass": ("fwd", "fwd+bwd"),
    "form": ("unique", "expanded", None),
    "variant": ("unsplit", "split", "overlapped", "joint", "compute", "communication", None),
    "status": ("ok", "refused", "oom", "failed"),
}
REQUIRED = ("level", "pass", "dispatcher", "shape", "R", "skew", "M", "S", "dtype", "status")
Row = dict[str, Any]


def make_row(**values: Any) -> Row:
    """A row with every field, null where nothing is known. `pass` is a keyword of Python: pass_ stands for it.

    Raises:
        ValueError: an unknown field, a value outside a closed choice, a missing field that every row knows, a row
            that is ok without a time, or one that is not ok without a reason or with a time.
    """
    values = {name.rstrip("_"): value for name, value in values.items()}
    unknown = sorted(set(values) - set(ROW_FIELDS))
    if unknown:
        raise ValueError(f"a result row has no field {', '.join(unknown)}; it has {', '.join(ROW_FIELDS)}")
    row: Row = dict.fromkeys(ROW_FIELDS) | values | {"kind": "row"}
    missing = [name for name in REQUIRED if row[name] is None]
    if missing:
        raise ValueError(f"a result row needs {', '.join(missing)}")
    for name, allowed in CHOICES.items():
        if row[name] not in allowed:
            raise ValueError(f"{name} = {row[name]!r} is not one of {', '.join(map(repr, allowed))}")
    ok = row["status"] == "ok"
    if ok != (row["us_p50"] is not None) or ok == bool(row["reason"]):
        raise ValueError(f"status {row['status']!r}: a row has a time and no reason where it is ok, else the reverse")
    return row


def machine_header(argv: Sequence[str], copied_from: str | None = None) -> Row:
    """The first line of a file: what ran, on what. All GPU fields are null where there is no GPU.

    Args:
        argv: the command, as seen from the repository.
        copied_from: for sources that were copied here without their git history: the commit, with "-dirty" behind it
            where they differ from it.

    Raises:
        RecipeError: `copied_from` is no commit, or git knows the commit itself.
    """
    found = machine()
    gpus = found["gpus"]
    commit, dirty = git_state(ROOT)
    if copied_from is not None:
        parts = re.fullmatch(r"([0-9a-f]{7,40})(-dirty)?", copied_from)
        require(parts is not None, f"commit {copied_from!r} must be 7 to 40 hex digits, with -dirty where that is so")
        require(commit is None, f"commit {copied_from!r} is for copied sources; these stand in git, at {commit}")
        assert parts is not None, "refused above"
        commit, dirty = parts[1], parts[2] is not None
    values = {
        "kind": "machine",
        "gpu": gpus[0]["name"] if gpus else None,
        "gpus": len(gpus) or None,
        "link": link_name(found["links"]) if gpus else None,
        "driver": found["driver"],
        "torch": found["torch"],
        "cuda": found["cuda"],
        "nccl_loaded": found["nccl_loaded"],
        "python": platform.python_version(),
        "commit": commit,
        "dirty": dirty,
        "argv": [relative(argument) for argument in argv],
    }
    return {name: values[name] for name in MACHINE_FIELDS}


def link_name(links: Sequence[Sequence[str]] | None) -> str | None:
    """How GPUs reach each other, such as "NV18"; several kinds are joined by "/"; None with one GPU or unknown."""
    kinds = {kind for i, row in enumerate(links or ()) for j, kind in enumerate(row) if i != j}
    return "/".join(sorted(kinds)) or None


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """(commit, whether anything but result files differs from it); (None, None) outside a git work tree."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--", ".", ":(exclude)tools/results")
    return commit, None if commit is None or changed is None else bool(changed)


def relative(argument: str) -> str:
    """An argument without absolute paths: relative to the repository inside it, the bare file name outside."""
    key, equals, value = argument.rpartition("=") if argument.startswith("-") else ("", "", argument)
    path = Path(value)
    if path.is_absolute():
        inside = path.is_relative_to(ROOT)
        value = path.relative_to(ROOT).as_posix() if inside else path.name
    return f"{key}{equals}{value}"


def scrub(value: Any) -> Any:
    """The value with absolute paths cut to their last part, this host's name taken out, and NaN and infinity null."""
    if isinstance(value, str):
        text = re.sub(r"(?<![\w.:/])(?:/[\w.+@~-]+)+/(?=[\w.+@~-])", "", value)
        host = socket.gethostname()
        return re.sub(rf"\b{re.escape(host)}\b", "HOST", text) if host and host != "localhost" else text
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: scrub(item) for key, item in value.items()}
    return [scrub(item) for item in value] if isinstance(value, list | tuple) else value


class RowFile:
    """A JSONL file that grows row by row, so that an aborted run keeps what it had; None: no file.

    A run replaces the file of an earlier one at its first line.
    """

    def __init__(self, path: Path | None, header: Row) -> None:
        self.path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_line(header))

    def append(self, rows: Sequence[Row]) -> None:
        """Write rows and have them on the disk."""
        if self.path is not None:
            with self.path.open("a") as file:
                file.writelines(map(_line, rows))
                file.flush()
                os.fsync(file.fileno())


def _line(value: Row) -> str:
    return json.dumps(scrub(value), allow_nan=False) + "\n"


def _parsed(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as err:
        what = "give a file that --out of a benchmark wrote" if number == 1 else "the run that wrote it was cut off"
        raise ValueError(f"{path}:{number}: the line is no JSON ({err.msg}); {what}") from err


def read_rows(path: Path) -> tuple[Row, list[Row]]:
    """(machine header, rows) of a file.

    Raises:
        ValueError: not such a file: the message has path, line and what is wrong.
    """
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    values = [_parsed(path, number, line) for number, line in enumerate(lines, 1)]
    if not values or values[0].get("kind") != "machine":
        raise ValueError(f"{path}: the first line is no machine header; give a file that --out of a benchmark wrote")
    for number, value in enumerate(values, 1):
        missing = [name for name in (MACHINE_FIELDS if number == 1 else ROW_FIELDS) if name not in value]
        if missing:
            raise ValueError(f"{path}:{number}: field {', '.join(missing)} is missing; unknown values are null")
    return values[0], values[1:]


def dtype_name(dtype: torch.dtype) -> str:
    """Name as configurations spell it, such as "float32"."""
    return str(dtype).removeprefix("torch.")

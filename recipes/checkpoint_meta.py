"""What a checkpoint says about itself: `meta.json`, and with it whether every byte is still what was written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from moe_ep.errors import CheckpointError
from recipes.checkpoint_folder import META

FORMAT = 3
_TYPES = {"step": int, "samples_per_step": int, "model": dict, "data": dict, "files": dict}


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file as it was written: bytes, and SHA-256 in hexadecimal."""

    size: int
    sha256: str


def record(path: Path) -> FileRecord:
    """Read a file, in pieces; a few hundred MB a second or more."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.stat().st_size, digest)


def write_meta(folder: Path, facts: dict[str, Any], files: dict[str, FileRecord]) -> None:
    """Write meta.json: `facts`, all files, and a digest of itself. On disk when this returns."""
    body = {"format": FORMAT, **facts, "files": {name: [r.size, r.sha256] for name, r in sorted(files.items())}}
    with (folder / META).open("w", encoding="utf-8") as out:
        out.write(json.dumps({**body, "sha256": _digest(body)}, indent=1) + "\n")
        out.flush()
        os.fsync(out.fileno())


def read_meta(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint, with `files` as name -> FileRecord.

    Raises:
        CheckpointError: missing, unreadable, damaged, or of a format that this version does not know.
    """
    try:
        meta = json.loads((path / META).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise CheckpointError(f"{path} is no complete checkpoint: {META}: {first_line(err)}") from err
    if not isinstance(meta, dict):
        raise CheckpointError(f"{path} is damaged: {META} holds a {type(meta).__name__}; {WAY_OUT}")
    if meta.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {meta.get('format')!r}; this version reads {FORMAT}; {WAY_OUT}")
    said = meta.pop("sha256", None)
    if said != _digest(meta) or any(type(meta.get(key)) is not kind for key, kind in _TYPES.items()):
        raise CheckpointError(f"{path} is damaged: {META} is not as it was written; {WAY_OUT}")
    return {**meta, "files": {name: FileRecord(*entry) for name, entry in meta["files"].items()}}


WAY_OUT = "resume from another checkpoint"


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def check_sizes(path: Path, files: dict[str, FileRecord]) -> None:
    """Raise CheckpointError where a file is missing, or shorter or longer than it was."""
    for name, wanted in files.items():
        real = (path / name).stat().st_size if (path / name).exists() else None
        if real != wanted.size:
            what = "is missing" if real is None else f"has {real} bytes instead of {wanted.size}"
            raise CheckpointError(f"{path} is truncated: {name} {what}; {WAY_OUT}")


def check_contents(path: Path, files: dict[str, FileRecord], names: Iterable[str]) -> None:
    """Raise CheckpointError where one of `names` does not hold what was written."""
    for name in names:
        if record(path / name) != files[name]:
            raise CheckpointError(f"{path} is damaged: {name} is not as it was written; {WAY_OUT}")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever goes wrong inside is a CheckpointError of this checkpoint."""
    try:
        yield
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as err:  # the latter is a BaseException
        raise CheckpointError(f"{path}: cannot be read ({first_line(err)}); {WAY_OUT}") from err


def first_line(err: BaseException) -> str:
    """The sentence that explains a failure: of the root cause where torch.distributed.checkpoint wrapped it."""
    failures = getattr(err, "failures", None)
    if failures:
        cause = next(iter(failures.values()))
        err = cause[0] if isinstance(cause, tuple) else cause
    return f"{type(err).__name__}: {str(err).strip().splitlines()[0] if str(err).strip() else 'no message'}"

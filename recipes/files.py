"""Writing into the run's folder: a disk that is full, or a folder that may not be written, is an error with a name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from moe_ep.errors import MoEError


class RunFolderError(MoEError, RuntimeError):
    """A file of the run's folder, checkpoints apart, that cannot be written or read."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in what goes wrong while it is written.

    Raises:
        RunFolderError: in place of an OSError.
    """
    try:
        yield
    except OSError as err:
        raise unwritable(path, err.strerror or str(err)) from err


def unwritable(path: Path, reason: str) -> RunFolderError:
    """What to raise for a file that could not be written."""
    return RunFolderError(
        f"{path} cannot be written ({reason}); free space or choose another run.dir. "
        "The run's checkpoints are as they were: the same command goes on from the newest"
    )


def replace_text(path: Path, text: str) -> None:
    """Write beside, then rename, so that a full disk leaves the file before.

    Raises:
        RunFolderError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.partial")
    try:
        with writing(path):
            beside.write_text(text, encoding="utf-8")
            os.replace(beside, path)
    except RunFolderError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise

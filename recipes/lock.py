"""One run at a time in a run's folder. The lock is the system's own: it ends with the process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
from pathlib import Path
from typing import IO

from moe_ep.errors import RecipeError
from recipes.files import RunFolderError

LOCK = "lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class FolderLock:
    """Holds a run's folder for this process: as a context, until it is left; at the latest until the process ends."""

    def __init__(self) -> None:
        self.files: list[IO[str]] = []

    def hold(self, folder: Path) -> str | None:
        """Make the folder and take its lock, if this process has not got it; also after the folder was renamed.

        Returns:
            A warning, where the file system keeps no locks.

        Raises:
            RecipeError: another run is in this folder.
            RunFolderError: the folder cannot be written.
        """
        path = folder / LOCK
        while not self._holds(path):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file = path.open("a+", encoding="utf-8")
            except OSError as err:
                raise RunFolderError(_unusable(folder, err)) from err
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as err:
                with file:
                    return _refused(folder, file, err)
            self.files.append(file)  # also a file that was renamed in between: then once more
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
        return None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        while self.files:
            self.files.pop().close()

    def _holds(self, path: Path) -> bool:
        return path.exists() and any(os.path.samestat(path.stat(), os.fstat(file.fileno())) for file in self.files)


def _unusable(folder: Path, err: OSError) -> str:
    return (
        f"{folder} cannot be made or written ({err.strerror or err}); choose another run.dir or run.name, or free space"
    )


def _refused(folder: Path, file: IO[str], err: OSError) -> str:
    if err.errno in _NO_LOCKS:
        return f"{folder}: this file system keeps no locks ({err.strerror}); let no second run write into it"
    file.seek(0)
    who = file.read().strip() or "unknown"
    text = f"{folder} is in use by another run ({who}); wait until it ends, stop it, or choose another run.name"
    raise RecipeError(text) from err

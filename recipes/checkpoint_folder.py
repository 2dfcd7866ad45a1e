"""The folder that holds a run's checkpoints: their names, which one is meant, which ones go or step aside.

`step-00000100` is the checkpoint of step 100; `step-00000100.aside` is one of another line of training, which the run
left by going back behind it, or by starting from elsewhere. Those are never deleted.
"""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path

from moe_ep.errors import CheckpointError

META = "meta.json"
_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:08d}"


def list_steps(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints of a folder, oldest first; not those that were put aside."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name)) and path.is_dir()]
    return sorted((int(match[1]), path) for match, path in found)


def newest(folder: Path) -> Path | None:
    """The checkpoint of the highest step, or None."""
    steps = list_steps(folder)
    return steps[-1][1] if steps else None


def find(resume: str, folder: Path) -> Path | None:
    """The checkpoint that `checkpoint.resume` means: a path names a step's folder, or a folder of checkpoints or a run.

    Raises:
        CheckpointError: nothing there.
    """
    if resume == "auto":
        return newest(folder)
    if resume == "never":
        return None
    path = Path(resume)
    for candidate in (path if (path / META).exists() else None, newest(path), newest(path / "checkpoints")):
        if candidate is not None:
            return candidate
    raise CheckpointError(
        f"checkpoint.resume = {resume!r}: no complete checkpoint there; name a run's folder or a step's in its "
        "checkpoints (a relative path starts at the working directory), or set 'auto' or 'never'"
    )


def is_step(path: Path, folder: Path, step: int) -> bool:
    """Whether `path`, however it is written, is the checkpoint of `step` that `folder` itself holds."""
    own = folder / step_name(step)
    return own.exists() and own.samefile(path)


def put_aside(folder: Path, path: Path, step: int) -> list[Path]:
    """Rename what a run that goes on from `path` at `step` leaves behind; returns the new names.

    That is every higher step of `folder`, which "auto" and pruning would otherwise take for newer than what the run is
    going to save. Where the run starts from elsewhere it is every step: pruning would take the lower ones for its own.
    """
    elsewhere = not is_step(path, folder, step)
    return [rename_aside(old) for n, old in list_steps(folder) if n > step or elsewhere]


def rename_aside(old: Path) -> Path:
    """Rename one checkpoint so that nothing takes it up unless `checkpoint.resume` names it; returns the new name."""
    return old.rename(aside_name(old))


def aside_name(path: Path) -> Path:
    """A free name beside `path`: `NAME.aside`, `NAME.aside2`, ..."""
    names = (path.with_name(f"{path.name}.aside{n if n > 1 else ''}") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


def prune(folder: Path, step: int, keep: int) -> None:
    """Of the checkpoints up to `step`, the one just written, remove all but the newest `keep`."""
    for _, old in [(n, path) for n, path in list_steps(folder) if n <= step][:-keep]:
        shutil.rmtree(old, ignore_errors=True)

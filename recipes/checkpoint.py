"""Checkpoints of a run: `checkpoints/step-00000100/`, readable by any number of ranks.

Tensors go through torch.distributed.checkpoint. Experts are stored one by one under their *global* id, so that a run
saved with ep_size = 4 resumes with 2 or 1; everything else is stored whole, whatever its sharding was. A checkpoint
is written beside and renamed after every rank is done: a folder named step-* is complete, or it was damaged later,
which `meta.json` (sizes of all files) shows.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from moe_ep.errors import CheckpointError
from recipes.entries import Entries
from recipes.optim import ShardedAdamW
from recipes.ranks import Ranks

FORMAT = 1
META = "meta.json"
_STEP = re.compile(r"step-(\d{8})")
_SHOWN = 3  # differing names that a message lists


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands: optimizer steps done, and the samples of one step (data are keyed by both)."""

    step: int
    samples_per_step: int


def save(
    folder: Path, progress: Progress, model_config: dict[str, Any], entries: Entries, ranks: Ranks, keep: int
) -> Path:
    """Write `folder`/step-N and remove all but the newest `keep`; a collective.

    Raises:
        CheckpointError: on every rank, where any rank could not write. The checkpoints before it are intact.
    """
    final = folder / f"step-{progress.step:08d}"
    partial = folder / f".partial-{final.name}"
    try:
        ranks.together(lambda: _prepare(folder, partial) if ranks.rank == 0 else None)
        with _one_rank_is_fine():
            save_tensors(entries.tensors, storage_writer=FileSystemWriter(partial), no_dist=ranks.group is None)
        ranks.together(lambda: _seal(partial, final, progress, model_config) if ranks.rank == 0 else None)
    except (Exception, CheckpointException) as err:  # the latter is a BaseException
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        error = CheckpointError(
            f"saving {final} failed ({first_line(err)}); free space or choose another run.dir. "
            f"The newest complete checkpoint is {newest(folder) or 'none'}"
        )
        raise error from err
    if ranks.rank == 0:
        for _, old in list_steps(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    return final


@contextlib.contextmanager
def _one_rank_is_fine() -> Iterator[None]:
    """No warning that there is no process group: one rank needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _prepare(folder: Path, partial: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".partial-step-*"):  # of a run that was killed while saving
        shutil.rmtree(leftover)
    partial.mkdir()


def _seal(partial: Path, final: Path, progress: Progress, model_config: dict[str, Any]) -> None:
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    meta = {"format": FORMAT, "step": progress.step, "samples_per_step": progress.samples_per_step}
    (partial / META).write_text(json.dumps({**meta, "model": model_config, "files": files}, indent=1) + "\n")
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)


def first_line(err: BaseException) -> str:
    """The sentence that explains a failure: of the root cause where torch.distributed.checkpoint wrapped it."""
    failures = getattr(err, "failures", None)
    if failures:
        cause = next(iter(failures.values()))
        err = cause[0] if isinstance(cause, tuple) else cause
    return f"{type(err).__name__}: {str(err).strip().splitlines()[0] if str(err).strip() else 'no message'}"


def list_steps(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints of a folder, oldest first."""
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
    raise CheckpointError(f"checkpoint.resume = {resume!r}: no complete checkpoint there")


def load(path: Path, model_config: dict[str, Any], entries: Entries, ranks: Ranks) -> Progress:
    """Fill the run's tensors in place; a collective. Strict: every name and shape must be the run's own.

    Raises:
        CheckpointError: on every rank; missing, truncated, of another format or another model, naming what differs.
    """
    progress: Progress = ranks.together(lambda: _inspect(path, model_config, entries))
    try:
        with _one_rank_is_fine():
            load_tensors(entries.tensors, storage_reader=FileSystemReader(path), no_dist=ranks.group is None)
    except (Exception, CheckpointException) as err:  # the latter is a BaseException
        raise CheckpointError(f"{path}: cannot be read ({first_line(err)}); resume from another checkpoint") from err
    return progress


def _inspect(path: Path, model_config: dict[str, Any], entries: Entries) -> Progress:
    meta = read_meta(path)
    for key in sorted(model_config.keys() | meta["model"].keys()):
        theirs, ours = meta["model"].get(key), model_config.get(key)
        if theirs != ours:
            raise CheckpointError(
                f"{path} holds another model: model.{key} is {theirs!r} there and {ours!r} in the recipe"
            )
    for name, size in meta["files"].items():
        real = (path / name).stat().st_size if (path / name).exists() else None
        if real != size:
            what = "is missing" if real is None else f"has {real} bytes instead of {size}"
            raise CheckpointError(f"{path} is truncated: {name} {what}; resume from an older checkpoint")
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    shapes = {k: tuple(m.size) for k, m in stored.items() if isinstance(m, TensorStorageMetadata)}
    _compare(path, shapes, entries.shapes)
    return Progress(step=meta["step"], samples_per_step=meta["samples_per_step"])


def read_meta(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint.

    Raises:
        CheckpointError: missing, unreadable, or of a format that this version does not know.
    """
    try:
        meta: dict[str, Any] = json.loads((path / META).read_text())
    except (OSError, ValueError) as err:
        raise CheckpointError(f"{path} is no complete checkpoint: {META}: {first_line(err)}") from err
    if meta.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {meta.get('format')!r}; this version reads {FORMAT}")
    return meta


def _compare(path: Path, stored: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> None:
    missing, unknown = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    other = sorted(k for k in wanted.keys() & stored.keys() if wanted[k] != stored[k])
    faults = []
    for what, names in (("lacks", missing), ("has too much", unknown), ("has other shapes for", other)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            faults.append(f"{what} {', '.join(names[:_SHOWN])}{more}")
    if faults:
        raise CheckpointError(f"{path} does not fit this model: it {'; it '.join(faults)}")


@torch.no_grad()
def restore(path: Path, model_config: dict[str, Any], model: nn.Module, optimizer: ShardedAdamW,
            entries: Entries, ranks: Ranks) -> Progress:  # fmt: skip
    """`load`, then carry what was loaded into the parameters and the optimizer's step count."""
    progress = load(path, model_config, entries, ranks)
    optimizer.set_step(progress.step)
    optimizer.publish()
    return progress

"""Checkpoints of a run: `checkpoints/step-00000100/`, readable by any number of ranks.

Tensors go through torch.distributed.checkpoint. Experts are stored one by one under their *global* id, so that a run
saved with ep_size = 4 resumes with 2 or 1; everything else is stored whole, whatever its sharding was. A checkpoint
is written beside and renamed after every rank is done: a folder named step-* is complete, or it was damaged later,
which `meta.json` (sizes and digests of all files) shows.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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
from recipes.checkpoint_folder import (
    aside_name,
    find,
    is_step,
    list_steps,
    newest,
    prune,
    put_aside,
    rename_aside,
    step_name,
)
from recipes.checkpoint_meta import (
    FileRecord,
    check_contents,
    check_sizes,
    first_line,
    read_meta,
    reading,
    record,
    write_meta,
)
from recipes.entries import Entries
from recipes.identity import Identity
from recipes.optim import ShardedAdamW
from recipes.ranks import Ranks

__all__ = ["Progress", "aside_name", "find", "is_step", "list_steps", "load", "newest", "put_aside", "restore", "save"]

_SHOWN = 3  # differing names that a message lists


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands: optimizer steps done, and the samples of one step (data are keyed by both)."""

    step: int
    samples_per_step: int


def save(folder: Path, progress: Progress, identity: Identity, entries: Entries, ranks: Ranks, keep: int) -> Path:
    """Write `folder`/step-N and remove all but the newest `keep` up to it; a collective.

    Raises:
        CheckpointError: on every rank, where any rank could not write. The checkpoints before it are intact.
    """
    final = folder / step_name(progress.step)
    partial = folder / f".partial-{final.name}"
    facts = {**asdict(progress), **asdict(identity)}
    try:
        ranks.together(lambda: _prepare(folder, partial) if ranks.rank == 0 else None)
        with _one_rank_is_fine():
            save_tensors(entries.tensors, storage_writer=FileSystemWriter(partial), no_dist=ranks.group is None)
        files = ranks.gather(ranks.together(lambda: _records(partial, ranks.rank)))
        ranks.together(lambda: _seal(partial, final, facts, files) if ranks.rank == 0 else None)
    except (Exception, CheckpointException) as err:  # the latter is a BaseException
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        error = CheckpointError(
            f"saving {final} failed ({first_line(err)}); free space or choose another run.dir. "
            f"The newest complete checkpoint is {newest(folder) or 'none'}"
        )
        raise error from err
    if ranks.rank == 0:
        prune(folder, progress.step, keep)
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


def _records(partial: Path, rank: int) -> dict[str, FileRecord]:
    """Of the files that this rank wrote, which nobody else needs to read again."""
    return {path.name: record(path) for path in partial.glob(f"__{rank}_*")}


def _seal(partial: Path, final: Path, facts: dict[str, Any], files: list[dict[str, FileRecord]]) -> None:
    known = {name: entry for of_rank in files for name, entry in of_rank.items()}
    missing = sorted(name for name in known if not (partial / name).exists())
    if missing:
        raise CheckpointError(
            f"rank 0 does not see {', '.join(missing[:_SHOWN])}, which other ranks wrote: run.dir must lie on a file "
            "system that all nodes share"
        )
    written = {path.name: known.get(path.name) or record(path) for path in partial.iterdir()}
    write_meta(partial, facts, written)
    if final.exists():  # of another line of training: it is not this run's to delete
        rename_aside(final)
    partial.rename(final)


def load(path: Path, identity: Identity, entries: Entries, ranks: Ranks) -> Progress:
    """Fill the run's tensors in place; a collective. Strict: every name and shape must be the run's own.

    Raises:
        CheckpointError: on every rank; missing, truncated, damaged, of another format, model or order of data, naming
            what differs.
    """
    progress: Progress = ranks.together(lambda: _inspect(path, identity, ranks))
    ranks.together(lambda: _compare(path, _stored_shapes(path), entries.shapes))
    with reading(path), _one_rank_is_fine():
        load_tensors(entries.tensors, storage_reader=FileSystemReader(path), no_dist=ranks.group is None)
    return progress


def _inspect(path: Path, identity: Identity, ranks: Ranks) -> Progress:
    """Whether it is this run's and undamaged, before anything in it is used; the ranks share the reading."""
    with reading(path):
        meta = read_meta(path)
        if found := identity.differences(meta["model"], meta["data"], meta["step"]):
            way_out = "keep the old value, or start afresh with checkpoint.resume=never"
            raise CheckpointError(f"{path} is of another run: {'; '.join(found)}; {way_out}")
        check_sizes(path, meta["files"])
        check_contents(path, meta["files"], sorted(meta["files"])[ranks.rank :: ranks.world_size])
        return Progress(step=meta["step"], samples_per_step=meta["samples_per_step"])


def _stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with reading(path):
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
        return {k: tuple(m.size) for k, m in stored.items() if isinstance(m, TensorStorageMetadata)}


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
def restore(path: Path, identity: Identity, model: nn.Module, optimizer: ShardedAdamW,
            entries: Entries, ranks: Ranks) -> Progress:  # fmt: skip
    """`load`, then carry what was loaded into the parameters and the optimizer's step count."""
    progress = load(path, identity, entries, ranks)
    optimizer.set_step(progress.step)
    optimizer.publish()
    return progress

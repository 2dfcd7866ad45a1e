"""Files that a checkpoint and an export leave behind: whole as rank 0 sees them, and readable by others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from moe_ep.errors import CheckpointError
from recipes import checkpoint, hf
from recipes.checkpoint_folder import find
from recipes.checkpoint_meta import FileRecord
from recipes.files import RunFolderError
from recipes.lock import FolderLock


def test_files_that_rank_0_does_not_see_make_no_checkpoint(tmp_path: Path) -> None:
    """Two nodes without a shared file system each hold their own half: neither is a checkpoint."""
    partial, final = tmp_path / ".partial-step-00000002", tmp_path / "step-00000002"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"half")
    written = [{"__0_0.distcp": FileRecord(4, "x")}, {"__1_0.distcp": FileRecord(4, "y")}]
    with pytest.raises(
        CheckpointError, match=r"rank 0 does not see __1_0.distcp, .* a file system that all nodes share"
    ):
        checkpoint._seal(partial, final, {}, written)
    assert not final.exists()


def test_exported_weights_are_as_readable_as_other_files(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        hf._write(tmp_path / "model.safetensors", lambda path: hf.save_file({"a": torch.ones(2)}, path))
    finally:
        os.umask(old)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_a_path_without_a_checkpoint_is_refused_with_what_may_be_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"nowhere': no complete checkpoint there; name a run's folder .* 'never'"
    ):
        find(str(tmp_path / "nowhere"), tmp_path)


def test_a_run_folder_that_cannot_be_made_is_refused_without_a_word_of_checkpoints(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(
        RunFolderError, match=r"file/run cannot be made or written \(Not a directory\); choose "
    ) as caught:
        FolderLock().hold(file / "run")
    assert "checkpoint" not in str(caught.value)

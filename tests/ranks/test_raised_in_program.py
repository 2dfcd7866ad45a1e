"""The program when one rank's experts raise: 1 there, 3 elsewhere, well before the timeout, and everybody says why."""

from __future__ import annotations

import functools
import itertools
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from moe_ep.experts import GroupedExperts
from tests.ranks.broken_steps import TEXT, BreakBackward
from tests.ranks.launch import start
from tests.ranks.small_recipe import write

VICTIM = 1
TIMEOUT_S = 60
BOUND_S = (
    20.0  # 5 s until the others, who stand in a collective of FSDP2, are given up, 2 s to tell them, a busy machine
)


def break_experts(rank: int, *, first: bool, backward: bool, folder: str) -> None:
    """In step 3 the first layer's first micro-batch, or the last one's last: two layers, two micro-batches."""
    real, calls = GroupedExperts.forward, itertools.count()

    def forward(self: GroupedExperts, *args: Any, **options: Any) -> Tensor:
        y = real(self, *args, **options)
        if next(calls) != 2 * 2 * 2 + (0 if first else 3):
            return y
        Path(folder, "broke").write_text(str(time.time()))
        if backward:
            return BreakBackward.apply(y)
        raise ZeroDivisionError(TEXT)

    if rank == VICTIM:
        mock.patch.object(GroupedExperts, "forward", forward).start()


def check(tmp_path: Path, world: int, first: bool, backward: bool, *overrides: str) -> None:
    settings = ["parallel.ep_size=2", f"train.timeout_s={TIMEOUT_S}", "checkpoint.every=0", *overrides]
    prepare = functools.partial(break_experts, first=first, backward=backward, folder=str(tmp_path))
    job = start(world, [str(write(tmp_path)), *settings], tmp_path, prepare=prepare)
    codes = job.wait(TIMEOUT_S + 40)
    took = time.time() - float((tmp_path / "broke").read_text())
    assert codes == [1 if rank == VICTIM else 3 for rank in range(world)], job.text()
    assert took < BOUND_S, f"{took} s"
    for rank in range(world):
        said = job.text(rank)
        assert f"ZeroDivisionError: {TEXT}" in said, said
        if rank != VICTIM:
            assert "another rank failed or was lost, so this one stops: rank 1 failed" in said, said
    assert "Traceback" in job.text(VICTIM)


def test_the_program_ends_everywhere_with_the_text_of_the_error(tmp_path: Path) -> None:
    check(tmp_path, 2, False, False)


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("interleaved", [1, 2])
@pytest.mark.parametrize("world", [2, 4])
def test_the_program_ends_everywhere_in_time(
    tmp_path: Path, world: int, interleaved: int, backward: bool, first: bool
) -> None:
    check(tmp_path, world, first, backward, f"train.intra_layer_micro_batch={interleaved}", "moe.dispatcher=agrs")

"""Where an exception on one rank ends more than the step: the group, or the program."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep import MoEConfig, MoELayer, PeerError
from moe_ep.settlement import Settlement
from moe_ep.testing.ranks import run_ranks
from tests.ranks.broken_steps import BOUND_S, TEXT, break_at
from tests.ranks.small_stack import MOE, H


def body_elsewhere(group: dist.ProcessGroup, rank: int) -> float:
    """Rank 1 waits for rank 0 in a collective of its own, and so cannot stop."""
    other = dist.new_group([0, 1])
    layer = MoELayer(MoEConfig(**MOE), group)
    x = torch.randn(4, H)
    layer(x)
    real, started = Settlement.run, time.monotonic()
    with mock.patch.object(Settlement, "run", lambda self: real(self, 0.5)):
        if rank == 0:
            break_at(layer.experts, 0, False)
            with pytest.raises(ZeroDivisionError) as caught:
                layer(x)
            assert "serves no more" in caught.value.__notes__[0]
            seconds = time.monotonic() - started
        else:
            layer.launch_dispatch(x)
        dist.all_reduce(torch.zeros(1), group=other)
    for _ in range(2):
        with pytest.raises(PeerError, match=r"rank 0 failed in layer 0, micro-batch 0 .* serves no more"):
            layer(x)
    return seconds if rank == 0 else 0.0


def test_a_rank_that_stands_in_a_foreign_collective_ends_the_group_for_all() -> None:
    assert 0.5 < run_ranks(body_elsewhere, 2)[0] < BOUND_S


SCRIPT = """
import sys
import torch.distributed as dist
from tests.ranks.small_stack import small_stack
from tests.ranks.broken_steps import break_at, step
dist.init_process_group("gloo")
group, rank = dist.group.WORLD, dist.get_rank()
model = small_stack(group, dense=(False,) * 3)
step(model, rank, 2, group)
if rank == 1:
    break_at(model.layers[1].moe.experts, 0, sys.argv[1] == "backward")
print("goes on", flush=True)
step(model, rank, 2, group)
"""


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_program_that_catches_nothing_ends_on_all_ranks(direction: str) -> None:
    """No handle of a collective holds the interpreter up at its end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    root = str(Path(__file__).resolve().parents[2])
    common = {**os.environ, **places, "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, direction],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline() == "goes on\n", rank.communicate()[1]
    started = time.monotonic()
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert time.monotonic() - started < 2 * BOUND_S
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "PeerError: rank 1 failed in " in said[0] and f"ZeroDivisionError: {TEXT}" in said[0]
    assert said[1].rstrip().endswith(f"ZeroDivisionError: {TEXT}")

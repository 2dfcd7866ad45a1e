"""The heartbeat of a rank that is through: it must not outlive the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import os
from unittest import mock
from torch.distributed import TCPStore
from recipes import lost_peer

store = TCPStore("127.0.0.1", 0, is_master=True)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
lost_peer.Heartbeat.LOOK_S = 0.0  # it is always inside the store, as it sometimes is otherwise
beats = [lost_peer.watch_peers(mock.Mock(rank=rank, world_size=1), 60.0, 3) for rank in range(4)]
while not store.check([f"heartbeat/{rank}" for rank in range(4)]):
    pass
"""


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)", "beats[0].stop()", "del store"])
def test_a_rank_that_is_through_ends_without_an_abort(ending: str) -> None:
    done = subprocess.run([sys.executable, "-c", RANK + ending], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

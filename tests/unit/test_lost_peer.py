"""The heartbeat of a rank that is through: it must not outlive the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

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


def test_a_rank_that_is_through_ends_without_an_abort() -> None:
    endings = ["", "raise SystemExit(0)", "beats[0].stop()", "del store"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([sys.executable, "-c", RANK + ending], cwd=ROOT, **pipes) for ending in endings]
    said = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * len(endings), said

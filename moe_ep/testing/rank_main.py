"""The life of one rank of a `RankPool`: join the group, answer calls, leave together. Runs in the rank's process."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Settings:
    """What a rank is told when it starts; times in seconds, `folder` holds the store and the stack files."""

    world_size: int
    backend: str
    device: str
    folder: str
    group_timeout_s: float


def serve(rank: int, settings: Settings, pipe: Connection) -> None:
    """Answer calls until the parent says stop or dies; SIGUSR1 and crashes write every thread's stack to a file."""
    with open(Path(settings.folder, f"stack{rank}"), "w") as stack:
        faulthandler.enable(file=stack, all_threads=True)  # what a crash has to say, too
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        try:
            _join_group(rank, settings)
            _answer(rank, settings, pipe)
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
            # stay until killed: a rank that goes closes its sockets, and its peers' own state could not be seen
            time.sleep(settings.group_timeout_s)


def _join_group(rank: int, settings: Settings) -> None:
    torch.set_num_threads(1)  # ranks share the cores
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the machine's own name need not resolve
    if settings.device == "cuda":
        _take_gpu(rank, settings.world_size)
    dist.init_process_group(
        settings.backend,
        init_method=f"file://{settings.folder}/store",
        rank=rank,
        world_size=settings.world_size,
        timeout=timedelta(seconds=settings.group_timeout_s),
    )


def _take_gpu(rank: int, world_size: int) -> None:
    count = torch.cuda.device_count()
    torch.cuda.set_device(rank % max(count, 1))
    if world_size > count:  # both libraries refuse ranks on one GPU unless told that they are meant to be
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"


def _answer(rank: int, settings: Settings, pipe: Connection) -> None:
    groups: dict[int, Any] = {settings.world_size: dist.group.WORLD}
    timeout = timedelta(seconds=settings.group_timeout_s)
    parent: Any = parent_process()
    while pipe in connection.wait([pipe, parent.sentinel]):  # a dead parent ends the rank
        payload = pipe.recv_bytes()
        if not payload:
            dist.barrier()  # ranks that leave at different times can abort each other at exit
            dist.destroy_process_group()
            return
        fn, args, count = pickle.loads(payload)
        if count not in groups:
            groups[count] = dist.new_group(list(range(count)), timeout=timeout)  # a call of all ranks of the world
        value = fn(groups[count], rank, *args) if rank < count else None
        pipe.send_bytes(pickle.dumps((True, value)))

"""Ranks for tests: a pool of processes with one process group, started once and fed with functions.

    with RankPool(4) as pool:
        pool.run(body, 8)                    # body(group, rank, 8) on four ranks; a list of four results
        pool.run(body, 8, num_ranks=2)       # on ranks 0 and 1 only, in a group of their own

`body` is a module-level function, so that a rank can find it by name. What the pool guarantees:

- no ports: ranks meet in a file store in a folder of the pool's own;
- a rank's exception comes back with its rank and traceback (`RankError`), the others get `GRACE_S` to end too;
- when time is up every rank's stack is printed into the error and the pool is killed: nothing hangs;
- after any failure the ranks are started afresh, so that one broken test cannot spoil the next.

Start methods, measured with 4 gloo ranks on 2 cores: fork 0.05 s, forkserver 1.4 s once and 0.06 s after, spawn 4-5 s.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from .rank_main import Settings, serve

GRACE_S = 3.0
_STACK_WAIT_S = 1.0
# a collective that waits longer than its caller fails by itself; the pool's own timeout comes first and says more
_GROUP_MARGIN_S = 60.0


class RankError(RuntimeError):
    """One or more ranks raised, died or did not answer in time.

    Attributes:
        failures: rank -> traceback, exit code or stack. The message holds them all.
    """

    def __init__(self, title: str, failures: dict[int, str]) -> None:
        self.failures = failures
        parts = [f"---- rank {rank} ----\n{text.rstrip()}" for rank, text in sorted(failures.items())]
        super().__init__("\n".join([title, *parts]))


class RankPool:
    """`world_size` processes in one process group, started at the first `run`.

    Args:
        world_size: number of ranks.
        backend: backend string of `init_process_group`, such as "gloo", "nccl" or "cpu:gloo,cuda:nccl".
        device: "cpu", or "cuda": rank r then uses cuda:r as its current device. Where there are fewer GPUs than ranks,
            they share them in turn: results are what they would be, times are not, and NCCL must be 2.30 or newer.
        timeout_s: default time for one `run`, seconds.
        start_method: "fork", "forkserver" or "spawn"; None: fork where that is safe, else forkserver.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "gloo",
        device: str = "cpu",
        timeout_s: float = 60.0,
        start_method: str | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.backend = backend
        self.device = device
        self.timeout_s = timeout_s
        self._start_method = start_method
        self._ranks: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = ""

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        num_ranks: int | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call fn(group, rank, *args) on the first `num_ranks` ranks (default: all); results by rank.

        Raises:
            RankError: a rank raised, died, or was not done after `timeout_s` (default: the pool's).
        """
        count = self.world_size if num_ranks is None else num_ranks
        if not 1 <= count <= self.world_size:
            raise ValueError(f"num_ranks must be in [1, {self.world_size}] for this pool, got {count}")
        if not self._ranks:
            self._start()
        payload = pickle.dumps((fn, args, count))
        self._send(payload)
        return self._collect(self.timeout_s if timeout_s is None else timeout_s)[:count]

    def close(self) -> None:
        """End the ranks: barrier, destroy the group, join; whoever is not gone after `GRACE_S` is killed."""
        self._send(b"")
        self._reap(GRACE_S)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        context: Any = get_context(self._start_method or pick_start_method(self.device))
        if context.get_start_method() == "forkserver":
            # the last is what the first backward of a process imports, more than a second otherwise of every rank
            preload = ["torch.distributed", "moe_ep.testing.rank_main", "torch.fx.experimental.symbolic_shapes"]
            context.set_forkserver_preload(preload)
        self._folder = tempfile.mkdtemp(prefix="moe_ep_ranks_")
        longest = self.timeout_s + _GROUP_MARGIN_S
        settings = Settings(self.world_size, self.backend, self.device, self._folder, longest)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, settings, theirs), daemon=True, name=f"rank{rank}")
            process.start()
            theirs.close()
            self._ranks.append(process)
            self._pipes.append(ours)

    def _send(self, payload: bytes) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a dead rank is seen, with its exit code, when its answer is due
                pipe.send_bytes(payload)

    def _collect(self, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in [p for p in self._pipes if p in ready]:
                rank = waiting.pop(pipe)
                ok, value = self._receive(pipe, rank)
                (results if ok else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if waiting:
            late = sorted(waiting.values())
            title = f"ranks {late} were not done after {timeout_s:g} s" if not failures else _title(failures)
            self._fail(title, failures | self._stacks(late))
        if failures:
            self._fail(_title(failures), failures)
        return [results[rank] for rank in range(self.world_size)]

    def _receive(self, pipe: Connection, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._ranks[rank].join(_STACK_WAIT_S)
            return False, f"died with exit code {self._ranks[rank].exitcode}\n{self._stack(rank)}"

    def _stacks(self, late: Sequence[int]) -> dict[int, str]:
        for rank in late:
            if self._ranks[rank].is_alive():
                os.kill(self._ranks[rank].pid, signal.SIGUSR1)
        time.sleep(_STACK_WAIT_S)
        return {rank: f"still running, its stack:\n{self._stack(rank) or '(none written)'}" for rank in late}

    def _stack(self, rank: int) -> str:
        file = Path(self._folder, f"stack{rank}")
        return file.read_text() if file.exists() else ""

    def _fail(self, title: str, failures: dict[int, str]) -> None:
        self._reap(0.0)
        raise RankError(title, failures)

    def _reap(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        for process in self._ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._ranks, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, **pool_options: Any) -> list[Any]:
    """One call of fn(group, rank, *args) on ranks started for it; results by rank. Options are RankPool's."""
    with RankPool(world_size, **pool_options) as pool:
        return pool.run(fn, *args)


def pick_start_method(device: str = "cpu") -> str:
    """The quickest safe way to start ranks from this process.

    A forked child inherits neither threads nor a usable CUDA context, and torch refuses backward in a child whose
    parent has started autograd's device threads, so fork is for CPU ranks of a process without GPUs and threads.
    """
    alone = threading.active_count() == 1
    return "fork" if device == "cpu" and alone and torch.cuda.device_count() == 0 else "forkserver"


def _title(failures: dict[int, str]) -> str:
    return f"rank {min(failures)} failed" if len(failures) == 1 else f"ranks {sorted(failures)} failed"

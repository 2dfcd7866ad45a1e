"""Runs recipes/pretrain.py on several ranks without torchrun: same variables, exit code and output of each rank.

Ranks come from a fork server that has torch loaded, which saves some seconds a run; torchrun itself has its own tests.
The text that a run ends with is a few tokens long: sampling takes as long as the training of such a model.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# What the first backward, optimizer, FSDP2, checkpoint and picture of a process import: seconds of each rank otherwise.
IMPORTED_LATE = [
    "matplotlib.pyplot",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.fx.experimental.symbolic_shapes",
]
Prepare = Callable[[int], None]
SAMPLE_TOKENS = 8
PROGRAM = Path(__file__).resolve().parents[2] / "recipes" / "pretrain.py"


def serve(
    rank: int,
    world: int,
    port: int,
    arguments: list[str],
    folder: str,
    output: str,
    prepare: Prepare | None,
    program: str,
    nodes: int,
) -> None:
    """Become one rank."""
    out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    each = world // nodes
    names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": each, "MASTER_PORT": port}
    names |= {"LOCAL_RANK": rank % each, "GROUP_RANK": rank // each}
    if world > 1:
        os.environ.update({**{name: str(value) for name, value in names.items()}, "MASTER_ADDR": "127.0.0.1"})
    import torch

    torch.set_num_threads(1)
    from recipes import session

    session.SAMPLE_TOKENS = SAMPLE_TOKENS
    if prepare is not None:
        prepare(rank)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


@dataclass
class Job:
    """Ranks in flight."""

    processes: list[multiprocessing.process.BaseProcess]
    outputs: list[Path] = field(default_factory=list)

    def wait(self, timeout_s: float = 100) -> list[int | None]:
        """Exit code of each rank; a rank that outlives the time is killed and the test fails."""
        end = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.1, end - time.monotonic()))
        alive = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for rank in alive:
            self.processes[rank].kill()
        assert not alive, f"ranks {alive} still ran after {timeout_s} s:\n{self.text()}"
        return [process.exitcode for process in self.processes]

    def text(self, rank: int | None = None) -> str:
        """What one rank, or all ranks, printed."""
        chosen = self.outputs if rank is None else [self.outputs[rank]]
        return "\n".join(path.read_text(errors="replace") for path in chosen if path.exists())

    def wait_for(self, text: str, timeout_s: float = 60) -> None:
        """Until rank 0 has printed `text`."""
        end = time.monotonic() + timeout_s
        while text not in self.text(0):
            assert time.monotonic() < end, f"no {text!r} after {timeout_s} s:\n{self.text()}"
            assert self.processes[0].is_alive(), f"rank 0 ended before {text!r}:\n{self.text()}"
            time.sleep(0.02)


def start(
    world: int,
    arguments: list[str],
    folder: Path,
    last_rank_only: tuple[str, ...] = (),
    prepare: Prepare | None = None,
    program: Path = PROGRAM,
    nodes: int = 1,
) -> Job:
    """Start the program on `world` ranks in `folder`; the last rank may get further arguments.

    `prepare(rank)` runs in each rank before the program, to plant a fault; a function of a module. With several nodes
    each rank has the variables of its node, as torchrun gives them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["moe_ep.testing.rank_main", "recipes.program", *IMPORTED_LATE])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outputs = Path(tempfile.mkdtemp(prefix="out-", dir=folder))
    job = Job([], [outputs / f"rank{rank}.txt" for rank in range(world)])
    for rank in range(world):
        extra = list(last_rank_only) if rank == world - 1 else []
        call = (rank, world, port, arguments + extra, str(folder), str(job.outputs[rank]), prepare, str(program), nodes)
        process = context.Process(target=serve, args=call)
        process.start()
        job.processes.append(process)
    return job


def run(world: int, arguments: list[str], folder: Path, timeout_s: float = 100, nodes: int = 1) -> Job:
    """Start and wait; all ranks must end with 0."""
    job = start(world, arguments, folder, nodes=nodes)
    codes = job.wait(timeout_s)
    assert codes == [0] * world, f"exit codes {codes}:\n{job.text()}"
    return job

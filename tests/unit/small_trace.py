"""Writes small profiler traces: host threads, CUDA calls with what they launched, ranges, links, gloo's work."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

PID, MAIN, ENGINE, GLOO = 100, 100, 101, 102
COMPUTE, COMM = 7, 30


class SmallTrace:
    """Events of one rank; times in microseconds."""

    def __init__(self, rank: int | None = 0, world_size: int = 1) -> None:
        self.events: list[dict[str, Any]] = []
        self.content: dict[str, Any] = {"schemaVersion": 1, "baseTimeNanoseconds": 0, "traceEvents": self.events}
        if rank is not None:
            self.content["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world_size}
        self.correlation = 0

    def add(
        self, name: str, category: str, start: float, us: float, tid: int = MAIN, pid: int = PID, **args: Any
    ) -> None:
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": us, "args": args}
        self.events.append(event)

    def range(self, name: str, start: float, us: float, tid: int = MAIN) -> None:
        """A record_function range."""
        self.add(name, "user_annotation", start, us, tid)

    def call(self, name: str, start: float, us: float = 1.0, tid: int = MAIN) -> None:
        """A CUDA call that launches nothing."""
        self.correlation += 1
        self.add(name, "cuda_runtime", start, us, tid, correlation=self.correlation)

    def kernel(
        self, called: float, start: float, us: float, stream: int = COMPUTE, name: str = "gemm", tid: int = MAIN
    ) -> None:
        """A kernel and the call that launched it."""
        self.call("cudaLaunchKernel", called, 1.0, tid)
        self.add(name, "kernel", start, us, stream, 0, correlation=self.correlation, stream=stream)

    def copy(self, called: float, start: float, us: float, kind: str, stream: int = COMPUTE) -> None:
        """An asynchronous copy and its call."""
        self.call("cudaMemcpyAsync", called)
        self.add(f"Memcpy {kind}", "gpu_memcpy", start, us, stream, 0, correlation=self.correlation, stream=stream)

    def backward(self, name: str, start: float, us: float, forward: float | None, tid: int = ENGINE) -> None:
        """A node that the engine runs, linked with the operation of forward that began at `forward`."""
        self.add(f"autograd::engine::evaluate_function: {name}", "cpu_op", start, us, tid)
        self.add(name, "cpu_op", start + us / 100, us / 2, tid)
        if forward is not None:
            self.correlation += 1
            flow = {"cat": "fwdbwd", "name": "fwdbwd", "id": self.correlation, "pid": PID}
            self.events.append(flow | {"ph": "s", "tid": MAIN, "ts": forward})
            self.events.append(flow | {"ph": "f", "tid": tid, "ts": start + us / 100})

    def write(self, path: Path) -> Path:
        text = json.dumps(self.content).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path

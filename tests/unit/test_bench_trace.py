"""Figures of one traced iteration, from a trace made by hand."""

from __future__ import annotations

from pathlib import Path

from moe_ep.testing.chrome_trace import read_trace
from tests.unit.small_trace import COMM, SmallTrace
from tools.bench_trace import figures

GEMM = "void cutlass::device_kernel<GemmUniversal<cutlass::gemm::GroupProblemShape<...>>>"


def small_trace() -> SmallTrace:
    trace = SmallTrace()
    trace.kernel(0, 0, 9, COMM, "a barrier in front of the region")
    trace.range("stopwatch begin", 10, 0)
    trace.kernel(11, 20, 30, name=GEMM)  # 20..50
    trace.kernel(12, 25, 45, COMM, "ncclDevKernel_SendRecv")  # 25..70: 50..60 is exposed
    trace.kernel(13, 60, 50, name="silu")  # 60..110
    trace.call("cudaEventSynchronize", 14)
    trace.kernel(15, 110, 10, name=GEMM)
    trace.kernel(16, 115, 15, COMM, "ncclDevKernel_SendRecv")  # 115..130: 120..130 is exposed
    trace.range("stopwatch mark", 30, 0)
    trace.call("cudaDeviceSynchronize", 31)
    trace.kernel(32, 200, 100, COMM, "what comes behind the region")
    for event in trace.events:
        if event["cat"] == "kernel":
            event["args"]["grid"] = [4, 4, 1] if "nccl" in event["name"] else [132, 1, 1]
    return trace


def test_what_is_exposed_is_what_no_kernel_of_the_computation_covers(tmp_path: Path) -> None:
    found = figures(read_trace(small_trace().write(tmp_path / "rank0.json")))
    assert (found.comm_us, found.exposed_us, found.gemm_us) == (60, 20, 40)
    assert (found.comm_blocks, found.host_syncs) == (16, 1)


def test_without_communication_or_gemms_nothing_is_claimed(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.range("stopwatch begin", 0, 0)
    trace.kernel(1, 5, 10, name="silu")
    trace.range("stopwatch mark", 20, 0)
    found = figures(read_trace(trace.write(tmp_path / "rank0.json")))
    assert (found.comm_us, found.exposed_us) == (0, 0)
    assert found.gemm_us is None and found.comm_blocks is None and found.host_syncs == 0

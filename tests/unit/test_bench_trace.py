"""Figures of one traced iteration, from a trace made by hand."""

from __future__ import annotations

from pathlib import Path

from moe_ep.testing.chrome_trace import read_trace
from tests.unit.small_trace import COMM, SmallTrace
from tools.bench_trace import Traced, figures

GEMM = "void cutlass::device_kernel<GemmUniversal<cutlass::gemm::GroupProblemShape<...>>>"
SEND = "ncclDevKernel_SendRecv"


def small_trace(step: bool = True) -> SmallTrace:
    trace = SmallTrace()
    trace.kernel(0, 0, 9, COMM, "a barrier in front of the region")
    trace.range("stopwatch begin", 10, 0)
    if step:
        trace.range("moe_ep: step 5", 10.5, 30)
    trace.kernel(11, 20, 30, name=GEMM)  # 20..50
    trace.range("moe_ep: launch exchange of counts of layer 0, micro-batch 0", 12, 1)
    trace.kernel(12, 15, 4, COMM + 1, SEND)
    trace.range("moe_ep: launch dispatch of layer 0, micro-batch 0", 13, 1)
    trace.kernel(13, 25, 45, COMM, SEND)  # 25..70: 50..60 is exposed
    trace.kernel(14, 60, 50, name="silu")  # 60..110
    trace.call("cudaEventSynchronize", 15)
    trace.kernel(16, 110, 10, name=GEMM)  # 110..120
    trace.range("moe_ep: launch combine of layer 0, micro-batch 0", 17, 1)
    trace.kernel(17, 115, 15, COMM, SEND)  # 115..130: 120..130 is exposed
    trace.range("stopwatch mark", 42, 0)
    trace.call("cudaDeviceSynchronize", 43)
    trace.kernel(44, 200, 100, COMM, "what comes behind the region")
    for event in trace.events:
        if event["cat"] == "kernel":
            event["args"]["grid"] = [4, 4, 1] if event["name"] == SEND else [132, 1, 1]
    return trace


def test_what_is_exposed_is_what_no_kernel_of_the_computation_covers(tmp_path: Path) -> None:
    """Counts travel ahead of the rows and are not among them; what lies outside the region counts nowhere."""
    found = figures(read_trace(small_trace().write(tmp_path / "rank0.json")))
    assert found == Traced(comm_us=60, exposed_us=20, gemm_us=40, comm_blocks=16, host_syncs=1)


def test_without_a_step_there_is_no_share_of_it(tmp_path: Path) -> None:
    found = figures(read_trace(small_trace(step=False).write(tmp_path / "rank0.json")))
    assert found == Traced(gemm_us=40, comm_blocks=16, host_syncs=1)


def test_where_nothing_of_the_kind_ran_nothing_is_claimed(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.range("stopwatch begin", 0, 0)
    trace.range("moe_ep: step 0", 0, 20)
    trace.kernel(1, 5, 10, name="silu")
    trace.range("stopwatch mark", 20, 0)
    assert figures(read_trace(trace.write(tmp_path / "rank0.json"))) == Traced(host_syncs=0)

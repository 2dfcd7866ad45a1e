"""Small traces of steps with communication, and what is measured of them."""

from __future__ import annotations

from pathlib import Path

from moe_ep.testing.chrome_trace import Trace, read_trace
from tests.unit.small_trace import COMM, ENGINE, GLOO, MAIN, SmallTrace
from tools.overlap import Run, measure
from tools.rank_steps import Figures, Key
from tools.trace_labels import Label

Span = tuple[float, float]  # begin, length


def launch(small: SmallTrace, what: str, at: float, *kernels: Span, tid: int = MAIN, ranks: str = "") -> None:
    """A launch range of 10 us that begins at `at`, with its kernels on the comm stream."""
    small.range(f"moe_ep: launch {what}", at, 10, tid)
    for number, (start, us) in enumerate(kernels):
        small.kernel(at + 2 + number, start, us, COMM, "ncclDevKernel_SendRecv", tid)
        if ranks:
            small.events[-1]["args"]["Process Group Ranks"] = ranks


def stage(small: SmallTrace, what: str, at: float, *kernels: Span) -> None:
    """A stage's range of 10 us with its kernels on the compute stream."""
    small.range(f"moe_ep: {what}", at, 10)
    for number, (start, us) in enumerate(kernels):
        small.kernel(at + 2 + number, start, us)


def place(what: str, micro_batch: int = 0, layer: int = 0) -> str:
    return f"{what} of layer {layer}, micro-batch {micro_batch}"


def forward(rank: int = 0, world_size: int = 1, longer: float = 0.0) -> SmallTrace:
    """Two micro-batches: dispatch 0 half hidden, combine 0 wholly, dispatch 1 not at all. Communication 170 us.

    compute    100--------200        300====320----400                stream 8 computes inside of the first kernel
    comm            150--------250   300----350            500--520
    """
    small = SmallTrace(rank, world_size)
    small.range("moe_ep: step 4", 0, 600)
    stage(small, place("attention"), 10, (100, 100))
    launch(small, place("dispatch"), 20, (150, 100 + longer))
    stage(small, place("experts"), 40, (300, 100))
    small.kernel(55, 310, 10, stream=8)
    launch(small, place("combine"), 60, (300, 20), (320, 30))
    launch(small, place("dispatch", 1), 80, (500, 20))
    return small


def measured(folder: Path, *smalls: SmallTrace, steps: tuple[int, int] | None = None) -> Run:
    return measure([saved(folder, small, number) for number, small in enumerate(smalls)], steps)


def saved(folder: Path, small: SmallTrace, number: int = 0) -> Trace:
    return read_trace(small.write(folder / f"t{number}.json"))


def figures(run: Run, what: str, micro_batch: int = 0, direction: str = "fwd", rank: int = 0) -> Figures:
    (step,) = run.ranks[rank]
    return step.transfers[Key(Label(what, 0, micro_batch, direction), 0)]


def backward() -> SmallTrace:
    """Experts of layer 0 run again in the engine (recompute), then backward; the combine's transpose is half hidden."""
    small = SmallTrace()
    small.range("moe_ep: experts of layer 0, micro-batch 0", 10, 10)
    small.add("_GroupedSwiGLU", "cpu_op", 12, 5)
    small.kernel(13, 14, 10)
    launch(small, "backward of combine of layer 0, micro-batch 0", 100, (120, 100), tid=ENGINE)
    small.backward("AccumulateGrad", 120, 5, forward=None)
    small.kernel(122, 165, 3, tid=ENGINE)
    small.backward("_GroupedSwiGLUBackward", 130, 20, forward=12)
    small.kernel(140, 170, 50, tid=ENGINE)
    small.backward("CheckpointBackward", 200, 40, forward=None)
    small.range("moe_ep: experts of layer 0, micro-batch 0", 210, 10, ENGINE)
    small.kernel(215, 230, 7, tid=ENGINE)
    small.backward("AccumulateGrad", 250, 10, forward=None)
    small.kernel(255, 260, 3, tid=ENGINE)
    return small


def two_steps(first: int, *, gap: float = 0.0, micro_batches: int = 1, comm: float = 40.0) -> SmallTrace:
    """Steps of 100 us plus `gap`, each with a communication of 40 us, 10 of it exposed; validation in between."""
    small = SmallTrace()
    for number in range(2):
        zero = 1000.0 * number
        small.range(f"moe_ep: step {first + number}", zero, 100 + gap)
        small.kernel(zero + 1, zero + 10, 30)
        for each in range(micro_batches):
            launch(small, place("dispatch", each), zero + 20 + 20 * each, (zero + 10, comm) if each == 0 else (zero, 0))
    launch(small, place("dispatch"), 500, (510, 80))
    return small


def on_cpu(rank: int = 0) -> SmallTrace:
    """Operations 0-18, 30-50 and 70-80 on the host, which waits 50-70; gloo works 20-60, called at 12."""
    small = SmallTrace(rank, 2)
    small.add("aten::mm", "cpu_op", 0, 10)
    small.range(f"moe_ep: launch {place('dispatch')}", 10, 8)
    small.add("c10d::alltoall_base_", "cpu_op", 12, 4)
    small.add("gloo:all_to_all", "user_annotation", 20, 40, GLOO)
    small.range(f"moe_ep: {place('experts')}", 28, 60)
    small.add("aten::mm", "cpu_op", 30, 50)
    small.add("aten::inner", "cpu_op", 40, 5)
    small.range(f"moe_ep: wait for {place('dispatch')}", 50, 20)
    return small

"""Figures of overlap on traces written here, with shares worked out by hand."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_ep.recompute import recompute_context_fn
from moe_ep.testing.chrome_trace import Trace, TraceError, read_trace, trace_of
from tests.ranks.small_stack import small_stack
from tests.unit.small_trace import COMM, ENGINE, GLOO, MAIN, SmallTrace
from tools.intervals import total
from tools.overlap import Run, measure, share_by_step_times
from tools.rank_steps import Figures, Key
from tools.trace_labels import Label, Names

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


def test_copies_of_experts_are_communication_and_no_rows(tmp_path: Path) -> None:
    """A push by kernels of ours hides nothing, and is not counted with dispatch and combine."""
    small = forward()
    launch(small, place("weight_sync"), 30, (420, 60))
    small.range("moe_ep: launch weight_sync of replicas", 31, 4)  # of the transport, inside
    (step,) = measured(tmp_path, small).ranks[0]
    assert figures(measured(tmp_path, small), "weight_sync").exposed == [(420, 480)]
    assert total(step.comm) - total(step.of_rows("comm")) == 60
    assert total(step.exposed) - total(step.of_rows("exposed")) == 60


def test_hidden_partly_wholly_and_not_at_all(tmp_path: Path) -> None:
    run = measured(tmp_path, forward())
    assert figures(run, "dispatch").comm == [(150, 250)]
    assert figures(run, "dispatch").exposed == [(200, 250)]
    assert figures(run, "combine").comm == [(300, 350)]
    assert figures(run, "combine").exposed == []
    assert figures(run, "dispatch", 1).exposed == [(500, 520)]
    assert (run.comm_us(0), run.exposed_us(0)) == (170, 70)
    assert run.hidden_share(0) == pytest.approx(1 - 70 / 170)
    (step,) = run.ranks[0]
    assert (step.number, step.us) == (4, 600)


def test_the_step_lasts_until_the_device_is_done(tmp_path: Path) -> None:
    small = forward()
    small.kernel(90, 590, 110)
    assert measured(tmp_path, small).step_us(0) == 700


def test_what_a_rank_waits_for_another_is_told_apart(tmp_path: Path) -> None:
    run = measured(tmp_path, forward(0, 2), forward(1, 2, longer=30))
    assert (figures(run, "dispatch").peer_wait, figures(run, "dispatch", rank=1).peer_wait) == (0, 30)
    assert run.ranks[1][0].peer_wait == 30
    assert figures(measured(tmp_path, forward()), "dispatch").peer_wait is None
    # hidden time grows by nothing, exposed time by what was waited
    assert run.hidden_share(1) == pytest.approx(1 - 100 / 200)


def test_only_ranks_of_one_group_are_peers(tmp_path: Path) -> None:
    smalls = []
    for rank, us in enumerate((50, 80, 10, 40)):
        small = SmallTrace(rank, 4)
        small.kernel(0, 10, 10)
        launch(small, place("dispatch"), 20, (30, us), ranks="[0, 1]" if rank < 2 else "[2, 3]")
        smalls.append(small)
    run = measured(tmp_path, *smalls)
    assert [figures(run, "dispatch", rank=rank).peer_wait for rank in range(4)] == [0, 30, 0, 30]


def test_the_slowest_rank_is_the_one_with_the_longest_step(tmp_path: Path) -> None:
    slow = forward(1, 2)
    slow.kernel(90, 650, 50)
    assert measured(tmp_path, forward(0, 2), slow).slowest == 1


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


def test_backward_belongs_to_the_stage_of_its_forward(tmp_path: Path) -> None:
    run = measured(tmp_path, backward())
    assert figures(run, "combine", direction="bwd").exposed == [(120, 165), (168, 170)]
    (step,) = run.ranks[0]
    assert step.number is None
    labels = {work.start: work.label for work in step.compute}
    assert labels == {
        14: Label("experts", 0, 0, "fwd"),
        165: None,
        170: Label("experts", 0, 0, "bwd"),
        230: Label("experts", 0, 0, "recompute"),
        260: None,
    }


def test_the_innermost_range_and_other_communication(tmp_path: Path) -> None:
    small = forward()
    small.range("moe_ep: route of layer 0, micro-batch 1", 100, 50)
    small.range("moe_ep: dispatch_preprocess of layer 0, micro-batch 1", 110, 20)
    small.kernel(105, 530, 1)
    small.kernel(115, 540, 1)
    small.kernel(135, 550, 1)
    small.kernel(160, 200, 40, stream=22, name="ncclDevKernel_AllGather_RING_LL")  # FSDP's: hides nothing
    small.copy(162, 500, 20, "DtoD (Device -> Device)")  # no kernel: hides nothing
    run = measured(tmp_path, small)
    (step,) = run.ranks[0]
    stages = {work.start: None if work.label is None else work.label.stage for work in step.compute}
    assert [stages[start] for start in (530, 540, 550)] == ["route", "dispatch_preprocess", "route"]
    assert [(work.start, work.end) for work in step.other] == [(200, 240)]
    assert run.exposed_us(0) == 70


def test_copies_of_a_launch_are_communication(tmp_path: Path) -> None:
    small = forward()
    small.range("moe_ep: launch exchange of counts of layer 0, micro-batch 0", 200, 10)
    small.kernel(202, 210, 5, COMM, "ncclDevKernel_SendRecv")
    small.copy(204, 220, 3, "DtoH (Device -> Pinned)", COMM)
    assert total(figures(measured(tmp_path, small), "exchange of counts").comm) == 8


def test_delays(tmp_path: Path) -> None:
    """The launch call at 22 starts a kernel at 150, which had to wait for the attention's 100-140 alone.

    The host waits at 41; the next compute kernel, called at 50, runs when the communication is over at 250, and compute
    was done at 200 with what had been issued until then.
    """
    small = SmallTrace()
    stage(small, place("attention"), 10, (100, 40))
    launch(small, place("dispatch"), 20, (150, 100))
    small.kernel(32, 140, 60)  # issued behind the launch
    small.range("moe_ep: wait for dispatch of layer 0, micro-batch 0", 41, 2)
    small.range("moe_ep: wait for dispatch of layer 0, micro-batch 0", 55, 2)  # the first one counts
    stage(small, place("experts"), 48, (252, 50))
    launch(small, place("combine"), 60, (310, 5), (315, 5))
    run = measured(tmp_path, small)
    dispatch, combine = figures(run, "dispatch"), figures(run, "combine")
    assert (dispatch.start_delay, dispatch.late, dispatch.compute_wait) == (128, 10, 50)
    assert (combine.start_delay, combine.late, combine.compute_wait) == (248, 8, None)


def test_a_transfer_is_late_behind_the_one_before_it_only(tmp_path: Path) -> None:
    small = SmallTrace()
    small.kernel(0, 1, 5)
    launch(small, place("dispatch"), 20, (30, 100))
    launch(small, place("dispatch", 1), 40, (133, 10))
    assert figures(measured(tmp_path, small), "dispatch", 1).late == 3


def test_host_late_is_no_wait_of_the_stream(tmp_path: Path) -> None:
    small = SmallTrace()
    small.kernel(0, 1, 5)
    launch(small, place("dispatch"), 20, (30, 100))
    small.range("moe_ep: wait for dispatch of layer 0, micro-batch 0", 40, 2)
    small.kernel(120, 131, 5)
    assert figures(measured(tmp_path, small), "dispatch").compute_wait == 10  # from 120, when it was called, to 130


def test_exposed_because_the_host_was_late(tmp_path: Path) -> None:
    """Communication 40-140 beside computation 10-50 and 130-150, whose call came at 100: unfed are 50-100."""
    small = SmallTrace()
    small.kernel(0, 10, 40)
    launch(small, place("dispatch"), 20, (40, 100))
    small.kernel(100, 130, 20)
    run = measured(tmp_path, small)
    assert figures(run, "dispatch").exposed == [(50, 130)]
    assert figures(run, "dispatch").unfed == run.ranks[0][0].unfed == [(50, 100)]
    (step,) = measured(tmp_path, forward()).ranks[0]
    assert step.unfed == []


def test_host_syncs_stand_in_their_stage(tmp_path: Path) -> None:
    small = forward()
    small.call("cudaEventSynchronize", 25)
    small.range("moe_ep: wait for exchange of counts of layer 0, micro-batch 0", 90, 10)
    small.call("cudaEventSynchronize", 95)
    small.call("cudaStreamSynchronize", 300)
    small.call("cudaDeviceSynchronize", 700)  # behind the step
    (step,) = measured(tmp_path, small).ranks[0]
    assert step.syncs == [Label("dispatch", 0, 0, "fwd"), Label("exchange of counts", 0, 0, "fwd"), None]


def test_no_communication_has_no_share(tmp_path: Path) -> None:
    small = SmallTrace()
    launch(small, place("dispatch"), 20)
    small.kernel(35, 40, 5)
    run = measured(tmp_path, small)
    assert run.hidden_share(0) is None and run.comm_us(0) == 0
    assert share_by_step_times(run, run) is None


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


def test_steps_are_told_apart_and_can_be_chosen(tmp_path: Path) -> None:
    run = measured(tmp_path, two_steps(7))
    assert [step.number for step in run.ranks[0]] == [7, 8]
    assert (run.comm_us(0), run.exposed_us(0), run.hidden_share(0)) == (40, 10, 0.75)
    assert [step.number for step in measured(tmp_path, two_steps(7), steps=(8, 9)).ranks[0]] == [8]
    with pytest.raises(TraceError, match="has no step from 9 to 12; it has 7, 8"):
        measured(tmp_path, two_steps(7), steps=(9, 12))
    with pytest.raises(TraceError, match="it has none with a number"):
        measured(tmp_path, backward(), steps=(1, 2))


def test_the_share_by_step_times(tmp_path: Path) -> None:
    """Serial steps of 120 us against 100 us with 40 us of communication: 20 / 40 is hidden."""
    overlapped = measured(tmp_path, two_steps(7))
    serial = measured(tmp_path, two_steps(3, gap=20, comm=30))
    assert share_by_step_times(serial, overlapped) == 0.5
    assert share_by_step_times(overlapped, overlapped) == 0
    assert share_by_step_times(overlapped, serial) == pytest.approx(-20 / 30)
    with pytest.raises(TraceError, match="has 2 times dispatch 0 fwd in its first step, the other 1"):
        share_by_step_times(measured(tmp_path, two_steps(3, micro_batches=2)), overlapped)
    with pytest.raises(TraceError, match=r"has ranks \[0, 1\], the other \[0\]; give the same ranks"):
        share_by_step_times(measured(tmp_path, forward(0, 2), forward(1, 2)), overlapped)


def test_ranks_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="are both of rank 0; give one for each rank"):
        measured(tmp_path, forward(), forward())
    other = forward(1)
    other.events[0]["name"] = "moe_ep: step 5"
    with pytest.raises(TraceError, match=r"has steps \[4\], .* has \[5\]; give traces of the same steps"):
        measured(tmp_path, forward(), other)
    more = forward(1)
    launch(more, place("combine", 1), 100, (530, 10))
    text = "step 4: rank 0 has 3 communications, rank 1 4, and 1 of them on one only, such as .*'combine'"
    with pytest.raises(TraceError, match=text):
        measured(tmp_path, forward(), more)
    nameless = [forward(), forward()]
    for small in nameless:
        del small.content["distributedInfo"]
    with pytest.raises(TraceError, match="does not say its rank; name it"):
        measured(tmp_path, *nameless)
    twice = two_steps(7)
    twice.range("moe_ep: step 7", 5000, 10)
    with pytest.raises(TraceError, match="has step 7 twice"):
        measured(tmp_path, twice)


def test_traces_that_say_nothing_of_it_are_refused(tmp_path: Path) -> None:
    nothing = SmallTrace()
    nothing.kernel(0, 5, 5)
    with pytest.raises(TraceError, match=re.escape("has no range of a dispatcher's launch (moe_ep: launch ...)")):
        measured(tmp_path, nothing)
    blind = SmallTrace()
    blind.range(f"moe_ep: launch {place('dispatch')}", 0, 10)
    with pytest.raises(TraceError, match="has neither CUDA kernels nor work of gloo"):
        measured(tmp_path, blind)
    blind.call("cudaLaunchKernel", 5)
    with pytest.raises(TraceError, match="has CUDA calls but no kernel"):
        measured(tmp_path, blind)
    with pytest.raises(TraceError, match="some of these traces are of GPUs and some of CPUs"):
        measured(tmp_path, forward(), on_cpu(1))


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


def test_on_cpus_what_gloo_does_hides_behind_operations(tmp_path: Path) -> None:
    run = measured(tmp_path, on_cpu())
    assert not run.on_gpu
    found = figures(run, "dispatch")
    assert (found.comm, found.exposed) == ([(20, 60)], [(20, 30), (50, 60)])
    assert (found.start_delay, found.late, found.compute_wait) == (8, None, 10)
    (step,) = run.ranks[0]
    assert step.syncs is None and step.unfed is None
    parts = [(work.start, work.end, work.label and work.label.stage) for work in step.compute]
    assert sorted(parts) == [(0, 10, None), (30, 50, "experts"), (70, 80, "experts")]


def test_works_that_nobody_called_for_are_refused(tmp_path: Path) -> None:
    small = on_cpu()
    small.add("gloo:all_reduce", "user_annotation", 100, 10, GLOO)
    assert [work.start for work in measured(tmp_path, small).ranks[0][0].other] == [100]
    small.add("gloo:all_to_all", "user_annotation", 120, 10, GLOO)
    with pytest.raises(TraceError, match="has 2 works gloo:all_to_all of 1 calls"):
        measured(tmp_path, small)


def test_labels_of_a_real_trace_with_recompute() -> None:
    """What torch writes, not what this file thinks it does: forward, the second pass in the engine, and backward."""
    model = small_stack(None, dict(dispatcher="all2all"), dense=(False,))
    region = functools.partial(checkpoint, use_reentrant=False, context_fn=recompute_context_fn)
    model.layers[0].recompute_in(region)  # type: ignore[operator]
    xs = [torch.randn(5, 16, requires_grad=True) for _ in range(2)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ys, _ = model(xs)
        torch.stack([y.sum() for y in ys]).sum().backward()
    trace = trace_of(profile)
    names = Names(trace)
    found = {names.at(op.thread, op.start)[0] for op in trace.of("cpu_op")}
    for i in range(2):
        for stage in ("attention", "route", "dispatch_preprocess", "dispatch_postprocess", "experts"):
            assert {Label(stage, 0, i, way) for way in ("fwd", "recompute", "bwd")} <= found
        for stage in ("resolve", "combine_postprocess"):
            assert {Label(stage, 0, i, way) for way in ("fwd", "bwd")} <= found
            assert Label(stage, 0, i, "recompute") not in found
    launched = [
        names.label(place, event) for mine in names.ranges.values() for place, event in mine if place.role == "launch"
    ]
    ways = {(label.stage, label.direction) for label in launched}
    assert ways == {
        *(("exchange of counts", "fwd"), ("dispatch", "fwd"), ("combine", "fwd")),
        *(("exchange of counts", "recompute"), ("dispatch", "recompute"), ("combine", "bwd"), ("dispatch", "bwd")),
    }  # fmt: skip

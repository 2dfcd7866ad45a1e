"""Figures of overlap on traces written here, with shares worked out by hand."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_ep.recompute import recompute_context_fn
from moe_ep.testing.chrome_trace import TraceError, trace_of
from tests.ranks.small_stack import small_stack
from tests.unit.overlap_traces import backward, figures, forward, launch, measured, on_cpu, place, stage
from tests.unit.small_trace import COMM, GLOO, SmallTrace
from tools.intervals import total
from tools.overlap import share_by_step_times
from tools.trace_labels import Label, Names


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
        for name in ("attention", "route", "dispatch_preprocess", "dispatch_postprocess", "experts"):
            assert {Label(name, 0, i, way) for way in ("fwd", "recompute", "bwd")} <= found
        for name in ("resolve", "combine_postprocess"):
            assert {Label(name, 0, i, way) for way in ("fwd", "bwd")} <= found
            assert Label(name, 0, i, "recompute") not in found
    launched = [
        names.label(place, event) for mine in names.ranges.values() for place, event in mine if place.role == "launch"
    ]
    ways = {(label.stage, label.direction) for label in launched}
    assert ways == {
        *(("exchange of counts", "fwd"), ("dispatch", "fwd"), ("combine", "fwd")),
        *(("exchange of counts", "recompute"), ("dispatch", "recompute"), ("combine", "bwd"), ("dispatch", "bwd")),
    }  # fmt: skip

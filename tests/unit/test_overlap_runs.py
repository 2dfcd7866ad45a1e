"""Traces of several ranks and steps: which are peers, which step counts, what does not belong together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_ep.testing.chrome_trace import TraceError
from tests.unit.overlap_traces import backward, figures, forward, launch, measured, on_cpu, place, two_steps
from tests.unit.small_trace import SmallTrace
from tools.overlap import share_by_step_times


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

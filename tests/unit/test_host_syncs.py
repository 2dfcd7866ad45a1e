"""The count of blocking CUDA calls, on traces written here, and what is refused as no trace."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

from moe_ep.testing.chrome_trace import Nested, TraceError, read_trace, trace_of
from moe_ep.testing.host_syncs import WAITS, blocking_calls, describe
from tests.unit.small_trace import ENGINE, MAIN, SmallTrace


def names(small: SmallTrace, folder: Path, inside: str | None = None) -> list[tuple[str, float]]:
    return [(call.name, call.start) for call in blocking_calls(read_trace(small.write(folder / "t.json")), inside)]


def test_only_calls_that_block_count(tmp_path: Path) -> None:
    small = SmallTrace()
    small.kernel(0, 5, 10)
    for number, name in enumerate(["cudaEventQuery", "cudaStreamWaitEvent", "cudaEventRecord", "cudaMemsetAsync"]):
        small.call(name, 10.0 + number)
    assert names(small, tmp_path) == []
    for number, name in enumerate(sorted(WAITS)):
        small.call(name, 20.0 + number)
    assert names(small, tmp_path) == [(name, 20.0 + number) for number, name in enumerate(sorted(WAITS))]


def test_copies_to_pageable_memory_block_and_are_not_counted_twice(tmp_path: Path) -> None:
    small = SmallTrace()
    small.copy(0, 5, 1, "DtoH (Device -> Pinned)")
    small.copy(10, 15, 1, "HtoD (Pageable -> Device)")
    small.copy(20, 25, 1, "DtoH (Device -> Pageable)")  # blocks by itself
    small.kernel(30, 35, 1)
    small.copy(40, 45, 1, "DtoH (Device -> Pageable)")  # as tensor.cpu() does it: one wait, not two
    small.call("cudaEventQuery", 41, tid=ENGINE)
    small.call("cudaStreamSynchronize", 42)
    small.copy(50, 55, 1, "DtoH (Device -> Pageable)")  # the last call of all
    wanted = [("cudaMemcpyAsync", 20.0), ("cudaStreamSynchronize", 42.0), ("cudaMemcpyAsync", 50.0)]
    assert names(small, tmp_path) == wanted


def test_a_range_takes_in_every_thread_and_nothing_around_it(tmp_path: Path) -> None:
    small = SmallTrace()
    for start in (5, 15, 25, 35):
        small.call("cudaStreamSynchronize", start)
    small.call("cudaEventSynchronize", 16, tid=ENGINE)
    small.range("layer", 10, 10)
    small.range("layer", 30, 8)
    inside = [("cudaStreamSynchronize", 15.0), ("cudaEventSynchronize", 16.0), ("cudaStreamSynchronize", 35.0)]
    assert names(small, tmp_path, "layer") == inside
    with pytest.raises(TraceError, match="has no range 'other'; put record_function"):
        names(small, tmp_path, "other")


def test_a_trace_without_cuda_calls_is_no_count_of_zero(tmp_path: Path) -> None:
    small = SmallTrace()
    small.range("layer", 0, 10)
    with pytest.raises(TraceError, match="has no CUDA call"):
        names(small, tmp_path, "layer")


def test_a_call_is_described_by_what_it_stands_in(tmp_path: Path) -> None:
    small = SmallTrace()
    small.range("layer", 0, 100)
    small.add("aten::item", "cpu_op", 10, 20)
    small.add("aten::item", "cpu_op", 10, 20, ENGINE)
    small.call("cudaStreamSynchronize", 15, 4)
    trace = read_trace(small.write(tmp_path / "t.json.gz"))
    assert describe(trace, blocking_calls(trace)) == "cudaStreamSynchronize (4 us) in layer > aten::item"
    assert describe(trace, []) == "no blocking call"


def test_a_profile_of_this_process_is_read() -> None:
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profile, torch.profiler.record_function("layer"):
        x = torch.ones(4, 4, requires_grad=True)
        (x @ x).sum().backward()
    trace = trace_of(profile)
    assert trace.rank is None
    assert [event.name for event in trace.of("user_annotation")] == ["layer"]
    (layer,) = trace.of("user_annotation")
    products = [event for event in trace.of("cpu_op") if event.name == "aten::matmul"]
    assert products and all(layer.start <= event.start <= event.end <= layer.end for event in products)
    ops = {(event.thread, event.start): event.name for event in trace.of("cpu_op")}
    assert ("MmBackward0", "aten::mm") in {(ops[back], ops[there]) for back, there in trace.forward_of.items()}


def test_ranks_and_flows_are_read(tmp_path: Path) -> None:
    small = SmallTrace(rank=3, world_size=4)
    small.content["baseTimeNanoseconds"] = 17
    small.add("aten::mm", "cpu_op", 5, 2)
    small.backward("MmBackward0", 100, 10, forward=5)
    trace = read_trace(small.write(tmp_path / "a.json.gz"))
    assert (trace.rank, trace.world_size, trace.zero_ns) == (3, 4, 17)
    assert trace.forward_of == {((100, ENGINE), 100.1): ((100, MAIN), 5.0)}
    assert read_trace(without_rank().write(tmp_path / "rank11.json")).rank == 11
    assert read_trace(without_rank().write(tmp_path / "x.json")).rank is None


def without_rank() -> SmallTrace:
    small = SmallTrace(rank=None)
    small.kernel(0, 1, 1)
    return small


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no JSON"),
        (b'{"traceEvents": [', "is no JSON"),
        (b"[]", "no list traceEvents"),
        (b'{"events": []}', "no list traceEvents"),
        (b'{"traceEvents": {}}', "no list traceEvents"),
        (b'{"traceEvents": []}', "no event with a duration"),
        (b'{"traceEvents": [{"ph": "M", "name": "x"}]}', "no event with a duration"),
        (b'{"traceEvents": [{"ph": "X", "name": "x"}]}', "an event that cannot be read .KeyError: 'ts'"),
        (
            b'{"traceEvents": [{"ph": "X", "name": "x", "ts": "soon", "pid": 1, "tid": 1}]}',
            "cannot be read .ValueError",
        ),
        (b'{"traceEvents": [3]}', "cannot be read .AttributeError"),
        (gzip.compress(b"{}")[:-9], "cannot be read"),
        (b"\xff\xfe", "is no JSON"),
    ],
)
def test_files_that_are_no_traces_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.json")


def test_the_innermost_range_counts() -> None:
    nested = Nested([(0.0, 100.0, "a"), (10.0, 40.0, "b"), (20.0, 30.0, "c"), (40.0, 50.0, "d"), (200.0, 210.0, "e")])
    times = {-1: None, 0: "a", 10: "b", 25: "c", 30: "b", 40: "d", 50: "a", 100: None, 205: "e", 210: None}
    assert {time: nested.at(time) for time in times} == times
    assert Nested[str]([]).at(0) is None

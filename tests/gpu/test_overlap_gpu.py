"""The overlap report on what a real GPU and NCCL leave in a trace: two ranks, two micro-batches, two layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.dispatch import close_dispatchers
from moe_ep.testing.chrome_trace import read_trace
from moe_ep.testing.ranks import RankPool
from moe_ep.tracing import step_range
from tests.ranks.small_stack import small_stack
from tools import overlap_report
from tools.intervals import total
from tools.overlap import measure
from tools.trace_labels import Label

pytestmark = pytest.mark.gpu(2)
STAGES = ("attention", "route", "dispatch_preprocess", "dispatch_postprocess", "experts", "combine_postprocess")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=120) as ranks:
        yield ranks


def body(group: dist.ProcessGroup, rank: int, folder: Path) -> None:
    model = small_stack(group, dict(dtype="bfloat16"), dense=(False, False)).to("cuda", torch.bfloat16)
    xs = [torch.randn(8, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]

    def step() -> None:
        ys, auxes = model(xs)
        losses: list[Tensor] = [y.float().square().sum() for y in ys]
        losses += [aux.loss for said in auxes for aux in said]
        torch.stack(losses).sum().backward()
        torch.cuda.synchronize()

    step()
    with torch.profiler.profile() as profile:
        for number in (1, 2):
            with step_range(number):
                step()
    profile.export_chrome_trace(str(folder / f"rank{rank}.json"))
    close_dispatchers(group)


def test_a_real_trace_is_taken_apart_whole(pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run(body, tmp_path)
    traces = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    run = measure([read_trace(path) for path in traces])
    assert run.on_gpu and list(run.ranks) == [0, 1]
    sent = {
        ("exchange of counts", "fwd"),
        ("dispatch", "fwd"),
        ("combine", "fwd"),
        ("combine", "bwd"),
        ("dispatch", "bwd"),
    }
    for rank, steps in run.ranks.items():
        assert [step.number for step in steps] == [1, 2]
        for step in steps:
            labels = {Label(stage, layer, i, way) for stage, way in sent for layer in (0, 1) for i in (0, 1)}
            assert {key.label for key in step.transfers} == labels and len(step.transfers) == len(labels)
            assert all(total(figures.comm) > 0 for figures in step.transfers.values()), f"rank {rank}: all have kernels"
            waits = {key.label.stage for key, figures in step.transfers.items() if figures.compute_wait is not None}
            assert {"dispatch", "combine"} <= waits
            computed = {work.label for work in step.compute}
            for way in ("fwd", "bwd"):
                wanted = {Label(stage, layer, i, way) for stage in STAGES for layer in (0, 1) for i in (0, 1)}
                assert wanted <= computed, f"rank {rank}, {way}: {wanted - computed} have no kernel"
            assert step.syncs is not None
            counted = [label for label in step.syncs if label is not None]
            assert sorted(counted) == sorted(
                Label("exchange of counts", layer, i, "fwd") for layer in (0, 1) for i in (0, 1)
            )
            assert len(step.syncs) == len(counted) + 1, "the step's own synchronize"
    arguments = [*map(str, traces), "--serial", *map(str, traces), "--png", str(tmp_path / "step.png")]
    assert overlap_report.main(arguments) == 0
    out = capsys.readouterr().out
    assert "hidden share by step times: 0.0 %" in out
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")

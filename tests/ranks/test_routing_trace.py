"""Routing traces of real runs: what is recorded is what the run counted, and planners meet their bound on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe_ep.load import expert_load, imbalance
from recipes.routing_trace import Step, read_steps
from tests.ranks.launch import PROGRAM, run, start
from tests.ranks.small_recipe import write
from tools import replica_report
from tools.replica_series import measure


def loads(step: Step) -> torch.Tensor:
    """Routes of the step to each expert, [layers, E]."""
    header = step.header
    return torch.stack(
        [
            sum(expert_load(ids[layer].reshape(-1, header.top_k), header.num_experts) for ids in step.ids)
            for layer in range(header.layers)
        ]
    )


def test_the_trace_holds_the_routes_that_the_run_counted(tmp_path: Path) -> None:
    recipe = str(write(tmp_path))
    run(4, [recipe, "train.steps=3", "metrics.routing_trace=plain"], tmp_path)
    both = ["train.recompute=layer", "train.intra_layer_micro_batch=2", "run.name=again"]
    run(4, [recipe, "train.steps=1", "train.warmup_steps=1", "metrics.routing_trace=recomputed", *both], tmp_path)
    steps = read_steps([tmp_path / "plain"])
    rows = [json.loads(line) for line in (tmp_path / "runs/small/metrics.jsonl").read_text().splitlines()]
    assert [step.header.step for step in steps] == [row["step"] for row in rows] == [1, 2, 3]
    for step, row in zip(steps, rows, strict=True):
        assert imbalance(loads(step)).tolist() == row["expert_imbalance"]
        assert [tuple(ids.shape) for ids in step.ids] == [(2, 2, 16, 2)] * 4
    header = steps[0].header
    assert (header.ranks, header.num_experts, header.seed, header.row_bytes) == (4, 4, 3, 64)
    assert header.expert_bytes == 3 * 16 * 16 * 4
    (again,) = read_steps([tmp_path / "recomputed"])
    assert all(torch.equal(a, b) for a, b in zip(steps[0].ids, again.ids, strict=True))


def test_two_groups_of_experts_leave_two_traces(tmp_path: Path) -> None:
    arguments = ["train.steps=1", "train.warmup_steps=1", "parallel.ep_size=1", "metrics.routing_trace=trace"]
    run(2, [str(write(tmp_path)), *arguments], tmp_path)
    steps = read_steps([tmp_path / "trace"])
    assert [(step.header.replica, len(step.ids)) for step in steps] == [(0, 1), (1, 1)]


def test_a_trace_that_cannot_be_written_ends_all_ranks(tmp_path: Path) -> None:
    recipe = str(write(tmp_path))
    (tmp_path / "taken").write_text("a file where the folder should be")
    job = start(2, [recipe, "parallel.ep_size=2", "metrics.routing_trace=taken"], tmp_path)
    assert job.wait() == [1, 1]
    assert "taken/step-00000001-rank0.safetensors cannot be written" in job.text()


@pytest.mark.slow
def test_the_default_recipes_trace(tmp_path: Path) -> None:
    """On what a real run routes, plans come within a hundredth of the bound in every micro-batch."""
    recipe = str(PROGRAM.parent / "tiny.toml")
    limits = ["train.steps=8", "train.warmup_steps=2", "metrics.valid_every=0", "checkpoint.every=0"]
    run(4, [recipe, *limits, "metrics.routing_trace=trace"], tmp_path, timeout_s=250)
    chosen = replica_report.options().parse_args([str(tmp_path / "trace")])
    report = measure("tiny", read_steps([tmp_path / "trace"]), chosen, ["none", "eplb-exact", "quota"])
    assert len(report.bounds) == 3
    for layer, bounds in report.bounds.items():
        ours = report.series[layer, "quota"].peak
        assert len(ours) == 32
        assert all(peak <= 1.01 * bound for peak, bound in zip(ours, bounds, strict=True))
        assert sum(ours) < sum(report.series[layer, "none"].peak)
        assert sum(ours) <= sum(report.series[layer, "eplb-exact"].peak)

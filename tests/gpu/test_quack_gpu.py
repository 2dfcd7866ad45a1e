"""Experts on quack's own kernels: against the oracle, against the torch experts, and without a wait for the host."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_ep import quack_library
from moe_ep.config import MoEConfig
from moe_ep.dispatch import close_dispatchers
from moe_ep.expert_input import ExpertInput
from moe_ep.layer import MoELayer
from moe_ep.quack_mlp import quack_swiglu
from tests.gpu.test_experts_gpu import COUNTS, build, check, make_input, poison

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]  # the first call of each kernel compiles it
BF16 = torch.bfloat16
H, I = 512, 256  # noqa: E741
UNEVEN = (700, 0, 129, 1, 513)


@pytest.fixture(autouse=True)
def quack() -> None:
    reasons = quack_library.machine_reasons()
    if reasons:
        pytest.skip("; ".join(reasons))


def unique(inp: ExpertInput, num_source: int, kernels: bool = False) -> ExpertInput:
    """The same groups, their rows taken from `num_source` others: some of them often, the last nowhere."""
    total, num_rows = int(inp.offsets[-1]), inp.capacity
    gen = torch.Generator().manual_seed(5)
    index = torch.full((num_rows,), -1, dtype=torch.int32)
    index[:total] = torch.randint(num_source - 1, (total,), generator=gen, dtype=torch.int32)
    order = index[:total].argsort(stable=True)
    uses = index[:total].bincount(minlength=num_source)
    positions = torch.full((num_source, int(uses.max())), -1, dtype=torch.int32)
    column = torch.arange(total) - (uses.cumsum(0) - uses).repeat_interleave(uses)
    positions[index[order].long(), column] = order.int()
    source = torch.randn(num_source, inp.source.shape[1], generator=gen)
    return dataclasses.replace(
        inp, source=source.to(inp.source).requires_grad_(), row_index=index.cuda(), positions=positions.cuda(),
        kernels=kernels,
    )  # fmt: skip


def gradients(name: str, inp: ExpertInput, dy: Tensor, weighting: str) -> list[Tensor]:
    """y and all gradients on dirty memory; rows behind the last group are cut off where they may hold anything."""
    experts = build(name, inp.num_local_experts, H, I, "bfloat16", weighting)
    poison()
    y = experts(inp)
    poison()
    grads = torch.autograd.grad(y, [inp.source, inp.row_weights, experts.w_gate_up, experts.w_down], dy)
    return [y.detach()[: int(inp.offsets[-1])], *grads]


@pytest.mark.parametrize("tail", (0, 9))
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_equals_the_oracle(counts: tuple[int, ...], tail: int) -> None:
    check(build("quack", len(counts), 32, 24, "bfloat16"), *make_input(counts, 32, BF16, tail))


def test_float16_equals_the_oracle() -> None:
    check(build("quack", 3, 32, 24, "float16"), *make_input((9, 0, 14), 32, torch.float16, 5))


@pytest.mark.parametrize("kernels", (False, True))
@pytest.mark.parametrize("rows", ("grouped", "unique"))
@pytest.mark.parametrize("weighting", ("output", "activation"))
def test_equals_the_torch_experts(weighting: str, rows: str, kernels: bool) -> None:
    """Values and all gradients, unequal counts, an expert without rows, NaN behind the last group."""
    inp, dy = make_input(UNEVEN, H, BF16, 70)
    inp = unique(inp, 900, kernels) if rows == "unique" else dataclasses.replace(inp, kernels=kernels)
    ours, theirs = (gradients(name, inp, dy, weighting) for name in ("quack", "torch"))
    total = sum(UNEVEN)
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.dtype == other.dtype and one.isfinite().all()
        # each is within 4 eps of the truth; the gradient of the row weights, <dy, f>, cancels more
        bound = (32 if place == 2 else 8) * torch.finfo(BF16).eps
        assert (one.double() - other.double()).norm() <= bound * other.double().norm(), place
    assert ours[2][total:].count_nonzero() == 0
    assert ours[1][-1 if rows == "unique" else slice(total, None)].count_nonzero() == 0
    assert all(grad[1].count_nonzero() == 0 for grad in ours[3:])
    again = gradients("quack", inp, dy, weighting)
    assert all(torch.equal(one, other) for one, other in zip(ours, again, strict=True))


@pytest.mark.parametrize("rows", ("grouped", "unique"))
def test_two_sets_of_weights_equal_one(rows: str) -> None:
    inp, dy = make_input(UNEVEN, H, BF16, 70)
    inp = unique(inp, 900) if rows == "unique" else inp
    want = gradients("quack", inp, dy, "output")
    experts = build("quack", len(UNEVEN), H, I, "bfloat16")
    flat = [p.detach()[part].clone().requires_grad_() for part in (slice(3), slice(3, None))
            for p in (experts.w_gate_up, experts.w_down)]  # fmt: skip
    poison()
    y = quack_swiglu(inp, (flat[0], flat[1]), (flat[2], flat[3]), weight_activation=False)
    poison()
    dx, d_weights, *d_flat = torch.autograd.grad(y, [inp.source, inp.row_weights, *flat], dy)
    got = [y[: sum(UNEVEN)], dx, d_weights, torch.cat(d_flat[::2]), torch.cat(d_flat[1::2])]
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("rows", ("grouped", "unique"))
def test_never_waits_for_the_host_and_can_be_captured(rows: str) -> None:
    """A graph of forward and backward, replayed with other counts and rows, gives what eager calls give."""
    experts = build("quack", 4, H, I, "bfloat16")
    first, second = ((300, 0, 250, 90), (0, 411, 7, 200))
    inputs = []
    for counts in (first, second):
        inp, dy = make_input(counts, H, BF16, 700 - sum(counts))
        inputs.append((unique(inp, 400, kernels=True) if rows == "unique" else inp, dy))
    if rows == "unique":  # one width of positions for both
        width = max(inp.positions.shape[1] for inp, _ in inputs if inp.positions is not None)
        inputs = [(dataclasses.replace(inp, positions=torch.nn.functional.pad(
            inp.positions, (0, width - inp.positions.shape[1]), value=-1)), dy) for inp, dy in inputs]  # fmt: skip

    def step(inp: ExpertInput, dy: Tensor) -> list[Tensor]:
        y = experts(inp)
        leaves = [inp.source, inp.row_weights, experts.w_gate_up, experts.w_down]
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    static, static_dy = inputs[0]
    step(static, static_dy)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        want = [[t.clone() for t in step(*each)] for each in inputs]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(static, static_dy)
    for (inp, dy), counts, expected in zip(inputs, (first, second), want, strict=True):
        with torch.no_grad():
            for field in ("source", "row_weights", "offsets", "tokens_per_expert", "row_index", "positions"):
                if getattr(static, field) is not None:
                    getattr(static, field).copy_(getattr(inp, field))
            static_dy.copy_(dy)
        graph.replay()
        torch.cuda.synchronize()
        total = sum(counts)
        assert torch.equal(got[0][:total], expected[0][:total])
        assert all(torch.equal(one, other) for one, other in zip(got[1:], expected[1:], strict=True))


def test_a_layer_equals_one_with_torch_experts() -> None:
    """Router to output and back to x and every parameter, on one rank; the model is built on the meta device."""
    results = []
    for name in ("quack", "torch"):
        config = MoEConfig(
            hidden_size=H, expert_intermediate_size=I, num_experts=8, top_k=3, dtype="bfloat16", experts=name,
            dispatcher="local", init_std=0.1,
        )  # fmt: skip
        with torch.device("meta"):
            layer = MoELayer(config)
        layer.to_empty(device="cuda").reset_parameters(0)
        generator = torch.Generator("cuda").manual_seed(0)
        x, dy = (torch.randn(777, H, device="cuda", generator=generator, dtype=BF16) for _ in range(2))
        y = layer(x.requires_grad_())[0]
        y.backward(dy)
        results.append({"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in layer.named_parameters()}})
    close_dispatchers()
    for key, other in results[1].items():
        # one rounding more or less on the way; the router's gradient is made of <dy, f>, which cancel
        bound = (64 if "router" in key else 8) * torch.finfo(BF16).eps
        assert (results[0][key].double() - other.double()).norm() <= bound * other.double().norm(), key


@pytest.mark.parametrize("reserve", [0, 16, 33])
def test_gemms_leave_sms_free_in_forward_and_backward(reserve: int, tmp_path: Path) -> None:
    """Persistent: no more thread blocks than SMs that are left to them; the next limit does not inherit the last."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("quack's grids can be limited on compute capability 9.0 only")
    experts = build("quack", 4, 1024, 512, "bfloat16")
    inp, dy = make_input((2048,) * 4, 1024, BF16, 0)
    experts(inp, reserve_sms=reserve).backward(dy)  # compiles
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        experts(inp, reserve_sms=reserve).backward(dy)
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [(e["name"], math.prod(e["args"]["grid"])) for e in events if "grid" in e.get("args", {})]
    grids = [blocks for name, blocks in kernels if "cutlass" in name.lower() or "quack" in name.lower()]
    all_sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert len(grids) == 6, kernels
    assert all(0 < blocks <= all_sms - reserve for blocks in grids), grids
    assert reserve or max(grids) > all_sms - 16, "it does fill the GPU otherwise"

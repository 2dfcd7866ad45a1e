"""Experts on one GPU: grouped_mm's own kernels with NaN in tails and in fresh memory, and no wait for the host."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_ep.config import MoEConfig
from moe_ep.expert_input import ExpertInput
from moe_ep.experts import GroupedExperts
from moe_ep.experts_registry import build_experts
from moe_ep.sorted_routes import make_offsets
from moe_ep.testing.oracle import RankInput, SwiGLUExperts, run_oracle

pytestmark = pytest.mark.gpu(1)
COUNTS = {
    "one_expert": (13,),
    "uneven": (3, 0, 37),
    "empty_ends": (0, 4, 1, 0),
    "no_rows": (0, 0),
    "17_experts": tuple((3 * e) % 5 for e in range(17)),
    "64_experts": tuple((7 * e) % 4 for e in range(64)),
    "160_experts": tuple(e % 2 for e in range(160)),
}


def poison() -> None:
    """Leave NaN in the memory that the caching allocator hands out next: small blocks and large ones."""
    blocks = [torch.full((2**17,), float("nan"), device="cuda") for _ in range(64)]
    blocks.append(torch.full((2**25,), float("nan"), device="cuda"))
    del blocks


def build(name: str, num_local: int, hidden: int, inner: int, dtype: str, weighting: str = "output") -> GroupedExperts:
    config = MoEConfig(
        hidden_size=hidden,
        expert_intermediate_size=inner,
        num_experts=num_local,
        top_k=1,
        dtype=dtype,
        experts=name,
        weighting=weighting,
        init_std=0.3,
    )
    return build_experts(config, num_local, 0, 0).cuda()


def make_input(counts: tuple[int, ...], hidden: int, dtype: torch.dtype, tail: int) -> tuple[ExpertInput, Tensor]:
    """Rows and the gradient of their outputs; NaN in the tail, counts known to the device only."""
    gen = torch.Generator().manual_seed(0)
    total, num_rows = sum(counts), sum(counts) + tail
    x, dy = (torch.randn(num_rows, hidden, generator=gen) for _ in range(2))
    weights = torch.rand(num_rows, generator=gen) + 0.1
    for t in (x, dy, weights):
        t[total:] = float("nan")
    counts_L = torch.tensor(counts, dtype=torch.int32).cuda()
    inp = ExpertInput(
        source=x.to(dtype).cuda().requires_grad_(),
        row_weights=weights.cuda().requires_grad_(),
        offsets=make_offsets(counts_L),
        tokens_per_expert=counts_L,
        capacity=num_rows,
    )
    return inp, dy.to(dtype).cuda()


def check(experts: GroupedExperts, inp: ExpertInput, dy: Tensor) -> None:
    """Forward and backward on poisoned memory against the oracle; the tail's gradients are exactly zero."""
    counts = inp.tokens_per_expert.tolist()
    total = sum(counts)
    x, weights = inp.source.detach().cpu(), inp.row_weights.detach().cpu()
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).view(-1, 1)
    rank = RankInput(x=x[:total], expert_ids=ids, weights=weights[:total].view(-1, 1), dy=dy.cpu()[:total])
    parameters = [experts.w_gate_up, experts.w_down]
    want = run_oracle([rank], SwiGLUExperts(*(p.detach().cpu() for p in parameters)))
    poison()
    y = experts(inp)
    poison()
    got = torch.autograd.grad(y, [inp.source, inp.row_weights, *parameters], dy)
    f_norms = want.y[0].norm(dim=1) / rank.weights.double().view(-1)
    scale = (f_norms * rank.dy.double().norm(dim=1)).norm()  # <dy, f> may cancel
    pairs = [(y[:total], want.y[0], None), (got[0][:total], want.dx[0], None)]
    pairs += [(got[1][:total], want.dweights[0].view(-1), scale), (got[2], want.dparams[0], None)]
    for value, expected, norm in [*pairs, (got[3], want.dparams[1], None)]:
        bound = 4 * torch.finfo(inp.source.dtype).eps * (expected.norm() if norm is None else norm)
        assert (value.double().cpu() - expected).norm() <= bound
    assert got[0][total:].count_nonzero() == 0 and got[1][total:].count_nonzero() == 0
    for parameter_grad in got[2:]:
        assert all((g.count_nonzero() == 0) == (c == 0) for g, c in zip(parameter_grad, counts, strict=True))


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("tail", (0, 9))
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_grouped_mm_equals_the_oracle(counts: tuple[int, ...], tail: int, dtype: str) -> None:
    """NaN in tails and dirty memory (huggingface/transformers#45621, #48205; pytorch/pytorch#193633)."""
    experts = build("torch", len(counts), 32, 24, dtype)
    check(experts, *make_input(counts, 32, getattr(torch, dtype), tail))


@pytest.mark.parametrize("weighting", ("output", "activation"))
@pytest.mark.parametrize(("hidden", "inner"), ((5, 3), (30, 30), (64, 9)))
@pytest.mark.parametrize("name", ("torch", "loop"))
def test_sizes_that_are_no_multiple_of_16_bytes(name: str, hidden: int, inner: int, weighting: str) -> None:
    experts = build(name, 3, hidden, inner, "bfloat16", weighting)
    check(experts, *make_input((9, 0, 14), hidden, torch.bfloat16, 5))


def test_misaligned_rows_and_parameters() -> None:
    """Slices of a flat buffer that start between 16-byte units (pytorch/torchtitan#2242)."""
    experts = build("torch", 3, 32, 24, "bfloat16")
    inp, dy = make_input((9, 0, 14), 32, torch.bfloat16, 0)

    def moved(t: Tensor) -> Tensor:
        return torch.cat([t.new_zeros(1), t.detach().flatten()])[1:].view(t.shape)

    experts.w_down = torch.nn.Parameter(moved(experts.w_down))
    experts.w_gate_up = torch.nn.Parameter(moved(experts.w_gate_up))
    inp = dataclasses.replace(inp, source=moved(inp.source).requires_grad_())
    assert inp.source.data_ptr() % 16 != 0
    check(experts, inp, moved(dy))


@pytest.mark.parametrize("unique", (False, True))
def test_bfloat16_never_waits_for_the_host(unique: bool) -> None:
    """Forward and backward with a tail whose size only the device knows."""
    experts = build("torch", 4, 64, 32, "bfloat16")
    inp, dy = make_input((30, 0, 5, 17), 64, torch.bfloat16, 12)
    if unique:
        index = torch.where(torch.arange(64) < 52, torch.arange(64) // 2, -1).int().cuda()
        places = torch.arange(52, dtype=torch.int32).view(26, 2).cuda()
        source = inp.source.detach()[:26].clone().requires_grad_()
        inp = dataclasses.replace(inp, source=source, row_index=index, positions=places)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts(inp).backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for t in (inp.source, inp.row_weights, experts.w_gate_up, experts.w_down):
        assert t.grad is not None and t.grad.isfinite().all()


def test_autocast_leaves_the_dtype_alone() -> None:
    experts = build("torch", 2, 32, 24, "float32")
    inp, _ = make_input((4, 3), 32, torch.float32, 0)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = experts(inp)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, experts(inp), rtol=0, atol=0)


@pytest.mark.parametrize("reserve", [0, 16, 32])
def test_gemms_leave_sms_free_in_forward_and_backward(reserve: int, tmp_path: Path) -> None:
    """A grouped GEMM has one thread block an SM: no more of them than SMs that are left to it."""
    experts = build("torch", 4, 512, 512, "bfloat16")
    inp, dy = make_input((1024,) * 4, 512, torch.bfloat16, 0)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        experts(inp, reserve_sms=reserve).backward(dy)
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    grids = [math.prod(e["args"]["grid"]) for e in events if "GroupProblemShape" in e["name"] and "grid" in e["args"]]
    all_sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert len(grids) == 6 and all(0 < blocks <= all_sms - reserve for blocks in grids)
    assert reserve or max(grids) > all_sms - 16, "it does fill the GPU otherwise"

"""Experts on grouped_gemm and Transformer Engine against the reference, through doubles that hold their contracts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import ExpertInput, MoEConfig, Unavailable, grouped_gemm_experts, te_experts
from moe_ep.experts import GroupedExperts
from moe_ep.experts_registry import build_experts, known_experts
from tests.unit.gemm_doubles import put_in_place

NUM_LOCAL, H, INNER = 4, 16, 8


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch)


def config(**changes: Any) -> MoEConfig:
    values: dict[str, Any] = dict(
        hidden_size=H, expert_intermediate_size=INNER, num_experts=NUM_LOCAL, top_k=2, dtype="bfloat16", init_std=0.3
    )
    return MoEConfig(**{**values, "experts": "grouped_gemm", **changes})


def rows(counts: list[int], tail: int, on_host: bool) -> ExpertInput:
    total = sum(counts)
    generator = torch.Generator().manual_seed(total + tail)
    source = torch.randn(total + tail, H, generator=generator).bfloat16()
    weights = torch.rand(total + tail, generator=generator)
    source[total:], weights[total:] = float("nan"), float("nan")
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    return ExpertInput(
        source=source.requires_grad_(),
        row_weights=weights.requires_grad_(),
        offsets=offsets,
        tokens_per_expert=torch.tensor(counts, dtype=torch.int32),
        capacity=total + tail,
        host_counts=tuple(counts) if on_host else None,
    )


def run(experts: GroupedExperts, inp: ExpertInput) -> list[Tensor]:
    total = int(inp.offsets[-1])
    y = experts(inp)
    assert y.shape == (inp.capacity, H)
    y[:total].float().square().sum().backward()
    grads = [inp.source.grad[:total], inp.row_weights.grad[:total], experts.w_gate_up.grad, experts.w_down.grad]
    return [y[:total].detach(), *grads]


@pytest.mark.parametrize("name", ["grouped_gemm", "te"])
@pytest.mark.parametrize("weighting", ["output", "activation"])
@pytest.mark.parametrize("counts", [[3, 0, 2, 4], [0, 0, 9, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize(("tail", "on_host"), [(0, True), (5, False)])
def test_equal_to_the_reference_in_bfloat16(
    library: None, name: str, weighting: Any, counts: list[int], tail: int, on_host: bool
) -> None:
    wanted = run(
        build_experts(config(experts="loop", weighting=weighting), NUM_LOCAL, 0, 0), rows(counts, tail, on_host)
    )
    found = run(build_experts(config(experts=name, weighting=weighting), NUM_LOCAL, 0, 0), rows(counts, tail, on_host))
    for want, got in zip(wanted, found, strict=True):
        assert got.isfinite().all()
        assert (want.float() - got.float()).norm() <= 2**-6 * want.float().norm()  # sums of I and H in bfloat16 GEMMs


@pytest.mark.parametrize("name", ["grouped_gemm", "te"])
def test_unique_rows_are_expanded_and_rows_without_a_route_take_no_part(library: None, name: str) -> None:
    """Three rows of source, one of them for two experts; -1 in the tail."""
    found = []
    for which in ("loop", name):
        plain = rows([2, 0, 1, 1], 0, False)
        source = plain.source.detach()[:3].clone().requires_grad_()
        inp = ExpertInput(
            source=source,
            row_weights=torch.tensor([0.5, 1.0, 2.0, 0.25, float("nan")]).requires_grad_(),
            offsets=plain.offsets,
            tokens_per_expert=plain.tokens_per_expert,
            capacity=5,
            row_index=torch.tensor([0, 2, 1, 0, -1], dtype=torch.int32),
            positions=torch.tensor([[0, 3], [2, -1], [1, -1]], dtype=torch.int32),
        )
        experts = build_experts(config(experts=which), NUM_LOCAL, 0, 0)
        y = experts(inp)
        y[:4].float().square().sum().backward()
        assert not experts.w_down.grad[1].any() and experts.w_down.grad[0].any(), "expert 1 has no rows"
        found.append([y[:4], source.grad, inp.row_weights.grad[:4], experts.w_gate_up.grad, experts.w_down.grad])
        assert inp.row_weights.grad[4] == 0
    for want, got in zip(*found, strict=True):
        assert (want.float() - got.float()).norm() <= 2**-6 * want.float().norm() > 0


@pytest.mark.parametrize("name", ["grouped_gemm", "te"])
def test_a_second_set_computes_the_rows_of_copies(library: None, name: str) -> None:
    """Masters' rows first, copies' after, as with copies of hot experts; without counts on the host: refused."""
    found = []
    for which in ("loop", name):
        experts = build_experts(config(experts=which), NUM_LOCAL, 0, 0)
        generator = torch.Generator().manual_seed(1)
        copies = tuple(
            (0.3 * torch.randn(2, *w.shape[1:], generator=generator)).bfloat16().requires_grad_()
            for w in (experts.w_gate_up, experts.w_down)
        )
        inp = rows([3, 0, 2, 1, 2, 0], 0, True)
        y = experts.compute_sets(inp, [(experts.w_gate_up, experts.w_down), (copies[0], copies[1])])
        y.float().square().sum().backward()
        grads = [inp.source.grad, inp.row_weights.grad, experts.w_gate_up.grad, experts.w_down.grad]
        found.append([y, *grads, *(copy.grad for copy in copies)])
        assert copies[1].grad[0].any() and not copies[1].grad[1].any()
    for want, got in zip(*found, strict=True):
        assert (want.float() - got.float()).norm() <= 2**-6 * want.float().norm() > 0
    assert type(experts).replica_refusal(host_counts=True) is None
    assert "reads no counts there" in (type(experts).replica_refusal(host_counts=False) or "")


def test_frozen_experts_pass_gradients_on(library: None) -> None:
    experts = build_experts(config(), NUM_LOCAL, 0, 0).requires_grad_(False)
    inp = rows([1, 2, 0, 1], 0, True)
    experts(inp).float().sum().backward()
    assert inp.source.grad.any() and inp.row_weights.grad.any()
    assert experts.w_down.grad is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float32"}, "take bfloat16, not float32"),
        ({"hidden_size": 20}, "hidden_size = 20 must be a multiple of 8"),
        ({"expert_intermediate_size": 4}, "expert_intermediate_size = 4 must be a multiple of 8"),
    ],
)
def test_what_its_kernels_do_not_take_is_refused(library: None, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(Unavailable, match=said):
        build_experts(config(**changes), NUM_LOCAL, 0, 0)


def test_a_machine_without_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"grouped_gemm", "te"} <= set(known_experts())
    monkeypatch.setattr(grouped_gemm_experts, "_missing", lambda: True)
    with pytest.raises(Unavailable, match=r"grouped_gemm is not installed; pip install 'moe-ep\[grouped-gemm\]'"):
        build_experts(config(), NUM_LOCAL, 0, 0)
    monkeypatch.setattr(grouped_gemm_experts, "_missing", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unavailable, match="computes on GPUs only"):
        build_experts(config(), NUM_LOCAL, 0, 0)


def test_another_transformer_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, said in (
        (None, "is not installed"),
        ("2.9.0", "2.9.0 is installed, and its grouped GEMM is called as"),
    ):
        monkeypatch.setattr(te_experts, "_version", lambda version=version: version)
        with pytest.raises(Unavailable, match=said):
            build_experts(config(experts="te"), NUM_LOCAL, 0, 0)
    with pytest.raises(Unavailable, match="take bfloat16 and float16, not float32"):
        build_experts(config(experts="te", dtype="float32"), NUM_LOCAL, 0, 0)

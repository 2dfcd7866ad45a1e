"""Experts on grouped_gemm and Transformer Engine against the reference, through doubles that hold their contracts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import ExpertInput, MoEConfig, Unavailable, grouped_gemm_experts, te_experts
from moe_ep.experts import GroupedExperts
from moe_ep.experts_registry import build_experts, known_experts

NUM_LOCAL, H, INNER = 4, 16, 8


def gmm(a: Tensor, b: Tensor, sizes: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
    """grouped_gemm.backend.gmm 0.3: bfloat16, sizes int64 on the host; a product over no rows is not written."""
    assert a.dtype == b.dtype == torch.bfloat16 and a.is_contiguous() and b.is_contiguous()
    assert sizes.dtype == torch.int64 and sizes.device.type == "cpu" and int(sizes.sum()) == a.shape[0] > 0
    parts = a.split(sizes.tolist())
    if trans_a:
        others = b.split(sizes.tolist())
        nothing = torch.full((a.shape[1], b.shape[1]), float("nan"), dtype=a.dtype)
        return torch.stack([p.T @ o if p.shape[0] else nothing for p, o in zip(parts, others, strict=True)])
    return torch.cat([part @ (w.T if trans_b else w) for part, w in zip(parts, b, strict=True)])


def general_grouped_gemm(
    first: list[Tensor],
    second: list[Tensor],
    out: list[Tensor],
    quantizers: list[None],
    out_dtype: torch.dtype,
    *,
    layout: str,
    m_splits: list[int],
    single_output: bool = False,
    grad: bool = False,
    use_split_accumulator: bool = False,
) -> None:
    """Transformer Engine 2.12's, for factors that are not quantized: column-major, so out = second x first."""
    assert len(first) == len(second) == len(m_splits) == len(quantizers)
    assert out_dtype == out[0].dtype and grad == (layout != "TN")
    assert single_output == (layout != "NT") and len(out) == (1 if single_output else len(m_splits))
    parts = out[0].split(m_splits) if single_output else out
    for a, b, part in zip(first, second, parts, strict=True):
        assert a.is_contiguous() and b.is_contiguous()
        if b.shape[0]:  # a product over no rows is not written
            part.copy_({"TN": lambda a, b: b @ a.T, "NN": lambda a, b: b @ a, "NT": lambda a, b: b.T @ a}[layout](a, b))
        elif not single_output:
            part.fill_(float("nan"))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_gemm_experts, "_gmm", lambda: gmm)
    monkeypatch.setattr(grouped_gemm_experts.GroupedGemmExperts, "machine_reasons", classmethod(lambda cls: []))
    monkeypatch.setattr(te_experts, "_general_grouped_gemm", lambda: general_grouped_gemm)
    monkeypatch.setattr(te_experts.TEExperts, "machine_reasons", classmethod(lambda cls: []))


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

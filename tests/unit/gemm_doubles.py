"""Doubles of the grouped GEMMs of grouped_gemm and of Transformer Engine, which hold their contracts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_ep import grouped_gemm_experts, te_experts


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


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both libraries are there, and compute with the doubles."""
    monkeypatch.setattr(grouped_gemm_experts, "_gmm", lambda: gmm)
    monkeypatch.setattr(grouped_gemm_experts.GroupedGemmExperts, "machine_reasons", classmethod(lambda cls: []))
    monkeypatch.setattr(te_experts, "_general_grouped_gemm", lambda: general_grouped_gemm)
    monkeypatch.setattr(te_experts.TEExperts, "machine_reasons", classmethod(lambda cls: []))

"""A double of the functions of quack-kernels 0.6.5 that moe_ep calls: their contracts enforced, in plain torch.

Contracts, and where in quack they stand:

- strides but one, and addresses, are whole 16 bytes; of index vectors the address (`div_for_dtype`, `fake_batched`,
  `make_fake_tensor` of compile_utils.py, `make_fake_varlen_args` of varlen_utils.py; checked by the compiled kernel);
- cu_seqlens and A_idx are int32, one of cu_seqlens_m and cu_seqlens_k (varlen_utils.py, `_build_gemm_plan` of gemm.py);
- varlen_m: A (total_m, k) with k contiguous (with A_idx of any number of rows), B (L, k, n), D (total_m, n) with n
  contiguous (gemm.py; `EpiMod.gemm` of epilogue/frontend.py);
- varlen_k: A (m, total_k) with m contiguous (with A_idx of any length), B (total_k, n) with n contiguous, D (L, m, n);
  a group without rows gives zeros, "acc.fill(0.0)" (gemm.py, gemm_sm90.py);
- concat_layout: "tensors whose non-contiguous dim is concat [gate; up]" (gemm_interface.py): it is read and written
  as if interleaved, `concat_to_interleave`;
- gated: preactivation and its gradient are interleaved, (total_m, 2n), 16 bit, n even (`unpack` of linear_act_mod and
  dgated_mod, epilogue/library.py; "acc_pair auxiliary output must be 16-bit", frontend.py);
- gemm_dact of a gated activation: D = dgate(pre, acc * colvec_scale), postact * colvec_scale, and the sum of
  postact * acc, unscaled, float32 (dgated_mod); its partial sums are torch.empty (`_alloc_sinks`), so the sum's tail
  is anything;
- norm_act_mod with a column vector and no activation: (A B) * vector (epilogue/library.py);
- empty outputs return at once; an empty A gives zeros in all of `out` (gemm_interface.py). EpiMod itself has no such
  way out, and a kernel must not start on an empty operand;
- without `tuned=False` it would time kernels on a GPU (`Autotuner`, autotuner.py).

Sums are float64 here and rounded once. Rows outside of the groups are neither read nor written: outputs are what they
were, and index and operands may hold anything there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ep.quack_library import Library

HALVES = (torch.bfloat16, torch.float16)


def aligned(t: Tensor | None) -> None:
    if t is None:
        return
    units = [stride * t.element_size() % 16 for stride in t.stride()]
    assert t.data_ptr() % 16 == 0, "an address that is no multiple of 16 bytes"
    assert t.dim() == 1 or (1 in t.stride() and sum(unit != 0 for unit in units) <= 1), f"strides {t.stride()}"


def groups(starts: Tensor) -> Iterator[tuple[int, slice]]:
    assert starts.dtype == torch.int32 and starts.dim() == 1
    aligned(starts)
    bounds = starts.tolist()
    assert bounds == sorted(bounds) and bounds[0] >= 0
    yield from ((group, slice(*pair)) for group, pair in enumerate(itertools.pairwise(bounds)))


def rows_of(A: Tensor, A_idx: Tensor | None, rows: slice) -> Tensor:
    if A_idx is None:
        assert rows.stop <= A.shape[0]
        return A[rows].double()
    index = A_idx[rows].long()
    assert ((index >= 0) & (index < A.shape[0])).all(), "an index outside of A"
    return A[index].double()


def interleaved(t: Tensor, dim: int) -> Tensor:
    return t.unflatten(dim, (2, t.shape[dim] // 2)).transpose(dim - 1, dim).flatten(dim - 1, dim)


def loose(t: Tensor) -> int:
    """The dimension of the last two that is not contiguous."""
    assert 1 in t.stride()[-2:], "neither dimension is contiguous"
    return -2 if t.stride(-1) == 1 else -1


def read_weight(B: Tensor, concat_layout: tuple[str, ...] | None) -> Tensor:
    return interleaved(B, loose(B)) if concat_layout and "B" in concat_layout else B


class Double:
    """`library` is what `quack_library.load` returns; `calls` counts."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.library = Library(self.gemm, self.gemm_act, self.gemm_dact, self.norm_act_mod)

    def check(self, name: str, *tensors: Tensor | None, tuned: bool) -> None:
        self.calls.append(name)
        assert not tuned, "autotuning in a step"
        for t in tensors:
            aligned(t)
            assert t is None or t.dim() == 1 or t.dtype in HALVES

    def varlen_m(self, A: Tensor, B: Tensor, starts: Tensor, A_idx: Tensor | None, *outs: Tensor | None) -> None:
        assert A.dim() == 2 and A.stride(-1) == 1, "varlen_m requires A to be k-major"
        assert B.dim() == 3 and B.shape[0] == starts.shape[0] - 1, "varlen_m B is per-sequence indexed"
        assert A.shape[1] == B.shape[1]
        assert A_idx is None or A_idx.dtype == torch.int32
        total = A.shape[0] if A_idx is None else A_idx.shape[0]
        for out in outs:
            assert out is None or (out.shape[0] == total and out.dim() == 2 and out.stride(-1) == 1)

    def gemm_act(
        self, A: Tensor, B: Tensor, C: Tensor | None = None, bias: Tensor | None = None, activation: str | None = None,
        *, preact_out: Tensor | None = None, postact_out: Tensor, cu_seqlens_m: Tensor, A_idx: Tensor | None = None,
        store_preact: bool = True, dynamic_scheduler: bool = False, tuned: bool = True,
        concat_layout: tuple[str, ...] | None = None,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        assert C is None and bias is None and activation == "swiglu" and store_preact == (preact_out is not None)
        self.check("gemm_act", A, B, preact_out, postact_out, A_idx, tuned=tuned)
        self.varlen_m(A, B, cu_seqlens_m, A_idx, preact_out, postact_out)
        assert postact_out.shape[1] * 2 == B.shape[2] and (preact_out is None or preact_out.shape[1] == B.shape[2])
        if postact_out.numel() == 0 or A.numel() == 0:
            for out in (preact_out, postact_out):
                if out is not None:
                    out.zero_()
            return preact_out, postact_out
        B = read_weight(B, concat_layout)
        for group, rows in groups(cu_seqlens_m):
            pre = rows_of(A, A_idx, rows) @ B[group].double()
            postact_out[rows] = (F.silu(pre[:, ::2]) * pre[:, 1::2]).to(postact_out.dtype)
            if preact_out is not None:
                preact_out[rows] = pre.to(preact_out.dtype)
        return preact_out, postact_out

    def gemm_dact(
        self, A: Tensor, B: Tensor, PreAct: Tensor, activation: str | None = None, *, dx_out: Tensor,
        postact_out: Tensor, colvec_scale: Tensor | None = None, colvec_reduce: bool = False, cu_seqlens_m: Tensor,
        A_idx: Tensor | None = None, dynamic_scheduler: bool = True, tuned: bool = True,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert activation == "swiglu" and colvec_scale is not None and colvec_scale.dtype == torch.float32
        self.check("gemm_dact", A, B, PreAct, dx_out, postact_out, colvec_scale, tuned=tuned)
        self.varlen_m(A, B, cu_seqlens_m, A_idx, PreAct, dx_out, postact_out)
        assert dx_out.shape == PreAct.shape and dx_out.dtype == PreAct.dtype and PreAct.shape[1] == 2 * B.shape[2]
        assert colvec_scale.shape == dx_out.shape[:1]
        if dx_out.numel() == 0 or A.numel() == 0:
            dx_out.zero_(), postact_out.zero_()
            return (dx_out, postact_out, *([torch.zeros(dx_out.shape[:1])] if colvec_reduce else []))
        reduced = torch.full(dx_out.shape[:1], float("nan"))
        for group, rows in groups(cu_seqlens_m):
            acc = rows_of(A, A_idx, rows) @ B[group].double()
            scale = colvec_scale[rows].double()[:, None]
            gate, up = PreAct[rows, ::2].double(), PreAct[rows, 1::2].double()
            sigmoid = torch.sigmoid(gate)
            post = gate * sigmoid * up
            dx_out[rows, ::2] = (acc * scale * up * sigmoid * (1 + gate * (1 - sigmoid))).to(dx_out.dtype)
            dx_out[rows, 1::2] = (acc * scale * gate * sigmoid).to(dx_out.dtype)
            postact_out[rows] = (post * scale).to(postact_out.dtype)
            reduced[rows] = (post * acc).sum(-1).float()
        return (dx_out, postact_out, *([reduced] if colvec_reduce else []))

    def gemm(
        self, A: Tensor, B: Tensor, out: Tensor, *, cu_seqlens_m: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, A_idx: Tensor | None = None, dynamic_scheduler: bool = False,
        tuned: bool = True, concat_layout: tuple[str, ...] | None = None,
    ) -> Tensor:  # fmt: skip
        self.check("gemm", A, B, out, A_idx, tuned=tuned)
        assert (cu_seqlens_m is None) != (cu_seqlens_k is None)
        assert A.dtype == B.dtype
        if out.numel() == 0:
            return out
        if A.numel() == 0:
            return out.zero_()
        assert B.numel() > 0, "a kernel on an empty operand"
        if cu_seqlens_m is not None:
            self.varlen_m(A, B, cu_seqlens_m, A_idx, out)
            B = read_weight(B, concat_layout)
            for group, rows in groups(cu_seqlens_m):
                out[rows] = (rows_of(A, A_idx, rows) @ B[group].double()).to(out.dtype)
            return out
        assert cu_seqlens_k is not None
        self._varlen_k(A, B, out, cu_seqlens_k, A_idx, concat_layout)
        return out

    def _varlen_k(
        self, A: Tensor, B: Tensor, out: Tensor, starts: Tensor, A_idx: Tensor | None, concat: tuple[str, ...] | None
    ) -> None:
        assert A.stride(-2) == 1, "varlen_k requires A to be m-major"
        assert B.dim() == 2 and B.stride(-1) == 1, "varlen_k requires B to be n-major"
        assert out.shape == (starts.shape[0] - 1, A.shape[0], B.shape[1])
        assert B.shape[0] == (A.shape[1] if A_idx is None else A_idx.shape[0])
        for group, rows in groups(starts):
            found = rows_of(A.T, A_idx, rows).T @ B[rows].double()
            if concat and "out" in concat:  # found is interleaved along out's loose dimension
                dim = loose(out)
                halves = found.unflatten(dim, (found.shape[dim] // 2, 2)).transpose(dim - 1, dim)
                found = halves.flatten(dim - 1, dim)
            out[group] = found.to(out.dtype)

    def norm_act_mod(
        self, activation: str | None, *, gated: bool, has_c: bool, has_rowvec: bool, has_colvec: bool
    ) -> Callable[..., dict[str, Tensor]]:
        assert activation is None and not gated and not has_c and not has_rowvec and has_colvec

        def scaled(
            A: Tensor, B: Tensor, *, out: dict[str, Tensor], store_d: bool, tuned: bool, cu_seqlens_m: Tensor,
            mColVecBroadcast: Tensor, **others: Any,
        ) -> dict[str, Tensor]:  # fmt: skip
            (y,) = out.values()
            self.check("norm_act_mod", A, B, y, mColVecBroadcast, tuned=tuned)
            self.varlen_m(A, B, cu_seqlens_m, None, y)
            assert not others and not store_d and list(out) == ["mAuxOut"]
            assert mColVecBroadcast.shape == y.shape[:1] and mColVecBroadcast.dtype == torch.float32
            assert A.numel() > 0 and y.numel() > 0, "a kernel on an empty operand"
            for group, rows in groups(cu_seqlens_m):
                product = rows_of(A, None, rows) @ B[group].double()
                y[rows] = (product * mColVecBroadcast[rows].double()[:, None]).to(y.dtype)
            return out

        return scaled

"""The grouped products of SwiGLU experts in quack's terms: which function, which layout, which argument.

quack keeps gate and up of a pre-activation side by side (columns 0, 2, 4 ... are the gate's, 1, 3, 5 ... the up
half's) and reads and writes weights whose halves stand one behind the other where `concat_layout` names the operand:
our [L, 2I, H] is taken and given as it is. That h [N, 2I] and its gradient are interleaved is seen by nobody outside.

Each function is one kernel, all sums are float32, and each result is rounded once. `starts` is int32 [L+1] on the
device and need not begin with 0: rows outside of [starts[0], starts[L]) are neither read nor written. Nothing waits
for the host. Rows are [N, ...]; with an `index` int32 [N] row n is x[index[n]], and index is not read outside either.

Tiles are quack's defaults: its tuning would time kernels in the middle of a step, on one rank and not another.
"""

from __future__ import annotations

from torch import Tensor

from .quack_library import Library


def up(
    library: Library, x: Tensor, index: Tensor | None, w_gate_up: Tensor, starts: Tensor, h: Tensor | None, act: Tensor
) -> None:
    """h = x W_gate_up^T [N, 2I], interleaved (None: not wanted), and act = silu(gate) * up [N, I]."""
    library.gemm_act(
        x, w_gate_up.mT, activation="swiglu", preact_out=h, store_preact=h is not None, postact_out=act,
        cu_seqlens_m=starts, A_idx=index, tuned=False, concat_layout=("B",),
    )  # fmt: skip


def down(library: Library, act: Tensor, w_down: Tensor, weights: Tensor | None, starts: Tensor, y: Tensor) -> None:
    """y = act W_down^T [N, H], each row times its float32 weight before it is rounded where weights are given."""
    if weights is None:
        library.gemm(act, w_down.mT, out=y, cu_seqlens_m=starts, tuned=False)
        return
    if y.shape[0] == 0:  # the others look for themselves whether there is nothing to do
        return
    # the epilogue of quack's gemm_norm_act with no activation: x = product * column vector
    scaled = library.norm_act_mod(None, gated=False, has_c=False, has_rowvec=False, has_colvec=True)
    scaled(
        act, w_down.mT, out={"mAuxOut": y}, store_d=False, tuned=False, cu_seqlens_m=starts, mColVecBroadcast=weights
    )


def hidden_grad(
    library: Library, dy: Tensor, w_down: Tensor, h: Tensor, weights: Tensor, starts: Tensor, *,
    dh: Tensor, act: Tensor, need_weights: bool,
) -> Tensor | None:  # fmt: skip
    """With q = dy W_down: dh [N, 2I], interleaved, of da = w q; act = w a [N, I]; d_weights = <q, a> [N], float32."""
    found = library.gemm_dact(
        dy, w_down, h, activation="swiglu", dx_out=dh, postact_out=act, colvec_scale=weights,
        colvec_reduce=need_weights, cu_seqlens_m=starts, tuned=False,
    )  # fmt: skip
    d_weights: Tensor | None = found[2] if need_weights else None
    return d_weights


def row_grad(library: Library, dh: Tensor, w_gate_up: Tensor, starts: Tensor, dx: Tensor) -> None:
    """dx = dh W_gate_up [N, H], of expert rows."""
    library.gemm(dh, w_gate_up, out=dx, cu_seqlens_m=starts, tuned=False, concat_layout=("B",))


def down_grad(library: Library, dy: Tensor, act: Tensor, starts: Tensor, d_down: Tensor) -> None:
    """d_down = dy^T act [L, H, I] over each expert's rows, zero for an expert without rows."""
    library.gemm(dy.T, act, out=d_down, cu_seqlens_k=starts, tuned=False)


def gate_up_grad(
    library: Library, x: Tensor, index: Tensor | None, dh: Tensor, starts: Tensor, d_gate_up: Tensor
) -> None:
    """d_gate_up = dh^T x [L, 2I, H], the gate half first, zero for an expert without rows."""
    if index is None:
        library.gemm(dh.T, x, out=d_gate_up, cu_seqlens_k=starts, tuned=False, concat_layout=("out",))
        return
    if dh.shape[0] == 0:  # x has rows, so quack would start its kernel on an empty dh
        d_gate_up.zero_()
        return
    # quack gathers its first operand only, so this one computes the transpose
    library.gemm(x.T, dh, out=d_gate_up.mT, cu_seqlens_k=starts, A_idx=index, tuned=False, concat_layout=("out",))

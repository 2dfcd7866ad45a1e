"""float32 matrices as sums of bfloat16 ones, for products in the tensor cores that are nearly as exact as float32's.

bfloat16 has 8 significant bits, float32 has 24: x = part 0 + part 1 + part 2, exactly, each part the next 8 bits. A
product of two bfloat16 numbers fits float32, so x @ y with a bfloat16 y is the sum of three such products.
(The idea: G. Henry, P. T. P. Tang, A. Heinecke, arXiv:1904.06376.)

Worked example: 1 + 2^-9 has the parts 1, 2^-9, 0; pattern (0, 1, 0) below each other gives [[1], [2^-9], [1]].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .library import launch
from .registry import register

_TOP_BITS = -(2**16)  # of a float32's word: what a bfloat16 keeps


def split_bfloat16_reference(x: Tensor, pattern: Sequence[int], beside: bool) -> Tensor:
    """Reference of `split_bfloat16`."""
    parts, rest = [], x
    for _ in range(3):
        top = (rest.contiguous().view(torch.int32) & _TOP_BITS).view(torch.float32)
        parts.append(torch.where(rest.isfinite(), top, rest).bfloat16())
        rest = torch.where(rest.isfinite(), rest - top, 0.0)
    return torch.cat([parts[part] for part in pattern], dim=int(beside))


def _split_bfloat16(x: Tensor, pattern: Sequence[int], beside: bool) -> Tensor:
    x, out = x.contiguous(), _fake_split_bfloat16(x, pattern, beside)
    code = sum(part << 2 * i for i, part in enumerate(pattern))
    launch("moe_ep_split_bfloat16", x, x, out, *x.shape, code, len(pattern), beside)
    return out


def _fake_split_bfloat16(x: Tensor, pattern: Sequence[int], beside: bool) -> Tensor:
    rows, columns, copies = *x.shape, len(pattern)
    return x.new_empty((rows, copies * columns) if beside else (copies * rows, columns), dtype=torch.bfloat16)


# x float32 [R, C] -> bfloat16 [n R, C], or beside each other [R, n C]: copy i holds part pattern[i] of x, 0 to 2
split_bfloat16 = register(
    "split_bfloat16(Tensor x, int[] pattern, bool beside) -> Tensor",
    reference=split_bfloat16_reference,
    kernel=_split_bfloat16,
    fake=_fake_split_bfloat16,
)

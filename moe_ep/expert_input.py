"""What a dispatcher hands to the experts of one rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils import _pytree as pytree

from .permute import gather_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertInput:
    """Rows, their weights and their experts, from a dispatcher to the experts of one rank.

    Rows are grouped by local expert ascending, inside an expert by (source rank, source token, k), so that
    results repeat bit for bit.

    Attributes:
        source: [U, H], the received rows, in memory of its own (not a buffer that another micro-batch reuses).
        row_index: int32 [N], expert row n is source[row_index[n]], -1 beyond offsets[L]; None: `source` is already
            grouped and N = U.
        positions: int32 [U, J], the expert rows of each source row, -1 where none; None exactly when row_index is.
        row_weights: float32 [N], differentiable; garbage beyond offsets[L].
        offsets: int32 [L+1] on the device, offsets[0] = 0; expert l owns rows offsets[l] to offsets[l+1].
        tokens_per_expert: int32 [L] on the device.
        capacity: N, at least offsets[L]. Rows beyond offsets[L] are the *tail*: they hold anything, NaN too, and
            nobody may let them reach a sum.
        host_counts: the counts as a tuple of L ints where the dispatcher knows them on the host anyway, else None.
        kernels: whether the package's CUDA kernels may move and compute these rows.
    """

    source: Tensor
    row_weights: Tensor
    offsets: Tensor
    tokens_per_expert: Tensor
    capacity: int
    row_index: Tensor | None = None
    positions: Tensor | None = None
    host_counts: tuple[int, ...] | None = None
    kernels: bool = False

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.tokens_per_expert.shape[0]

    def rows(self) -> Tensor:
        """Expert rows [N, H], expanded once from the unique rows; differentiable in `source`. The tail: anything."""
        if self.row_index is None or self.positions is None:
            return self.source
        bound = self.offsets[-1:]
        return gather_rows(self.source, self.row_index, self.positions, bound=bound, kernels=self.kernels)


pytree.register_dataclass(ExpertInput)  # for FSDP2, see Routing


def split_input(inp: ExpertInput, sizes: Sequence[int]) -> list[ExpertInput]:
    """The input of several sets of experts, `sizes` of them, as one input for each set; rows are expanded once.

    Where the dispatcher has no counts on the host, this reads them. The tail goes to the last set.
    """
    counts = inp.host_counts if inp.host_counts is not None else tuple(inp.tokens_per_expert.tolist())
    ends = list(itertools.accumulate(sizes, initial=0))
    lengths = [sum(counts[first:last]) for first, last in itertools.pairwise(ends)]
    lengths[-1] += inp.capacity - sum(counts)
    rows, weights = inp.rows().split(lengths), inp.row_weights.split(lengths)
    return [
        ExpertInput(
            source=rows[n],
            row_weights=weights[n],
            offsets=inp.offsets[first : last + 1] - inp.offsets[first],
            tokens_per_expert=inp.tokens_per_expert[first:last],
            capacity=lengths[n],
            host_counts=counts[first:last],
            kernels=inp.kernels,
        )
        for n, (first, last) in enumerate(itertools.pairwise(ends))
    ]

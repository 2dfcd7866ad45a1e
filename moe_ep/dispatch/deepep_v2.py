"""DeepEP V2: `deep_ep.ElasticBuffer` inside one NVLink domain, compact or expanded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import DispatchConfig
from ..permute import gather_rows
from .deepep_link import Received
from .deepep_rows import inverse, slot_order

TOKENS_MULTIPLE = 64  # kernels are compiled for one bound of tokens: round it, so that nearby bounds share them


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """V2's handle with the order that its rows are put into: row n is the library's row order[n], places undoes it."""

    handle: Any
    order: Tensor
    places: Tensor
    kernels: bool

    def sort(self, rows: Tensor) -> Tensor:
        """From the library's order to ours."""
        return gather_rows(rows, self.order, self.places.view(-1, 1), kernels=self.kernels)

    def unsort(self, rows: Tensor) -> Tensor:
        """Back."""
        return gather_rows(rows, self.places, self.order.view(-1, 1), kernels=self.kernels)


class V2Link:
    """One `ElasticBuffer`.

    The library's rows stand in order of arrival, another one in each run, and so in the second pass of an activation
    recompute, whose rows meet the handle of the first. So they are put in order, one pass over them each way. (Its own
    `deterministic` form makes two passes, and blocks the host where rows are expanded.) Weights of slots whose id is -1
    arrive as they were; no expert row names them, so neither a value nor a gradient comes of it.
    """

    def __init__(
        self,
        library: Any,
        config: DispatchConfig,
        group: dist.ProcessGroup,
        num_sms: int,
        expand: bool,
        timeout_s: float,
        kernels: bool,
    ) -> None:
        assert config.max_tokens is not None, "no max_tokens"
        self._library, self._group, self._expand, self._num_sms = library, group, expand, num_sms
        self._num_experts, self._kernels = config.num_experts, kernels
        self._max_tokens = -(-config.max_tokens // TOKENS_MULTIPLE) * TOKENS_MULTIPLE
        self._sizes = {
            "num_max_tokens_per_rank": self._max_tokens,
            "hidden": config.hidden_size,
            "num_topk": config.top_k,
            "allow_hybrid_mode": False,
        }
        self._timeouts = {
            "num_cpu_timeout_secs": max(1, int(timeout_s)),
            "num_gpu_timeout_secs": max(1, int(timeout_s)),
        }
        # without a NIC its check for GPU-initiated networking fails, which one NVLink domain does not use (#629)
        os.environ.setdefault("EP_DISABLE_GIN", "1")
        _make_communicator(group)
        self.num_bytes = int(library.ElasticBuffer.get_buffer_size_hint(group, **self._sizes))
        self._buffer: Any = None

    def open(self) -> None:
        """Allocate; its destructor then makes no collective."""
        make = self._library.ElasticBuffer
        self._buffer = make(self._group, **self._sizes, **self._timeouts, explicitly_destroy=True)

    def dispatch(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Received:
        """See `Link`."""
        source, ids, weights, handle, _ = self._buffer.dispatch(
            x_TH,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            num_experts=self._num_experts,
            num_max_tokens_per_rank=self._max_tokens,
            num_sms=self._num_sms,
            do_expand=self._expand,
            do_handle_copy=False,
            do_cpu_sync=True,
        )
        counts, per_expert = tuple(handle.num_recv_tokens_per_expert_list), handle.num_unaligned_recv_tokens_per_expert
        metadata = handle.recv_src_metadata
        if self._expand:
            order = slot_order(metadata[:, 2:], metadata[:, 0], per_expert, sum(counts))
        else:
            order = metadata[:, 0].argsort().int()
        ordered = Ordered(handle=handle, order=order, places=inverse(order), kernels=self._kernels)
        return Received(
            source=ordered.sort(source),
            weights=ordered.sort(weights),
            handle=ordered,
            host_counts=counts,
            counts=per_expert if self._expand else None,
            ids=None if self._expand else ids.index_select(0, order),
        )

    def dispatch_again(self, x_TH: Tensor, handle: Ordered) -> Tensor:
        """See `Link`. SMs are given: the library's own estimate comes before it knows the number of experts."""
        first = handle.handle
        rows = self._buffer.dispatch(
            x_TH, handle=first, num_sms=first.num_sms, do_expand=self._expand, do_handle_copy=False
        )[0]
        return handle.sort(rows)

    def combine(self, rows_UH: Tensor, weights: Tensor | None, handle: Ordered) -> tuple[Tensor, Tensor | None]:
        """See `Link`."""
        first, weights = handle.handle, None if weights is None else handle.unsort(weights)
        rows = handle.unsort(rows_UH)
        y_TH, weights_TK, _ = self._buffer.combine(rows, first, topk_weights=weights, num_sms=first.num_sms)
        return y_TH, weights_TK

    def close(self) -> None:
        """See `Link`; meets the other ranks."""
        if self._buffer is not None:
            self._buffer.destroy()
            self._buffer = None


def _make_communicator(group: dist.ProcessGroup) -> None:
    """The library borrows the group's NCCL communicator, which exists only behind the first collective (#726)."""
    if torch.cuda.is_available():
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)

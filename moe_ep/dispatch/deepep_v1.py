"""DeepEP V1: `deep_ep.Buffer` between GPUs of one host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import DispatchConfig
from .deepep_link import Received

WORKSPACE_BYTES = 32 << 20  # NUM_WORKSPACE_BYTES of configs.cuh


class V1Link:
    """One `Buffer`.

    Received rows stand in the order (source rank, token), whatever arrives first. A handle fixes the number of SMs of
    all later calls along it, so each call gets configurations made here, and the class's global number is left alone.
    """

    def __init__(self, library: Any, config: DispatchConfig, group: dist.ProcessGroup, num_sms: int) -> None:
        self._library, self._group, self._num_experts = library, group, config.num_experts
        num_ranks = group.size()
        with _sms_of(library.Buffer, num_sms):
            self._dispatch_config = library.Buffer.get_dispatch_config(num_ranks)
            self._combine_config = library.Buffer.get_combine_config(num_ranks)
        row_bytes = config.hidden_size * torch.bfloat16.itemsize
        configs = self._dispatch_config, self._combine_config
        self._buffer_bytes = max(one.get_nvl_buffer_size_hint(row_bytes, num_ranks) for one in configs)
        self.num_bytes = self._buffer_bytes + WORKSPACE_BYTES
        self._buffer: Any = None

    def open(self) -> None:
        """Allocate; its destructor then does nothing, which could hang when an exception unwinds one rank."""
        self._buffer = self._library.Buffer(self._group, self._buffer_bytes, 0, explicitly_destroy=True)

    def dispatch(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Received:
        """See `Link`."""
        per_rank, _, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(ids_TK, self._num_experts)
        source, ids, weights, counts, handle, _ = self._buffer.dispatch(
            x_TH,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            config=self._dispatch_config,
        )
        return Received(source=source, weights=weights, handle=handle, host_counts=tuple(counts), ids=ids)

    def dispatch_again(self, x_TH: Tensor, handle: Any) -> Tensor:
        """See `Link`."""
        rows: Tensor = self._buffer.dispatch(x_TH, handle=handle, config=self._dispatch_config)[0]
        return rows

    def combine(self, rows_UH: Tensor, weights: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None]:
        """See `Link`."""
        y_TH, weights_TK, _ = self._buffer.combine(rows_UH, handle, topk_weights=weights, config=self._combine_config)
        return y_TH, weights_TK

    def close(self) -> None:
        """See `Link`; synchronises the device and meets the other ranks."""
        if self._buffer is not None:
            self._buffer.destroy()
            self._buffer = None


@contextlib.contextmanager
def _sms_of(buffer_class: Any, num_sms: int) -> Iterator[None]:
    """The library's tables read a number that belongs to the class; put back what other users of it have set."""
    before = buffer_class.num_sms
    buffer_class.set_num_sms(num_sms)
    try:
        yield
    finally:
        buffer_class.num_sms = before

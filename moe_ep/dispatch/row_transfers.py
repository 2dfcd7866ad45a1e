"""Transfers of rows by collectives of torch.distributed, each with its transpose (see `transfer.Transfer`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Tensors, all_gather, all_to_all, room_for


class AllToAllRows:
    """Rows [S, ...] to the ranks they are for, in rank order; its transpose is itself with the splits swapped.

    A buffer may be longer than its splits' sum: the rows behind are neither sent nor written, and nobody reads them.
    In a group of one rank they stay in the memory that they are in, unless a longer buffer is to come.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, send: list[int], recv: list[int], send_rows: int, recv_rows: int
    ) -> None:
        self.group, self.send, self.recv = group, send, recv
        self.send_rows, self.recv_rows = send_rows, recv_rows

    def forward(self, payload: Tensors) -> tuple[Tensors, list[Any]]:
        """Start sending rows [send_rows, ...]; results [recv_rows, ...]."""
        return self._exchange(payload, self.send, self.recv, self.recv_rows)

    def backward(self, grads: Tensors) -> tuple[Tensors, list[Any]]:
        """Start sending gradients [recv_rows, ...] back; results [send_rows, ...]."""
        return self._exchange(grads, self.recv, self.send, self.send_rows)

    def reduce(self, parts: Tensors) -> Tensors:
        """Nothing to add up."""
        return parts

    def _exchange(self, tensors: Tensors, send: list[int], recv: list[int], rows: int) -> tuple[Tensors, list[Any]]:
        received, works = [], []
        num_sent, num_received = sum(send), sum(recv)
        for tensor in tensors:
            out = room_for(rows, tensor, self.group)
            target = out if num_received == rows else out[:num_received]
            given = tensor if num_sent == tensor.shape[0] else tensor[:num_sent]
            works += all_to_all(target, given, recv, send, self.group)
            received.append(out)
        return tuple(received), works


class GatherRows:
    """All-gather of equally long [C, ...] blocks to [R*C, ...]; the transpose sums the ranks' gradients.

    The sum is a reduce-scatter, done as an equal all-to-all and a local sum in float32, rank ascending, rounded once:
    NCCL's own reduce-scatter adds bfloat16 in bfloat16, in an order that is the library's.
    """

    def __init__(self, group: dist.ProcessGroup | None, num_ranks: int, block: int) -> None:
        self.group, self.num_ranks, self.block = group, num_ranks, block

    def forward(self, payload: Tensors) -> tuple[Tensors, list[Any]]:
        """Start gathering blocks [C, ...]; results [R*C, ...]."""
        gathered, works = [], []
        for tensor in payload:
            out = room_for(self.num_ranks * self.block, tensor, self.group)
            works += all_gather(out, tensor, self.group)
            gathered.append(out)
        return tuple(gathered), works

    def backward(self, grads: Tensors) -> tuple[Tensors, list[Any]]:
        """Start sending each rank the gradients [C, ...] of its block; results [R*C, ...], one part a rank."""
        even = [self.block] * self.num_ranks
        return AllToAllRows(self.group, even, even, sum(even), sum(even)).forward(grads)

    def reduce(self, parts: Tensors) -> Tensors:
        """Sum the ranks' parts."""
        return tuple(self._sum(part) for part in parts)

    def _sum(self, part: Tensor) -> Tensor:
        if self.num_ranks == 1:
            return part
        blocks = part.view(self.num_ranks, self.block, *part.shape[1:])
        wide = torch.float64 if part.dtype == torch.float64 else torch.float32
        total = blocks[0].to(wide)
        for block in blocks[1:]:
            total = total + block
        return total.to(part.dtype)

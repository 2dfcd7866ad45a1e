"""Memory of this rank that the other GPUs of one host write: allocated once, zeroed, mapped by every rank."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..alarm_registry import find_alarm
from ..errors import Unavailable, lost_peer


class PeerMemory:
    """One block of bytes a rank, readable and writable by all ranks of a group.

    Collective to construct: every rank allocates, maps the others' blocks, zeroes its own, and goes on when all have.
    Multicast objects are not made: nothing here needs them.

    Args:
        num_bytes: the same on all ranks.
        group: ranks on one host, each on a GPU of its own (see `preflight`); None: this rank alone.
        device: this rank's GPU.
        stop_at: byte offset of a uint32 that ends waits of kernels where it is not 0; see `stop`.
        advice: what to do where memory is short, for the message.

    Attributes:
        addresses: of every rank's block in this process, in rank order.

    Raises:
        Unavailable: the GPUs cannot be mapped, or memory is short; with what CUDA said.
        PeerError: another rank did not come.
    """

    def __init__(
        self,
        num_bytes: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        stop_at: int,
        advice: str = "lower max_tokens, or take another dispatcher",
    ) -> None:
        self.num_bytes = num_bytes
        self._handle: Any = None
        self._words: list[Tensor] = []  # of all ranks, at stop_at
        if group is None or group.size() == 1:
            self._block: Tensor | None = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self.addresses = [self._block.data_ptr()]
            return
        self._block, self._handle = _map(num_bytes, group, device, advice)
        self.addresses = list(self._handle.buffer_ptrs)
        self._block.zero_()
        torch.cuda.synchronize(device)
        try:
            dist.barrier(group)  # nobody writes before everybody has zeroed
        except RuntimeError as err:
            raise lost_peer("set-up of peer memory", err) from err
        self._prepare_stop(stop_at, group, device)

    def _prepare_stop(self, at: int, group: dist.ProcessGroup, device: torch.device) -> None:
        # all that `stop` needs is made now: later the device may be busy, or out of memory
        self._words = [self._handle.get_buffer(rank, (1,), torch.int32, at // 4) for rank in range(group.size())]
        self._said, self._stream = torch.zeros(1, dtype=torch.int32, pin_memory=True), torch.cuda.Stream(device)
        if (alarm := find_alarm(group)) is not None:
            alarm.end_waits_with(self.stop)

    def stop(self, word: int) -> None:
        """Have the kernels of all ranks leave that wait on this memory, now and from now on; on any thread.

        Written by copies on a stream of their own, for which no kernel has to end. Nobody waits for them here.

        Args:
            word: not 0.
        """
        if not self._words:
            return
        self._said.fill_(word)
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            for there in self._words:
                there.copy_(self._said, non_blocking=True)

    def part(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in this rank's own block, from byte `at` on."""
        assert self._block is not None, "a part of a closed block"
        return self._block[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def part_of(self, rank: int, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The same part of another rank's block, mapped here."""
        assert self._handle is not None and at % dtype.itemsize == 0, "other ranks, and a place of whole elements"
        found: Tensor = self._handle.get_buffer(rank, shape, dtype, at // dtype.itemsize)
        return found

    def close(self) -> None:
        """Let go of this rank's block and of the mappings. Nothing may run on them any more."""
        self._words, self._block, self._handle = [], None, None


def _map(num_bytes: int, group: dist.ProcessGroup, device: torch.device, advice: str) -> tuple[Tensor, Any]:
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # read when blocks are mapped
    import torch.distributed._symmetric_memory as symm_mem

    try:
        block = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
        return block, symm_mem.rendezvous(block, group)
    except RuntimeError as err:
        mib = num_bytes / 2**20
        raise Unavailable(f"{mib:.0f} MiB of peer memory cannot be had on {device}: {err}; {advice}") from err

"""Memory of this rank that the other GPUs of one host write: allocated once, zeroed, mapped by every rank."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import Unavailable, lost_peer


class PeerMemory:
    """One block of bytes a rank, readable and writable by all ranks of a group.

    Collective to construct: every rank allocates, maps the others' blocks, zeroes its own, and goes on when all have.
    Multicast objects are not made: nothing here needs them.

    Args:
        num_bytes: the same on all ranks.
        group: ranks on one host, each on a GPU of its own (see `preflight`); None: this rank alone.
        device: this rank's GPU.
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
        advice: str = "lower max_tokens, or take another dispatcher",
    ) -> None:
        self.num_bytes = num_bytes
        self._handle: Any = None
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

    def part(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in this rank's own block, from byte `at` on."""
        assert self._block is not None, "a part of a closed block"
        return self._block[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def close(self) -> None:
        """Let go of this rank's block and of the mappings. Nothing may run on them any more."""
        self._block, self._handle = None, None


def _map(num_bytes: int, group: dist.ProcessGroup, device: torch.device, advice: str) -> tuple[Tensor, Any]:
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # read when blocks are mapped
    import torch.distributed._symmetric_memory as symm_mem

    try:
        block = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
        return block, symm_mem.rendezvous(block, group)
    except RuntimeError as err:
        mib = num_bytes / 2**20
        raise Unavailable(f"{mib:.0f} MiB of peer memory cannot be had on {device}: {err}; {advice}") from err

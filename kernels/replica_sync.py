"""Weights into the slots of replicas and gradients out of them, over peer memory. CUDA only; one launch an operation.

    push   masters [L, ...] of every rank -> the slots that the plan gives them, on all ranks
    pull   float32 slots of all ranks added to their masters' gradients, home first, then by rank; used slots zeroed

Every rank launches every operation, in the same order and on one stream, also with nothing to send. Both end behind
their exit fence: my slots are filled, or have been read (which is told piece by piece, so that zeroing goes on
meanwhile). A rank that does not come within the timeout is a fault in the sticky record, from where on nobody waits;
slots that somebody may still read are not zeroed then.

Peer memory is one block a rank, laid out alike on all of them (`SlotShape.layout`), zeroed before its first use.

Worked example. Two ranks, an expert and a slot each, instances [[-1], [0]]: a push copies rank 0's master to rank 1's
slot and touches nothing else. A pull adds rank 1's slot to rank 0's gradient and zeroes it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .build import KernelError
from .direct_types import MAX_RANKS, Domain, PeerLayout
from .library import launch, library

MAX_PARTS = 8  # kMaxParts of replica_sync.cuh
MAX_INSTANCES = 8192  # kMaxInstances
UNIT = 16  # bytes
DEFAULT_BLOCKS = 32  # 12 warps of 2 KiB in flight each: 768 KiB, which is 2 us of a link
PIECE_UNITS = 1024  # kPieceUnits: what one warp moves at a time
_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


class Slots(ctypes.Structure):
    """Slots of replica_sync.cuh."""

    _fields_ = [
        ("masters", _P * MAX_PARTS),
        ("slots_at", _L * MAX_PARTS),
        ("part_units", _L * MAX_PARTS),
        ("read_at", _L),
        ("instances", _P),
        *((name, _I) for name in ("num_parts", "num_slots")),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotShape:
    """Sizes that all ranks share.

    Attributes:
        num_ranks, num_local, slots: R, L, S.
        parts: of each parameter of an expert, its elements and its dtype's bytes; gradients have 4 bytes an element.
    """

    num_ranks: int
    num_local: int
    slots: int
    parts: tuple[tuple[int, int], ...]

    def refusal(self) -> str | None:
        """Why the kernels cannot serve these sizes, None where they can."""
        odd = [(n, size) for n, size in self.parts if n * size % UNIT or n * 4 % UNIT]
        if odd:
            return f"a parameter of {odd[0][0]} elements of {odd[0][1]} bytes does not fill whole {UNIT}-byte units"
        if len(self.parts) > MAX_PARTS:
            return f"an expert has {len(self.parts)} parameters, and at most {MAX_PARTS} are moved"
        if self.num_ranks > MAX_RANKS:
            return f"{self.num_ranks} ranks are more than the {MAX_RANKS} of one NVLink domain"
        if self.num_local >= 1 << 15 or self.num_ranks * self.slots > MAX_INSTANCES:
            return (
                f"{self.num_local} experts and {self.slots} slots on {self.num_ranks} ranks are more than can be listed"
            )
        return None

    def layout(self) -> tuple[PeerLayout, int, list[int], list[int], int]:
        """Byte offsets in peer memory: flags of fences, of pieces, each part's slots, their gradients; and its size."""
        pieces = sum(-(-n * 4 // (UNIT * PIECE_UNITS)) for n, _ in self.parts)
        sizes = [4 * self.num_ranks] * 2 + [4, 4 * self.slots * pieces]
        sizes += [self.slots * n * b for n, b in self.parts]
        sizes += [self.slots * n * 4 for n, _ in self.parts]
        starts, at = [], 0
        for size in sizes:
            starts.append(at)
            at += -(-size // 256) * 256  # parts that different ranks write share no line
        middle = 4 + len(self.parts)
        flags = PeerLayout(ready=starts[0], arrived=starts[1], stop=starts[2])
        return flags, starts[3], starts[4:middle], starts[middle:], at


class SlotPeers:
    """One rank's end: peer memory as mapped here, its epoch, its launches.

    Args:
        shape: the same on all ranks.
        rank: of this end.
        memory: address of every rank's peer memory in this process, in rank order.
        device: this rank's GPU.
        code_lost: fault code of a rank that did not come.
        fault: int64 [] on the device, the sticky record: code << 56 | value.
        timeout_s: after which a rank that does not come is a fault; nothing waits longer.
        blocks: thread blocks of a launch; few, since both run beside the experts' products.

    Raises:
        KernelError: sizes that the kernels do not serve, a library that does not fit this file, or none to be had.
    """

    def __init__(
        self,
        shape: SlotShape,
        rank: int,
        memory: Sequence[int],
        device: torch.device,
        *,
        code_lost: int,
        fault: Tensor,
        timeout_s: float,
        blocks: int = DEFAULT_BLOCKS,
    ) -> None:
        if (why := shape.refusal()) is not None:
            raise KernelError(f"replicas cannot be moved by kernels: {why}")
        _check_sizes(device.index)
        self.shape, self.rank = shape, rank
        flags, self._read_at, self._weights_at, self._grads_at, _ = shape.layout()
        self._epoch, self._fault = torch.zeros(3, dtype=torch.int32, device=device), fault
        self.blocks = blocks
        self._domain = Domain(
            memory=(ctypes.c_void_p * MAX_RANKS)(*memory),
            at=flags,
            rank=rank,
            num_ranks=shape.num_ranks,
            num_experts=shape.num_ranks * shape.num_local,
            num_local=shape.num_local,
            timeout_ns=int(timeout_s * 1e9),
            epoch=self._epoch.data_ptr(),
            fault=fault.data_ptr(),
            code_lost=code_lost,
        )

    def push(self, instances: Tensor, masters: Sequence[Tensor]) -> None:
        """Copy masters into all ranks' slots.

        Args:
            instances: int32 [R, S'] of the plan, S' <= S.
            masters: [L, ...] each, contiguous.
        """
        units = [n * size // UNIT for n, size in self.shape.parts]
        self._launch("moe_ep_replica_push", instances, masters, self._weights_at, units, self.shape.num_local)

    def pull(self, instances: Tensor, totals: Sequence[Tensor]) -> None:
        """Add all ranks' gradients of replicas to float32 [L', ...] each, contiguous; zero the slots used here.

        L' <= L: the experts that `instances` count on each rank, home * L + number with number < L'.
        """
        units = [n * 4 // UNIT for n, _ in self.shape.parts]
        self._launch("moe_ep_replica_pull", instances, totals, self._grads_at, units, len(totals[0]))

    def _launch(
        self,
        name: str,
        instances: Tensor,
        tensors: Sequence[Tensor],
        at: Sequence[int],
        units: Sequence[int],
        num_experts: int,
    ) -> None:
        instances = instances.contiguous()
        if num_experts > self.shape.num_local:
            raise KernelError(f"{name} moves {self.shape.num_local} experts of a rank, got {num_experts}")
        wanted = [(num_experts * n * UNIT, tensor) for n, tensor in zip(units, tensors, strict=True)]
        for num_bytes, tensor in wanted:
            if tensor.nbytes != num_bytes or not tensor.is_contiguous() or tensor.data_ptr() % UNIT:
                raise KernelError(
                    f"{name} takes {num_bytes} bytes in a row from an address that {UNIT} divides, got "
                    f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; hand in a contiguous tensor"
                )
        task = Slots(
            masters=(_P * MAX_PARTS)(*(tensor.data_ptr() for tensor in tensors)),
            slots_at=(_L * MAX_PARTS)(*at),
            part_units=(_L * MAX_PARTS)(*units),
            read_at=self._read_at,
            instances=instances.data_ptr(),
            num_parts=len(units),
            num_slots=instances.shape[1],
        )
        launch(name, self._epoch, ctypes.byref(self._domain), ctypes.byref(task), self.blocks)


@functools.cache
def _check_sizes(index: int) -> None:
    """Refuse a library whose struct or pieces differ from the ones here."""
    theirs = (_I * 2)()
    library(index).plain("moe_ep_replica_sizes")(theirs)
    if list(theirs) != [ctypes.sizeof(Slots), PIECE_UNITS]:
        raise KernelError(f"the kernel library's sizes are {list(theirs)}, this file's differ; rebuild it")

"""Replicas over peer memory: two kernels in the place of messages, for the GPUs of one NVLink domain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..dispatch.peer_memory import PeerMemory
from ..dispatch.preflight import preflight
from ..dispatch.watchdog import group_timeout_s
from ..errors import InputError
from ..faults import Fault, FaultRecord
from ..kernels.library import missing
from ..kernels.replica_sync import DEFAULT_BLOCKS, SlotPeers, SlotShape
from ..streams import comm_stream
from .messages import GroupTransport, ended, launched
from .plan import Plan
from .transport import InFlight, SlotBuffers, Tensors


class PeerSlots(SlotBuffers):
    """Slots that lie in peer memory."""

    def __init__(self, weights: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        self.weights, self.grads = tuple(weights), tuple(grads)


class PeerTransport(GroupTransport):
    """Pushes weights and pulls gradients with kernels. The plan is read on the device alone: no host sync.

    Both operations run on the group's comm stream, so ranks must make them in one order with the dispatches and
    combines of that group. Slots lie in peer memory: use `buffers`, no tensors of your own; two micro-batches in flight
    need two transports. A rank that does not come is a fault in the record, which whoever reads the loss raises.

    Args:
        group: ranks on one host, each on a GPU of its own. Collective to construct.
        slots: S.
        like: the masters [L, ...] of any layer, on this rank's GPU.
        record: where faults go.
        blocks: thread blocks of a launch.

    Attributes:
        buffers: weights [S, ...] for each parameter, of its dtype, and float32 gradients; zero.

    Raises:
        Unavailable: no kernels, no peer memory, or sizes that do not fill 16-byte units; on every rank.
        PeerError: the ranks differ.
    """

    reads_plan: ClassVar[bool] = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        slots: int,
        like: Sequence[Tensor],
        record: FaultRecord,
        *,
        blocks: int = DEFAULT_BLOCKS,
    ) -> None:
        super().__init__(group)
        device, what = like[0].device, "replicas over peer memory"
        parts = tuple((master[0].numel(), master.element_size()) for master in like)
        shape = SlotShape(num_ranks=self.num_ranks, num_local=like[0].shape[0], slots=slots, parts=parts)
        preflight(what, {"slots and parameters": (slots, parts)}, _reasons(shape, like[0]), group, one_host=True)
        flags, _, weights_at, grads_at, num_bytes = shape.layout()
        advice = "use fewer slots, or another transport"
        self._memory = PeerMemory(num_bytes, group, device, stop_at=flags.stop, advice=advice)
        dtypes = [master.dtype for master in like]
        sizes = [(slots, *master.shape[1:]) for master in like]
        self.own_slots = self.buffers = PeerSlots(
            [self._memory.part(at, n, dtype) for at, n, dtype in zip(weights_at, sizes, dtypes, strict=True)],
            [self._memory.part(at, n, torch.float32) for at, n in zip(grads_at, sizes, strict=True)],
        )
        self._record = record  # holds the word that the kernels write to
        self._peers = SlotPeers(
            shape,
            self.rank,
            self._memory.addresses,
            device,
            code_lost=int(Fault.LOST),
            fault=record.word,
            timeout_s=group_timeout_s(group, device),
            blocks=blocks,
        )
        self._comm = comm_stream(device, group)

    def close(self) -> None:
        """Free the peer memory; all ranks must be through with their work."""
        torch.cuda.synchronize(self._comm.device)
        self.buffers.weights = self.buffers.grads = ()
        self._memory.close()

    def _push(self, plan: Plan, masters: Tensors, slots: Tensors) -> InFlight:
        self._own(slots, self.buffers.weights)
        return self._run("weight_sync", plan, masters, self._peers.push)

    def _pull(self, plan: Plan, slot_grads: Tensors, master_grads: Tensors) -> InFlight:
        self._own(slot_grads, self.buffers.grads)
        return self._run("grad_reduce", plan, master_grads, self._peers.pull)

    def _run(self, name: str, plan: Plan, tensors: Tensors, fn: Callable[[Tensor, Tensors], None]) -> InFlight:
        def issue() -> tuple[tuple[Tensor, ...], list[object]]:
            fn(plan.instances, tensors)
            return (), []

        flight = launched(self._comm, self.named(name), issue, (plan.instances, *tensors))
        return InFlight(lambda: ended(flight.wait()))

    def _own(self, slots: Tensors, own: Tensors) -> None:
        """Refuse slots that the other ranks cannot reach."""
        if [slot.data_ptr() for slot in slots] != [slot.data_ptr() for slot in own]:
            raise InputError("slots must lie in peer memory; use the transport's own buffers as slots")


def _reasons(shape: SlotShape, master: Tensor) -> list[str]:
    if not master.is_cuda:
        return [f"the masters are on {master.device}, and kernels need a GPU; take another transport"]
    if master.dtype == torch.float64:
        return ["the masters are torch.float64, and kernels add gradients in float32; take another transport"]
    reasons = [f"{why}; take another transport"] if (why := shape.refusal()) is not None else []
    if (why := missing(torch.cuda.current_device())) is not None:
        reasons.append(f"its kernels are not to be had: {why}")
    return reasons

"""The small collectives of a replica plan: every rank's load to every rank, and a hash of what each made of it.

They travel in the process group and on the stream of the counts, so that they do not stand in line behind rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..alarm import Alarm
from ..alarm_registry import include
from ..dispatch.collectives import all_gather
from ..dispatch.twin import open_twin
from ..errors import PeerError, PlanError
from ..fault_words import routing_status
from ..faults import NUM_WORDS, Fault, place_of, raise_faults
from ..load import expert_load
from ..order import told
from ..peers import is_out_of_step, mark_everywhere
from ..routing import Routing
from ..streams import comm_stream


class Exchange:
    """One rank's end.

    Args:
        group: the expert-parallel ranks. Collective to construct.
        num_experts: E.
        alarm: of the group.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int, alarm: Alarm | None) -> None:
        self.group, self.num_experts, self._alarm = group, num_experts, alarm
        self._twin = open_twin(group, "counts")
        if alarm is not None and self._twin is not None:
            include(alarm, self._twin)

    def message(
        self, routing: Routing, layer: int, micro_batch: int, num_micro_batches: int, *, trained: bool
    ) -> Tensor:
        """Load, whether this rank trains its experts, fault and place of one micro-batch, int64 [E+4]."""
        load_E, place = (
            expert_load(routing.expert_ids, self.num_experts),
            place_of(layer, micro_batch, num_micro_batches),
        )
        trains, at = (routing.expert_ids.new_full((1,), value) for value in (int(trained), place))
        return torch.cat([load_E, trains, routing_status(routing), at])

    def failure(self, device: torch.device, layer: int, micro_batch: int) -> Tensor:
        """The message of a rank that fails before it has a routing."""
        words = [int(Fault.BAD_INPUT), 0, place_of(layer, micro_batch)]
        return torch.tensor([0] * (self.num_experts + 1) + words, device=device)

    def gather(self, what: str, message: Tensor) -> Tensor:
        """Everybody's message, [R, n] on its device. Collective.

        Raises:
            PeerError: another rank failed, or did not come in time.
        """
        everybody = message.new_empty((self.group.size(), message.numel()))
        comm = comm_stream(message.device, self._twin, early=True)

        def exchange() -> tuple[tuple[Tensor, ...], list[object]]:
            return (everybody,), all_gather(everybody.view(-1), message, comm.group)

        comm.launch(what, exchange, keep=(message,)).wait()
        return everybody

    def check(self, gathered: Tensor, where: str) -> None:
        """Raise what any rank's message says is wrong. `gathered` [R, E+4] on the host.

        Raises:
            InputError, NonFiniteError: a fault of this rank. PeerError: one of another rank, or ranks that are not at
                the same micro-batch.
        """
        words = gathered[:, -NUM_WORDS:].tolist()
        try:
            rank = self.group.rank()
            raise_faults(words, rank, where, self.num_experts, place=words[rank][2])
        except PeerError as err:
            told(err, self.group)
            if self._alarm is not None and is_out_of_step(err):
                self._alarm.stop_all(err, where)
            mark_everywhere(err)
            raise


def check_sums(sums: Sequence[int], where: str) -> None:
    """See that all ranks made the same plan.

    Raises:
        PlanError: on every rank, naming those that differ from rank 0.
    """
    odd = [rank for rank, value in enumerate(sums) if value != sums[0]]
    if odd:
        error = PlanError(
            f"{where}: the replica plans of ranks {odd} differ from rank 0's; all ranks must plan from the same load, "
            "with the same slots, smallest quota and planner, and the same version of moe_ep"
        )
        mark_everywhere(error)
        raise error


def sums_status(sums_R: Tensor) -> Tensor:
    """The same for a fault record: (code, first rank that differs), int64 [2], without a host sync."""
    differs = sums_R != sums_R[0]
    code = torch.where(differs.any(), int(Fault.OTHER_PLAN), int(Fault.NONE))
    return torch.stack([code, differs.to(torch.int64).argmax()])

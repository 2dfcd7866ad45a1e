"""Which transport replicas travel by: the one that was asked for, or the best one that all ranks have."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import ReplicaTransport
from ..errors import PeerError, Unavailable
from ..faults import FaultRecord
from .messages import GroupTransport
from .transport import Transport


def make_transport(
    kind: ReplicaTransport,
    group: dist.ProcessGroup,
    slots: int,
    like: Sequence[Tensor],
    faults: Callable[[torch.device], FaultRecord],
) -> Transport:
    """This rank's end. Collective; all ranks get the same kind.

    Args:
        kind: "auto" is "peer" on GPUs where every rank can, and says so where one cannot; "messages" on a CPU.
        group: the expert-parallel ranks.
        slots: S.
        like: masters [L, ...] of any layer.
        faults: the record of a device.

    Raises:
        Unavailable: "peer" where it cannot be. PeerError: another rank cannot.
    """
    device = like[0].device
    if kind == "messages" or (kind == "auto" and device.type != "cuda"):
        return GroupTransport(group)
    from .peer_transport import PeerTransport  # it needs the kernels

    try:
        return PeerTransport(group, slots, like, faults(device))
    except (Unavailable, PeerError) as err:  # on all ranks
        if kind == "peer":
            raise
        if group.rank() == 0:
            warnings.warn(f"replicas travel by messages, with two host syncs each: {err}", RuntimeWarning, stacklevel=2)
        return GroupTransport(group)

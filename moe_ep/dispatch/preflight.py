"""What ranks must have in common before a back end over a GPU library allocates anything.

One small exchange of Python values at construction. What would otherwise be a hang, a segmentation fault or a bare
assertion deep inside a library is a sentence on every rank.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import PeerError, Unavailable, lost_peer
from .agreement import agree

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs.

    Attributes:
        host: the same for two ranks exactly when they share a running kernel; names no machine.
        device: what tells the ranks' GPUs apart on one host; "" without a GPU.
        index: CUDA index in the rank's own numbering, -1 without a GPU.
    """

    host: str
    device: str
    index: int


def own_place() -> Place:
    """This rank's place, with its current CUDA device where there is one."""
    boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else str(uuid.getnode())
    host = hashlib.sha256(boot.encode()).hexdigest()[:12]
    if not torch.cuda.is_available():
        return Place(host, "", -1)
    index = torch.cuda.current_device()
    return Place(host, str(torch.cuda.get_device_properties(index).uuid), index)


def preflight(
    what: str,
    equal: Mapping[str, Any],
    reasons: Sequence[str],
    group: dist.ProcessGroup,
    *,
    one_host: bool = False,
) -> list[Place]:
    """Every rank goes on, or every rank raises before anything is allocated. Collective over the group.

    Args:
        what: what the ranks are about to build, for messages, such as "dispatcher 'deepep'".
        equal: what must be equal on all ranks: bounds, sizes, dtype, versions of libraries. Compared key by key.
        reasons: why this rank cannot go on; empty: it can.
        group: of the ranks concerned.
        one_host: whether the back end needs all ranks on one host, each with a GPU of its own that reaches the others.

    Returns:
        the places of all ranks.

    Raises:
        PeerError: the ranks differ, or another one cannot go on; names key, values and ranks.
        Unavailable: this rank cannot go on; or the places do not suit.
    """
    error = Unavailable(f"{what} cannot run here: {'; '.join(reasons)}") if reasons else None
    agree(what, equal, error, group)
    places = _gather_places(what, group)
    problem = place_problem(places, torch.cuda.device_count(), overlapping=_may_overlap()) if one_host else None
    agree(what, {}, None if problem is None else Unavailable(f"{what} cannot run here: {problem}"), group)
    return places


def _gather_places(what: str, group: dist.ProcessGroup) -> list[Place]:
    places: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(places, own_place(), group=group)
    except RuntimeError as err:
        raise lost_peer(f"preflight of {what}", err) from err
    if not all(isinstance(place, Place) for place in places):
        raise PeerError(f"preflight of {what}: the ranks run different versions of moe_ep; install one")
    return places


def _may_overlap() -> bool:
    # torch's own switch, without which its symmetric memory refuses two ranks on a GPU as well
    return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"


def place_problem(places: Sequence[Place], num_visible: int, *, overlapping: bool = False) -> str | None:
    """Why ranks at these places cannot read and write each other's GPU memory, None where nothing speaks against it.

    Peer access is asked for only where this rank sees all the GPUs (num_visible of them); where each rank sees its
    own alone, the library finds out. `overlapping`: ranks may share a GPU, which is slow, and meant for tests.
    """
    hosts = [place.host for place in places]
    if len(set(hosts)) > 1:
        return f"its ranks must share one host, and they are on {len(set(hosts))}; take ep_size = the GPUs of a host"
    owners: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        owners.setdefault(place.device, []).append(rank)
    shared = [ranks for device, ranks in owners.items() if len(ranks) > 1 and device]
    if shared and not overlapping:
        return (
            f"ranks {', '.join(map(str, shared[0]))} use the same GPU; give each rank its own "
            "(torch.cuda.set_device(local rank) before the process group)"
        )
    indices = [place.index for place in places]
    if len(set(indices)) == len(indices) and all(0 <= index < num_visible for index in indices):
        for i in indices:
            for j in indices:
                if i != j and not torch.cuda.can_device_access_peer(i, j):
                    return f"GPU {i} has no peer access to GPU {j}; take GPUs joined by NVLink or another dispatcher"
    return None

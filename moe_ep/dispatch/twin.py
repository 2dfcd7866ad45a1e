"""Further process groups of the same ranks, with communicators and settings of their own.

One is for what the host waits for, so that it does not stand behind rows on their way; one for rows, where their
collectives may use a few SMs only.

torch makes groups by `new_group`, which all ranks of the job have to call. With `use_local_synchronization` the members
do, but then the name comes from the ranks and from how many groups this rank knows, which need not be as many on all of
them, and with a bound device the communicator is split off the job's, again by all ranks. A layer is built by one
expert-parallel group alone. So a twin is made here from the back ends' own classes, in a corner of the group's store
that rank 0 names. torch knows nothing of it, and whoever opened it closes it.
"""

from __future__ import annotations

import atexit
import uuid
from typing import Any

import torch.distributed as dist

from ..errors import lost_peer

MAX_CTAS = 64  # NCCL's user guide on ncclConfig_t and NCCL_MAX_CTAS
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]
_twins: dict[tuple[dist.ProcessGroup, str], dist.ProcessGroup] = {}


def open_twin(group: dist.ProcessGroup | None, purpose: str, *, num_sms: int | None = None) -> dist.ProcessGroup | None:
    """The twin of `group` for a purpose, made at the first call; collective over `group`.

    Args:
        group: None, or a group of one rank: there is nobody to talk to, and the group itself is returned.
        purpose: a name for it; each purpose has a twin of its own.
        num_sms: thread blocks of each of its collectives under NCCL, one an SM; None: NCCL decides.

    Returns:
        a group of the same ranks, devices and timeout; `group` itself where one of its back ends is neither gloo nor
        NCCL and cannot be made again here.

    Raises:
        PeerError: another rank did not come within the group's timeout.
    """
    if group is None or group.size() == 1:
        return group
    if (group, purpose) not in _twins:
        if not _twins:
            atexit.register(_close_all)
        try:
            _twins[group, purpose] = _make(group, purpose, num_sms)
        except RuntimeError as err:
            raise lost_peer(f"making of a process group for {purpose}", err) from err
    return _twins[group, purpose]


def close_twins(group: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    """Shut the twins of a group down; they must be idle. Local. Returns them."""
    keys = [key for key in _twins if key[0] is group]
    closed = [_twins.pop(key) for key in keys]
    for twin in closed:
        if twin is not group:
            twin.shutdown()
    return closed


def _close_all() -> None:
    for (group, _), twin in _twins.items():
        if twin is not group:
            twin.abort()  # at exit, without waiting: peers may be gone


def _make(group: dist.ProcessGroup, purpose: str, num_sms: int | None) -> dist.ProcessGroup:
    names: list[str | None] = [None] * group.size()
    dist.all_gather_object(names, uuid.uuid4().hex, group=group)
    store = _PrefixStore(f"moe_ep/{names[0]}/", group.get_group_store())
    twin = dist.ProcessGroup(store, group.rank(), group.size())
    made: dict[str, tuple[Any, Any] | None] = {}
    for device in group._device_types:
        backend = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
        kind = backend.name()
        if kind not in made:
            made[kind] = _like(kind, backend, _PrefixStore(f"{kind}/", store), group, num_sms)
        one = made[kind]
        if one is None:
            return group
        twin._set_default_backend(one[0])
        twin._register_backend(device, *one)
    twin._set_group_name(f"moe_ep_{purpose}_{names[0]}")  # type: ignore[arg-type]
    twin._set_group_desc(f"moe_ep {purpose}")
    return twin


def _like(kind: str, backend: Any, store: Any, group: dist.ProcessGroup, num_sms: int | None) -> tuple[Any, Any] | None:
    """Type and object of a back end of a kind with another one's timeout; None: the kind is not known here."""
    types = dist.ProcessGroup.BackendType
    if kind not in ("gloo", "nccl"):
        return None
    rank, size, timeout = group.rank(), group.size(), backend.options._timeout
    if kind == "gloo":
        return types.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options._timeout = timeout
    if num_sms is not None:
        options.config.min_ctas = options.config.max_ctas = num_sms
    options.global_ranks_in_group = dist.get_process_group_ranks(group)
    made = dist.ProcessGroupNCCL(store, rank, size, options)
    made._set_sequence_number_for_group()
    return types.NCCL, made


def back_ends_of(group: dist.ProcessGroup) -> set[str]:
    """Names of a group's back ends, such as {"gloo"}."""
    return {group._get_backend(device).name() for device in group._device_types}


def collective_sms_reasons(num_sms: int | None, group: dist.ProcessGroup | None) -> list[str]:
    """Why the SMs of a group's collectives cannot be limited to a number; empty: they can, or nobody asks for it."""
    if num_sms is None:
        return []
    idle = f"so num_sms = {num_sms} would have no effect; leave it unset"
    if group is None or group.size() == 1:
        return [f"nothing travels on one rank, {idle}"]
    kinds = back_ends_of(group)
    if "nccl" not in kinds:
        return [f"its rows travel by {', '.join(sorted(kinds))}, which uses no SMs, {idle}"]
    if num_sms > MAX_CTAS:
        return [
            f"num_sms = {num_sms} is more than the {MAX_CTAS} thread blocks that NCCL gives one collective; lower it"
        ]
    return []

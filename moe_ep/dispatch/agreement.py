"""One small exchange at construction, so that ranks that differ get a message and not a hang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ..errors import InputError, MoEError, PeerError, lost_peer


def agree(what: str, values: Mapping[str, Any], error: MoEError | None, group: dist.ProcessGroup | None) -> None:
    """Every rank learns what every other one was given and why it cannot go on; all raise or none does. Collective.

    Args:
        what: what the values configure, for the message.
        values: must be equal on all ranks; compared key by key.
        error: what keeps this rank from going on, or None.
        group: None: one rank, no collective.

    Raises:
        PeerError: the ranks differ (each difference named, the same message everywhere), another rank has an error, or
            did not come within the group's timeout.
        InputError: `group` is no process group, or this rank is not in it.
        MoEError: this rank's own error.
    """
    check_group(group)
    if group is not None and group.size() > 1:
        everybody: list[Any] = [None] * group.size()
        mine = (dict(values), None if error is None else str(error))
        try:
            dist.all_gather_object(everybody, mine, group=group)
        except RuntimeError as err:
            raise lost_peer(f"agreement about {what}", err) from err
        differences = _differences([given for given, _ in everybody])
        if differences:
            raise PeerError(
                f"the ranks disagree about {what}: {'; '.join(differences)}. Give all ranks the same recipe and "
                "the same software"
            )
        if error is None:
            _raise_peer_error(what, [text for _, text in everybody])
    if error is not None:
        raise error


def check_group(group: dist.ProcessGroup | None) -> None:
    """Raise InputError unless `group` is None or a process group that this rank belongs to."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InputError(
            "this rank is not in the expert-parallel group that it was given; pass each rank its own group"
        )
    raise InputError(f"the expert-parallel group must be a ProcessGroup or None, got {type(group).__name__}")


def _differences(given: list[dict[str, Any]]) -> list[str]:
    keys = sorted({key for values in given for key in values})
    found = []
    for key in keys:
        ranks: dict[str, list[int]] = {}
        for rank, values in enumerate(given):
            ranks.setdefault(repr(values.get(key)), []).append(rank)
        if len(ranks) > 1:
            found.append(f"{key} is " + ", ".join(f"{value} on rank {_spell(who)}" for value, who in ranks.items()))
    return found


def _spell(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


def _raise_peer_error(what: str, texts: list[str | None]) -> None:
    for rank, text in enumerate(texts):
        if text is not None:
            raise PeerError(f"rank {rank} cannot go on with {what}: {text}")

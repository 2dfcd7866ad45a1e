"""A check for values that every rank holds a copy of: which of them are no longer the same, bit for bit, and where.

A gradient that is not reduced, or reduced on some ranks only, lets copies of a router drift apart while the loss still
falls. Nothing in training notices; this does, with one small all-gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import InputError, PeerError, lost_peer
from .gradients import is_sharded
from .step import moe_layers

_SHOWN = 5
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x2545F4914F6CDD1D  # an odd multiplier of 63 bits (Steele and Vigna, arXiv:2001.05304), times the position


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """int64 [] on the tensor's device: a position-weighted sum of the elements' bits, the same for the same bits.

    Any single element that differs changes it: an odd factor maps no difference but 0 to a multiple of 2^64.
    """
    flat = tensor.detach().contiguous().view(-1)
    flat = flat.view(_INTEGERS.get(flat.element_size(), torch.uint8)).long()
    place = torch.arange(flat.numel(), device=flat.device)
    return (flat * (2 * place * _ODD + 1)).sum()


def copies(model: nn.Module) -> list[tuple[str, Tensor]]:
    """What every rank holds whole and alike: buffers and parameters, but no shards (DTensor) and no spread experts."""
    spread = {p for layer in moe_layers(model) if layer.dispatcher.num_ranks > 1 for p in layer.experts.parameters()}
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor) for name, tensor in named if tensor not in spread and not is_sharded(tensor)]


@torch.no_grad()
def differing_copies(named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None) -> list[str]:
    """Which of the tensors that all ranks should hold alike (routers, norms, selection biases) differ. Collective.

    Args:
        named: (name, tensor) pairs, the same names in the same order on every rank, tensors on one device; leave out
            what differs by design, such as `experts` of expert-parallel ranks. Sharded tensors (DTensor) have no
            copies: leave them out too.
        group: the ranks to compare; None: one rank, nothing to do.

    Returns:
        for each tensor that differs its name and the ranks where it is not rank 0's; the same list on every rank.

    Raises:
        PeerError: a rank did not come within the group's timeout.
    """
    pairs = list(named)
    if group is None or group.size() == 1 or not pairs:
        return []
    mine = torch.stack([digest(tensor) for _, tensor in pairs])
    everybody = [torch.empty_like(mine) for _ in range(group.size())]
    try:
        dist.all_gather(everybody, mine, group=group)
    except RuntimeError as err:
        raise lost_peer("comparison of copies", err) from err
    differs_RN = (torch.stack(everybody) != everybody[0]).tolist()
    return [
        f"{name} on rank {', '.join(str(rank) for rank, row in enumerate(differs_RN) if row[index])}"
        for index, (name, _) in enumerate(pairs)
        if any(row[index] for row in differs_RN)
    ]


def check_copies(
    what: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None
) -> None:
    """Raise where `differing_copies` finds any; for training loops of one's own, after an optimizer's step. Collective.

    Args:
        what: a model, of which its `copies` are compared; or tensors by name, as a mapping or as pairs.
        group: the ranks to compare; None: one rank, nothing to do.

    Raises:
        InputError: neither of these.
        PeerError: on every rank, naming tensors and ranks.
    """
    found = differing_copies(_pairs(what), group)
    if found:
        raise PeerError(
            f"copies differ from rank 0's: {listed(found)}. A gradient or an update was not the same on all ranks; "
            "reduce it over this group, or start again from a checkpoint"
        )


def _pairs(what: object) -> list[tuple[str, Tensor]]:
    if isinstance(what, nn.Module):
        return copies(what)
    pairs = list(what.items() if isinstance(what, Mapping) else what if isinstance(what, Iterable) else [what])
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            kind = type(pair).__name__
            raise InputError(f"check_copies takes a model, a dict of tensors, or (name, tensor) pairs; got a {kind}")
    return pairs


def listed(found: list[str]) -> str:
    """The first few of them in one line."""
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more

"""Faults that must reach every rank: what a rank tells the others, and the record for runs without a host sync.

A fault is two integers, a code and a value. Dispatchers whose host reads counts anyway send the pair along with the
counts, so the error comes at once and on every rank. Where nothing is read on the host, the pair goes into a
`FaultRecord` on the device; the trainer reads it together with the loss, before the optimizer's step.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .config_checks import MAX_MICRO_BATCHES
from .errors import CapacityError, InputError, MoEError, NonFiniteError, PeerError, PlanError, ProtocolError, lost_peer
from .peers import mark_everywhere, mark_out_of_step, mark_reported

FORWARD_ONLY = 1  # the value of a pair without a fault, where no gradient is recorded
NUM_WORDS = 3  # that each rank sends along with its counts: code, value, and which micro-batch of which layer it is at
_MICRO_BATCH_BITS = 10  # of a place; above them how many interleave, above those the layer


class Fault(enum.IntEnum):
    """Codes, in rising order of precedence."""

    NONE = 0
    BAD_INPUT = 1
    TOO_MANY_TOKENS = 2
    BAD_IDS = 3
    BAD_GROUP = 4
    DUPLICATES = 5
    NON_FINITE = 6
    TOO_MANY_ROWS = 7
    NO_GRAD = 8
    OTHER_PLACE = 9
    LOST = 10
    OTHER_PLAN = 11
    TOO_MANY_ROUTES = 12


_SENTENCES: dict[Fault, tuple[type[MoEError], str]] = {
    Fault.BAD_INPUT: (
        InputError,
        "it failed before its tokens were sent (a wrong shape, dtype or device, or an exception in the router); its "
        "own message says what",
    ),
    Fault.TOO_MANY_TOKENS: (CapacityError, "{value} tokens are more than max_tokens; raise it or send fewer"),
    Fault.BAD_IDS: (InputError, "{value} expert ids lie outside [-1, {num_experts}); look at the router"),
    Fault.BAD_GROUP: (InputError, "{value} routes of the grouped router name an expert outside their column's rank"),
    Fault.DUPLICATES: (
        InputError,
        "{value} tokens name an expert twice, which this dispatcher does not serve; take another router or dispatcher",
    ),
    Fault.TOO_MANY_ROWS: (
        CapacityError,
        "{value} expert rows are more than a rank has room for, so some were dropped; raise budget_rows or "
        "capacity_factor, or leave both unset",
    ),
    Fault.NON_FINITE: (NonFiniteError, "non-finite router logits in {value} tokens; look at the input of the router"),
    Fault.NO_GRAD: (
        PeerError,
        "rank {value} and rank 0 differ: one records gradients and the other does not; all ranks train or all evaluate",
    ),
    Fault.OTHER_PLACE: (
        PeerError,
        "rank {value} and rank 0 are at different layers or micro-batches, or interleave different numbers of "
        "micro-batches; all ranks take them in one order, and pass the same number to a stack",
    ),
    Fault.LOST: (PeerError, "rank {value} did not come within the group's timeout; look at its log"),
    Fault.OTHER_PLAN: (
        PlanError,
        "the replica plan of rank {value} differs from rank 0's, here or one micro-batch before; all ranks must plan "
        "from the same load, with the same slots, smallest quota and planner, and the same version of moe_ep",
    ),
    Fault.TOO_MANY_ROUTES: (
        PlanError,
        "the routes of all ranks are {value} or more, beyond the 2^31 - 1 that replicas can be planned for; take "
        "smaller micro-batches",
    ),
}


_CODES = (Fault.NONE, *_SENTENCES)


def describe(code: int, value: int, where: str, num_experts: int) -> MoEError:
    """The error of one fault, `where` being such as "layer 3, micro-batch 0"."""
    if code not in _SENTENCES:
        return ProtocolError(f"{where}: there is no fault of code {code}; install one version of moe_ep on all ranks")
    kind, sentence = _SENTENCES[Fault(code)]
    error = kind(f"{where}: {sentence.format(value=value, num_experts=num_experts)}")
    mark_everywhere(error)  # whoever learns of a fault raises
    return error


def raise_faults(
    words: Sequence[Sequence[int]], rank: int, where: str, num_experts: int, *, place: int | None = None
) -> None:
    """Raise if any rank reported a fault: the own error where the fault is, PeerError elsewhere.

    Three things are a fault of all ranks: some record gradients and some do not, so that the next backward would have
    no partner; they are not at the same micro-batch of the same layer, so that rows would be mixed up; or they
    interleave different numbers of micro-batches, so that some would wait for what others never send.

    Args:
        words: code, value and place (see `place_of`) of each rank, in rank order.
        rank: this rank.
        where: layer and micro-batch, for the message.
        num_experts: E, for the message.
        place: what this rank sent as its own; None: it sent none.
    """
    own_code, own_value, own_place = words[rank]
    if own_code not in _CODES or (place is not None and own_place != place):
        raise ProtocolError(f"{where}: what was read is not what this rank sent: counts were read before they had come")
    if own_code:
        raise _reported(describe(own_code, own_value, where, num_experts))
    for peer, (code, value, _) in enumerate(words):
        if code:
            fault = describe(code, value, where, num_experts)
            raise _reported(PeerError(f"rank {peer} reported a fault, so that no rank goes on: {fault}"))
    _same_place([place for _, _, place in words])
    without = [str(peer) for peer, (_, value, _) in enumerate(words) if value == FORWARD_ONLY]
    if 0 < len(without) < len(words):
        raise _reported(PeerError(
            f"{where}: rank {', '.join(without)} of {len(words)} runs under no_grad and the others do not, so a "
            "backward would wait for ever; all ranks train or all evaluate"
        ))  # fmt: skip


def _reported(err: MoEError) -> MoEError:
    mark_reported(err)
    return err


def place_of(layer: int, micro_batch: int, num_micro_batches: int = 1) -> int:
    """Layer, micro-batch and how many of them interleave as one int that ranks compare, the layer above 16 bits."""
    low = micro_batch & ((1 << _MICRO_BATCH_BITS) - 1)
    return (layer << 16) | (min(num_micro_batches, MAX_MICRO_BATCHES) << _MICRO_BATCH_BITS) | low


def _same_place(places: Sequence[int]) -> None:
    if len(set(places)) > 1:
        error = PeerError(_how_places_differ(places))
        mark_out_of_step(error)
        raise error


def _how_places_differ(places: Sequence[int]) -> str:
    interleaved = [(place & 0xFFFF) >> _MICRO_BATCH_BITS for place in places]
    micro_batches = [place & ((1 << _MICRO_BATCH_BITS) - 1) for place in places]
    if len(set(interleaved)) > 1:
        each = ", ".join(f"rank {r} interleaves {number}" for r, number in enumerate(interleaved))
        return (
            f"the ranks interleave different numbers of micro-batches: {each}. All ranks of a group pass the same "
            "number to a stack; one that has less to do passes micro-batches without tokens"
        )
    at = ", ".join(
        f"rank {r} at layer {p >> 16}, micro-batch {i}"
        for r, (p, i) in enumerate(zip(places, micro_batches, strict=True))
    )
    return (
        f"the ranks are not at the same micro-batch: {at}. All ranks of a group take layers and micro-batches in one "
        "order; give layers of one model different layer_index values"
    )


class FaultRecord:
    """Sticky record of the worst fault of this rank, one int64 on the device: code, layer, micro-batch, value."""

    def __init__(self, device: torch.device, num_experts: int) -> None:
        self.num_experts = num_experts
        with torch.inference_mode(False):  # made in an evaluation, it must still serve training
            self.word = torch.zeros((), dtype=torch.int64, device=device)

    def note(self, status: Tensor, layer: int, micro_batch: int) -> None:
        """Keep the larger of the record and this fault; no host sync, capturable."""
        code, value = status[0], status[1].clamp_max((1 << 32) - 1)
        packed = (code << 56) | ((layer & 0xFFFF) << 40) | ((micro_batch & 0xFF) << 32) | value
        torch.maximum(self.word, torch.where(code > 0, packed, 0), out=self.word)

    def raise_if_set(self, group: dist.ProcessGroup | None = None) -> None:
        """Read the record (a host sync) and raise on every rank of the group if any rank has one; clears it.

        Raises:
            InputError, CapacityError, NonFiniteError: the worst fault of all ranks.
            PeerError: another rank did not come within the group's timeout.
        """
        word = self.word.clone()
        if group is not None and group.size() > 1:
            try:
                dist.all_reduce(word, op=dist.ReduceOp.MAX, group=group)
            except RuntimeError as err:
                raise lost_peer("exchange of fault records", err) from err
        packed = int(word.item())
        if packed:
            self.word.zero_()
            layer, micro_batch = (packed >> 40) & 0xFFFF, (packed >> 32) & 0xFF
            where = f"layer {layer}, micro-batch {micro_batch}"
            raise describe(packed >> 56, packed & 0xFFFFFFFF, where, self.num_experts)

"""What can be wrong with a routing, as words that its rank sends along with its counts; no host sync."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .faults import FORWARD_ONLY, Fault
from .ops import routes_module
from .routing import Routing, count_bad_ids


def routing_status(routing: Routing, *, duplicates: bool = True) -> Tensor:
    """(code, value) of what can be wrong with a routing, int64 [2] on its device, without a host sync.

    Without `duplicates`, an expert twice in one token is wrong too. Where nothing is wrong, value is FORWARD_ONLY
    under no_grad, else 0.
    """
    bad_ids = count_bad_ids(routing)
    bad_tokens = torch.zeros_like(bad_ids) if routing.bad_tokens is None else routing.bad_tokens.to(bad_ids.dtype)
    found = [(Fault.BAD_IDS, bad_ids), (Fault.NON_FINITE, bad_tokens)]
    if not duplicates:
        found.insert(1, (Fault.DUPLICATES, _tokens_with_duplicates(routing.expert_ids)))
    code = value = torch.zeros_like(bad_ids)
    for fault, count in found:  # in rising order of precedence
        code, value = torch.where(count > 0, int(fault), code), torch.where(count > 0, count, value)
    if not torch.is_grad_enabled():
        value = torch.where(code > 0, value, FORWARD_ONLY)
    return torch.stack([code, value])


def status_words(routing: Routing, place: int, *, duplicates: bool = True, kernels: bool = False) -> Tensor:
    """`routing_status` and a place, int64 [3]: what a rank sends to all others.

    Args:
        routing: of this rank.
        place: see `place_of`.
        duplicates: whether an expert twice in one token is served.
        kernels: let the CUDA kernels find it where the ids are on a GPU: three launches in place of some twenty.
    """
    if kernels and routing.expert_ids.is_cuda:
        return words_by_ops(routing, place, duplicates=duplicates)
    status = routing_status(routing, duplicates=duplicates).long()
    return torch.cat([status, status.new_full((1,), place)])


def words_by_ops(routing: Routing, place: int, *, duplicates: bool) -> Tensor:
    """`status_words` by the ops of `moe_ep.kernels`, wherever the ids are."""
    ids, num_experts = routing.expert_ids, routing.num_experts
    *_, counts_E, _, num_bad = routes_module().sort_routes(ids, num_experts, 1)
    more = [] if duplicates else [(Fault.DUPLICATES, _tokens_with_duplicates(ids))]
    return _message(counts_E, [(Fault.BAD_IDS, num_bad), *more], routing, place, 1)[0, 0, num_experts:]


def count_message(counts_E: Tensor, num_bad: Tensor, routing: Routing, place: int, num_ranks: int) -> Tensor:
    """Counts and `routing_status` (duplicates allowed) of a routing on a GPU, laid out to be sent, in one kernel.

    Args:
        counts_E: int64 [E], routes of each expert.
        num_bad: int64 [], ids outside [-1, E).
        routing: for the tokens with non-finite logits.
        place: see `place_of`.
        num_ranks: R.

    Returns:
        int64 [2, R, L + 3]: [0] is what to send to each rank, [1] is where to receive what each one sends.
    """
    return _message(counts_E, [(Fault.BAD_IDS, num_bad)], routing, place, num_ranks)


def _message(
    counts_E: Tensor, met: Sequence[tuple[Fault, Tensor]], routing: Routing, place: int, num_ranks: int
) -> Tensor:
    """See `count_message`; `met` are counts of faults, int64 [], in rising order of precedence below NON_FINITE."""
    if routing.bad_tokens is not None:
        met = [*met, (Fault.NON_FINITE, routing.bad_tokens.long())]
    value = 0 if torch.is_grad_enabled() else FORWARD_ONLY
    counts, codes = [count for _, count in met], [int(fault) for fault, _ in met]
    message: Tensor = routes_module().count_message(counts_E, counts, codes, value, place, num_ranks)
    return message


def _tokens_with_duplicates(expert_ids_TK: Tensor) -> Tensor:
    ids = expert_ids_TK.sort(dim=-1).values
    return ((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)).any(-1).sum()

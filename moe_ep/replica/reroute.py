"""Tokens to instances: a plan's quotas, realised exactly, with as many rows as possible staying on their rank.

Rows of expert e come from R sources and go to its instances. First every rank that has both takes min(rows, quota) of
its own. What is left on either side is laid out on one line, sources side by side and instances side by side, and a
source's rows go to the instances that lie over them. So both margins are exact: over instances the rows of a source
add up to its load, over sources those of an instance to its quota; and each rank finds the places of its own rows
without asking another. (Rounding each source's rows in proportion to the quotas, as Dots-Infra/UltraEP does, misses the
quotas by up to R-1 rows.)

Which of a rank's rows is the n-th of an expert goes by token, then by k, so the same input gives the same instances.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, PlanError
from ..routing import Routing
from .plan import Plan


class Share(NamedTuple):
    """One rank's part of a plan, int64: its own rows of each expert, then where the others lie on the expert's line.

    Attributes:
        kept: [E], rows that this rank computes itself, of its own load.
        start: [E], place of this rank's first remaining row among all sources' remaining rows.
        ends: [E, R], where the places of each rank's instance end.
    """

    kept: Tensor
    start: Tensor
    ends: Tensor


def share(plan: Plan, rank: int) -> Share:
    """What `rank` needs of a plan to place its rows. Sources take turns in coming first, by the expert's number.

    Worked example: ranks 0 and 1, load [[6, 1], [2, 1]], quota [[5, 3], [0, 2]]. Of expert 0, rank 0 keeps 5 of its
    6 rows and rank 1 keeps its 2; the row left goes to the one place left, on rank 1. Of expert 1, rank 1 keeps 1 and
    rank 0 sends it 1.
    """
    load_ER, quota_ER = plan.load.T.long(), plan.quota.long()
    kept_ER = torch.minimum(load_ER, quota_ER)
    demand, room = load_ER - kept_ER, quota_ER - kept_ER
    ranks = torch.arange(plan.num_ranks, device=demand.device)
    experts = torch.arange(plan.num_experts, device=demand.device)[:, None]
    before = (ranks - experts) % plan.num_ranks < (rank - experts) % plan.num_ranks
    return Share(kept_ER[:, rank], (demand * before).sum(1), room.cumsum(1))


def split(plan: Plan, rank: int) -> Tensor:
    """Rows of this rank's load that go to each instance, int64 [E, R]."""
    kept, start, ends = share(plan, rank)
    stop = start + plan.load[rank].long() - kept
    begins = torch.nn.functional.pad(ends, (1, 0))[:, :-1]
    rows = (torch.minimum(ends, stop[:, None]) - torch.maximum(begins, start[:, None])).clamp_min(0)
    rows[:, rank] += kept
    return rows


def reroute(routing: Routing, plan: Plan, rank: int) -> Routing:
    """Send each route to an instance of its expert.

    Args:
        routing: T tokens of this rank, ids of the E logical experts; they must be those that `plan.load[rank]` counts.
            Checked where they are on the CPU; elsewhere this reads nothing on the host.
        plan: of this micro-batch.
        rank: this rank.

    Returns:
        ids in [0, P) as `Plan.physical_ids` numbers them; -1 stays -1, and an id that is no expert's stays outside of
        [-1, P), for the dispatcher to tell every rank. The weights are the very same tensor, so each route keeps its
        own, and gradients go to the logical router.

    Raises:
        InputError: another number of experts, or a rank that the plan does not have.
        PlanError: the plan was made from another micro-batch.
    """
    check_group(routing, plan, rank)
    ids = _place(routing.expert_ids, plan, rank)
    return Routing(
        expert_ids=ids, weights=routing.weights, num_experts=plan.num_physical, bad_tokens=routing.bad_tokens
    )


def check_group(routing: Routing, plan: Plan, rank: int) -> None:
    """Refuse a routing or rank of another group than the plan's.

    Raises:
        InputError: the numbers of both.
    """
    if not (isinstance(routing, Routing) and isinstance(plan, Plan) and type(rank) is int):
        kinds = [type(given).__name__ for given in (routing, plan, rank)]
        raise InputError(f"reroute takes a Routing, a Plan and a rank, got {', '.join(kinds)}")
    if routing.num_experts != plan.num_experts or not 0 <= rank < plan.num_ranks:
        raise InputError(
            f"the routing has {routing.num_experts} experts and comes from rank {rank}, the plan has {plan.num_experts}"
            f" on {plan.num_ranks} ranks; plan and reroute with the same expert-parallel group"
        )


def _place(ids_TK: Tensor, plan: Plan, rank: int) -> Tensor:
    ids = ids_TK.reshape(-1)
    valid = (ids >= 0) & (ids < plan.num_experts)
    expert = torch.where(valid, ids, plan.num_experts)
    ordinal, counts = _ordinals(expert, plan.num_experts)
    if ids.device.type == "cpu":
        _check_counts(counts, plan.load[rank], rank)
    kept, start, ends = share(plan, rank)
    known = expert.clamp_max(plan.num_experts - 1)  # what is no expert's is put aside at the end
    place = ordinal - kept[known]
    dest = (ends[known] <= (start[known] + place)[:, None]).sum(1)
    dest = torch.where(place < 0, rank, dest.clamp_max(plan.num_ranks - 1))
    beyond = torch.where(ids >= plan.num_experts, ids - plan.num_experts + plan.num_physical, ids)
    return torch.where(valid, plan.physical_ids()[known, dest], beyond).view(ids_TK.shape)


def _check_counts(counts: Tensor, planned: Tensor, rank: int) -> None:
    wrong = (counts != planned).nonzero()
    if len(wrong):
        e = int(wrong[0])
        raise PlanError(
            f"the plan counts {int(planned[e])} rows of expert {e} from rank {rank}, the routing has {int(counts[e])}; "
            "reroute each micro-batch with the plan made from its own load"
        )


def _ordinals(expert: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Each route's number among the routes of its expert, and how many each expert has."""
    order = expert.argsort(stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=expert.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    starts = counts.cumsum(0) - counts
    ordinal = torch.empty_like(expert)
    ordinal[order] = torch.arange(len(expert), device=expert.device) - starts[expert[order]]
    return ordinal, counts[:-1]

"""The planners: from the rows of each expert to the rows that each rank computes of it, for one domain of ranks.

`quota_rows` narrows a threshold as bisection does, tries the sixteen rules of `greedy.py` for each value, and keeps the
run whose largest load is smallest. Runs are scored by the load they come to, not by whether they reached their
threshold: whether a greedy rule reaches one is not monotone in it. The mean is tried first and mostly is reached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .greedy import Runs, run

LARGEST_TOTAL = 2**31 - 1  # the kernels count in 32 bits
_THRESHOLDS = 4  # tried at once after the mean, which makes 64 runs


def lower_bound(load_E: Tensor, num_ranks: int, slots: int, reached: int) -> int:
    """A largest load that no plan can go below: the mean, or where more than that was reached also the slot bound.

    At most S*(R-k) experts have a replica outside of k ranks, so all other rows of theirs stay among the k. The slot
    bound is the largest mean of such rows over the k most loaded ranks, k = 1 .. R-1.
    """
    per_rank, mean = len(load_E) // num_ranks, -(-int(load_E.sum()) // num_ranks)
    if reached <= mean:
        return mean
    by_rank = load_E.view(num_ranks, per_rank)
    ranked = by_rank[torch.argsort(-by_rank.sum(1), stable=True)]
    bound = mean
    for k in range(1, num_ranks):
        stuck = ranked[:k].reshape(-1).sort(descending=True).values[slots * (num_ranks - k) :]
        bound = max(bound, -(-int(stuck.sum()) // k))
    return bound


def quota_rows(load_E: Tensor, free_R: Tensor, placed: Tensor, min_quota: int, tolerance: int = 0) -> Tensor:
    """Quotas int64 [E, R] of one domain: narrow the threshold, keep the best run of all.

    Args:
        load_E: int64 [E].
        free_R: int64 [R], unused slots.
        placed: bool [E, R], replicas that are in other slots already; they may get rows or none.
        min_quota: fewest rows of a replica.
        tolerance: thousandths of the mean above it that are good enough.
    """
    num_ranks = len(free_R)
    quota = torch.zeros((len(load_E), num_ranks), dtype=torch.int64)
    experts = torch.arange(len(load_E))
    home = experts // (len(load_E) // num_ranks)
    quota[experts, home] = load_E
    aim, best = good_enough(load_E, num_ranks, tolerance), int(quota.sum(0).amax())
    thresholds, step = [aim], best - aim
    most = int((free_R + placed.sum(0)).amax())
    while thresholds and best > max(aim, lower_bound(load_E, num_ranks, most, best)):
        runs = run(load_E, free_R, placed, min_quota, thresholds)
        first = _best_run(runs)
        if int(runs.peak[first]) < best:
            best, moved = int(runs.peak[first]), runs.moved[first]
            quota = moved.clone()
            quota[experts, home] = load_E - moved.sum(1)
        if step == 1:
            break
        low = max(aim + 1, best - step)
        step = max(1, -(-(best - low) // _THRESHOLDS))
        thresholds = list(range(low, best, step))
    return _drop_useless(quota, home)


def good_enough(load_E: Tensor, num_ranks: int, tolerance: int) -> int:
    """The mean of the ranks, rounded up, and so many thousandths of it more."""
    mean = -(-int(load_E.sum()) // num_ranks)
    return mean + mean * tolerance // 1000


def _best_run(runs: Runs) -> int:
    """The run with the smallest peak, of those the one with fewest replicas, of those the first."""
    key = (runs.peak * (runs.moved[0].numel() + 1) + runs.pieces) * len(runs.peak) + torch.arange(len(runs.peak))
    return int(key.argmin())


def _drop_useless(quota: Tensor, home_E: Tensor) -> Tensor:
    """Drop replicas, the smallest first, whose rows fit into the expert's other instances under the same maximum."""
    best = quota.sum(0).amax()
    own = home_E[:, None] == torch.arange(quota.shape[1])
    while True:
        hosts, room_R = own | (quota > 0), best - quota.sum(0)
        room_ER = room_R * hosts
        useless = hosts & ~own & (room_ER.sum(1, keepdim=True) - room_ER >= quota)
        if not bool(useless.any()):
            return quota
        place = int(torch.where(useless, quota, LARGEST_TOTAL + 1).argmin())
        expert, rank = divmod(place, quota.shape[1])
        rows, quota[expert, rank] = int(quota[expert, rank]), 0
        home = int(home_E[expert])
        others = [r for r in range(quota.shape[1]) if hosts[expert, r] and r not in (rank, home)]
        for other in [home, *others]:
            taken = min(rows, int(room_R[other]))
            quota[expert, other] += taken
            rows -= taken


def fixed_rows(load_E: Tensor, num_ranks: int) -> Tensor:
    """Quotas int64 [E, R] of one domain with equal rows: the fullest rank fills the emptiest one up, again and again.

    A rank is filled by one other rank alone, so it needs a slot for each of that one's L experts at most.
    """
    per_rank = len(load_E) // num_ranks
    share, more = divmod(int(load_E.sum()), num_ranks)
    over = [rows - share - (rank < more) for rank, rows in enumerate(load_E.view(num_ranks, -1).sum(1).tolist())]
    left = load_E.tolist()
    quota = torch.zeros((len(load_E), num_ranks), dtype=torch.int64)
    while max(over) > 0:
        fullest, emptiest = over.index(max(over)), over.index(min(over))
        rows = -over[emptiest]
        over[fullest], over[emptiest] = over[fullest] - rows, 0
        own = range(fullest * per_rank, (fullest + 1) * per_rank)
        for expert in sorted(own, key=lambda e: (-left[e], e)):  # the largest first: fewest replicas
            taken = min(rows, left[expert])
            quota[expert, emptiest], left[expert], rows = taken, left[expert] - taken, rows - taken
        assert rows == 0, "a rank gave away more rows than its experts have"
    experts = torch.arange(len(load_E))
    quota[experts, experts // per_rank] = torch.tensor(left)
    return quota

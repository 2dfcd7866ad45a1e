"""What the planner is held to: the optimum of small cases by enumeration, and the usual greedy at every threshold."""

from __future__ import annotations

import itertools

import numpy as np

Rows = list[int]


def optimum(load_E: Rows, num_ranks: int, slots: int) -> int:
    """Smallest largest rank load over all placements of replicas (at most 4 ranks and 8 experts).

    For one placement it is the largest mean, over sets X of ranks, of the rows whose experts have all instances in X.
    """
    num_local = len(load_E) // num_ranks
    choices = [_choices(load_E, rank, num_local, slots) for rank in range(num_ranks)]
    mean = -(-sum(load_E) // num_ranks)
    weight = np.array([sum(load_E[e] for e in range(len(load_E)) if bits >> e & 1) for bits in range(1 << len(load_E))])
    peak = np.full([len(c) for c in choices], mean)
    for size in range(1, num_ranks):
        for inside in itertools.combinations(range(num_ranks), size):
            stuck = np.full([1] * num_ranks, sum(1 << e for e in range(len(load_E)) if e // num_local in inside))
            for rank in set(range(num_ranks)) - set(inside):
                shape = [-1 if axis == rank else 1 for axis in range(num_ranks)]
                stuck = stuck & ~choices[rank].reshape(shape)
            peak = np.maximum(peak, -(-weight[stuck] // size))
    return int(peak.min())


def best_for(load_E: Rows, hosts_E: list[set[int]], num_ranks: int) -> int:
    """The same for one placement, the set of ranks that hold each expert."""
    sets = [set(c) for size in range(1, num_ranks + 1) for c in itertools.combinations(range(num_ranks), size)]
    stuck = [sum(rows for rows, hosts in zip(load_E, hosts_E, strict=True) if hosts <= inside) for inside in sets]
    return max(-(-rows // len(inside)) for rows, inside in zip(stuck, sets, strict=True))


def _choices(load_E: Rows, rank: int, num_local: int, slots: int) -> np.ndarray:
    """Bit sets of experts that a rank may hold replicas of, none of them part of another."""
    foreign = [e for e, rows in enumerate(load_E) if e // num_local != rank and rows > 0]
    chosen = itertools.combinations(foreign, min(slots, len(foreign)))
    return np.array([sum(1 << e for e in experts) for experts in chosen])


def scanned_greedy(load_E: Rows, num_ranks: int, slots: int, min_quota: int) -> int:
    """The smallest threshold that the plain greedy reaches, of all there are: widest slack first, all or nothing."""
    num_local = len(load_E) // num_ranks
    load_R = [sum(load_E[r * num_local : (r + 1) * num_local]) for r in range(num_ranks)]
    lowest = -(-sum(load_E) // num_ranks)
    taus = range(lowest, max(load_R))
    return next((t for t in taus if _reaches(t, load_E, load_R, num_local, slots, min_quota)), max(load_R))


def _reaches(tau: int, load_E: Rows, load_R: Rows, num_local: int, slots: int, min_quota: int) -> bool:
    slack, free = [max(0, tau - rows) for rows in load_R], [slots] * len(load_R)
    for source in sorted(range(len(load_R)), key=lambda r: (-load_R[r], r)):
        need = load_R[source] - tau
        for expert in sorted(range(source * num_local, (source + 1) * num_local), key=lambda e: (-load_E[e], e)):
            rest, hosts = load_E[expert], {source}
            while need > 0:
                fits = [
                    r for r in set(range(len(load_R))) - hosts if free[r] and min(need, rest, slack[r]) >= min_quota
                ]
                if not fits:
                    break
                target = max(fits, key=lambda r: (slack[r], -r))
                rows = min(need, rest, slack[target])
                need, rest, slack[target] = need - rows, rest - rows, slack[target] - rows
                free[target] -= 1
                hosts.add(target)
        if need > 0:
            return False
    return True

"""Quotas on instances that are given: the smallest largest rank load that they allow, exactly.

Rows flow from ranks above a threshold to ranks below it along instances that both hold (shortest paths first, as in
Edmonds and Karp). Where no path is left, the ranks that can still be reached hold rows that stay among them, so their
mean is a bound, and the next threshold. No bound is ever passed, so the first threshold that is reached is the best.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

Step = tuple[int, int]  # from which rank, with which expert


def rows_on(load_E: Tensor, hosts_ER: Tensor, good_enough: int) -> Tensor:
    """Rows of each expert on each rank, int64 [E, R].

    Worked example: experts 0 and 1 at home on rank 0, 2 and 3 on rank 1, loads 6, 2, 2, 0; expert 1 has a replica on
    rank 1. The mean is 5, but expert 0 stays: rows are [[6, 0], [0, 2], [0, 2], [0, 0]].

    Args:
        load_E: int64 [E].
        hosts_ER: bool [E, R], ranks with an instance, the home among them; rank r is home to E/R experts.
        good_enough: a largest rank load that need not be lowered further.
    """
    num_experts, num_ranks = hosts_ER.shape
    home = torch.arange(num_experts) // (num_experts // num_ranks)
    quota = torch.zeros((num_experts, num_ranks), dtype=torch.int64)
    quota[torch.arange(num_experts), home] = load_E
    shared = [(e, hosts_ER[e].nonzero()[:, 0].tolist()) for e in (hosts_ER.sum(1) > 1).nonzero()[:, 0].tolist()]
    flow = _Flow(quota.sum(0).tolist(), shared, quota.tolist())
    threshold = max(good_enough, -(-int(load_E.sum()) // num_ranks))
    while (stuck := flow.lower(threshold)) is not None:
        threshold = stuck
    for expert, _ in shared:
        quota[expert] = torch.tensor(flow.quota[expert])
    return quota


class _Flow:
    """Rows of each rank, and how they move."""

    def __init__(self, rows: list[int], shared: list[tuple[int, list[int]]], quota: list[list[int]]) -> None:
        self.rows, self.quota, self.hosts = rows, quota, dict(shared)
        self.held: list[list[int]] = [[] for _ in rows]  # experts on more ranks than this one
        for expert, ranks in shared:
            for rank in ranks:
                self.held[rank].append(expert)

    def lower(self, threshold: int) -> int | None:
        """Bring every rank down to the threshold; None where that is done, else the next one that may be reached."""
        while any(rows > threshold for rows in self.rows):
            came_from, reached = self._search(threshold)
            if reached is None:
                stuck = sum(self.rows[rank] for rank in came_from)
                return -(-stuck // len(came_from))
            self._move(came_from, reached, threshold)
        return None

    def _search(self, threshold: int) -> tuple[dict[int, Step | None], int | None]:
        """How each rank was reached from those above the threshold, and the first one below it."""
        came_from: dict[int, Step | None] = {rank: None for rank, rows in enumerate(self.rows) if rows > threshold}
        waiting = deque(came_from)
        while waiting:
            rank = waiting.popleft()
            for expert in self.held[rank]:
                for other in self.hosts[expert] if self.quota[expert][rank] else ():
                    if other in came_from:
                        continue
                    came_from[other] = rank, expert
                    if self.rows[other] < threshold:
                        return came_from, other
                    waiting.append(other)
        return came_from, None

    def _move(self, came_from: dict[int, Step | None], last: int, threshold: int) -> None:
        """As many rows as the whole way to rank `last` allows."""
        way: list[tuple[int, int, int]] = []  # from, expert, to
        rank = last
        while (step := came_from[rank]) is not None:
            way.append((*step, rank))
            rank = step[0]
        rows = min(threshold - self.rows[last], self.rows[rank] - threshold, *(self.quota[e][r] for r, e, _ in way))
        self.rows[rank] -= rows
        self.rows[last] += rows
        for source, expert, dest in way:
            self.quota[expert][source] -= rows
            self.quota[expert][dest] += rows

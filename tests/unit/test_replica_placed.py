"""Quotas on a placement that is given: the exact optimum, told from all sets of ranks in which rows can be shut in."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from moe_ep.replica.placed import rows_on
from tests.unit.replica_reference import best_for


def drawn(rng: random.Random) -> tuple[list[int], list[set[int]], int]:
    num_ranks, num_local = rng.choice([(1, 2), (2, 3), (3, 2), (4, 2), (5, 3), (6, 1)])
    totals, hosts = [], []
    for expert in range(num_ranks * num_local):
        totals.append(rng.choice([0, 1, rng.randrange(30), int(50 * rng.lognormvariate(0, 1.5))]))
        copies = rng.choice([0, 0, 1, 2])
        hosts.append({expert // num_local} | {rng.randrange(num_ranks) for _ in range(copies)})
    return totals, hosts, num_ranks


def as_mask(hosts: list[set[int]], num_ranks: int) -> Tensor:
    return torch.tensor([[rank in ranks for rank in range(num_ranks)] for ranks in hosts])


def test_the_optimum_of_any_placement_is_found() -> None:
    rng, uneven = random.Random(4), 0
    for _ in range(300):
        totals, hosts, num_ranks = drawn(rng)
        mask, mean = as_mask(hosts, num_ranks), -(-sum(totals) // num_ranks)
        rows = rows_on(torch.tensor(totals), mask, mean)
        assert bool((rows >= 0).all()) and not rows[~mask].any()
        assert rows.sum(1).tolist() == totals
        best = best_for(totals, hosts, num_ranks)
        assert int(rows.sum(0).amax()) == best, (totals, hosts)
        uneven += best > mean
    assert uneven > 50


def test_what_is_good_enough_moves_no_more() -> None:
    totals, hosts = [70, 30, 20, 0], [{0, 1}, {0}, {1}, {1}]
    rows = rows_on(torch.tensor(totals), as_mask(hosts, 2), 80)
    assert rows.tolist() == [[50, 20], [30, 0], [0, 20], [0, 0]]
    assert rows_on(torch.tensor(totals), as_mask(hosts, 2), 100).tolist() == [[70, 0], [30, 0], [0, 20], [0, 0]]


def test_the_worked_example() -> None:
    mask = torch.tensor([[True, False], [True, True], [False, True], [False, True]])
    assert rows_on(torch.tensor([6, 2, 2, 0]), mask, 5).tolist() == [[6, 0], [0, 2], [0, 2], [0, 0]]

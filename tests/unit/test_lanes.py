"""Lanes come back when their owner is done or dies, and never while something may still write them."""

from __future__ import annotations

import gc

import torch

from moe_ep.lanes import LanePool

CPU = torch.device("cpu")


class Owner:
    loan: object
    itself: object  # a cycle: what dies only when the collector comes


class Event:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def test_a_returned_lane_is_lent_again_and_a_pool_grows_only_with_lanes_in_use() -> None:
    pool = LanePool(4)
    for _ in range(5):
        _, give_back = pool.borrow(CPU)
        give_back()
    assert (pool.num_lanes, pool.num_free) == (1, 1)
    (first, _), (second, _) = loans = [pool.borrow(CPU) for _ in range(2)]
    assert len(loans) == 2
    assert first is not second and (pool.num_lanes, pool.num_free) == (2, 0)


def test_a_lane_comes_back_once_however_often_it_is_returned() -> None:
    pool = LanePool(4)
    _, give_back = pool.borrow(CPU)
    give_back()
    give_back()
    del give_back
    gc.collect()
    assert pool.num_free == 1


def test_a_lane_comes_back_when_its_owner_dies() -> None:
    pool, owner = LanePool(4), Owner()
    owner.loan = pool.borrow(CPU)
    owner.itself = owner
    assert pool.num_free == 0
    del owner
    gc.collect()
    assert pool.num_free == 1


def test_a_lane_with_a_pending_write_is_not_lent() -> None:
    pool = LanePool(4)
    lane, give_back = pool.borrow(CPU)
    lane.event = Event()
    give_back()
    other, _loan = pool.borrow(CPU)
    assert other is not lane
    lane.event.done = True
    again, _ = pool.borrow(CPU)
    assert again is lane

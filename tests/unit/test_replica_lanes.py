"""Sets of slots: whoever has them next waits for what the last holder left under way, and nobody takes them away."""

from __future__ import annotations

import pytest
import torch

from moe_ep.errors import ProtocolError
from moe_ep.replica.lanes import Phase, SlotLane, held_by
from moe_ep.replica.simulated import local_transports
from moe_ep.replica.transport import InFlight, SlotBuffers


class Holding:
    """A micro-batch that holds slots."""

    def __init__(self, where: str, phase: Phase) -> None:
        self.where, self.phase = where, phase

    def settle(self) -> None:
        self.phase = Phase.IDLE


def make_lane() -> SlotLane:
    (end,) = local_transports(1)
    return SlotLane(end, SlotBuffers(1, [torch.zeros(2, 3)]))


def test_an_operation_of_somebody_who_is_gone_ends_before_the_slots_are_used_again() -> None:
    lane, ended = make_lane(), []
    first = Holding("layer 0, micro-batch 0", Phase.FORWARD)
    lane.claim(first)
    lane.launched(InFlight(lambda: ended.append("weights")))
    del first
    assert lane.holder is None and ended == []
    lane.claim(Holding("layer 1, micro-batch 0", Phase.FORWARD))
    assert ended == ["weights"]
    lane.claim(Holding("layer 2, micro-batch 0", Phase.FORWARD))
    assert ended == ["weights"], "and once"


def test_a_holder_in_forward_keeps_its_slots() -> None:
    lane, first = make_lane(), Holding("layer 0, micro-batch 0", Phase.FORWARD)
    lane.claim(first)
    with pytest.raises(
        ProtocolError, match="layer 0, micro-batch 1: no replica slots are free: layer 0, micro-batch 0"
    ):
        lane.claim(Holding("layer 0, micro-batch 1", Phase.FORWARD))
    assert held_by([lane]) == "layer 0, micro-batch 0 holds them in forward until its experts have run"
    first.phase = Phase.THROUGH
    lane.claim(Holding("layer 0, micro-batch 1", Phase.FORWARD))
    assert held_by([lane]) == "", "its object is gone"

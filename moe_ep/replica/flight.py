"""A micro-batch's hold on slots, forward and backward: which plan, which lane, and what is under way.

The nodes of `with_replicas.py` and `beside.py` share one, and call it where they stand in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..errors import ProtocolError
from ..recompute import may_run_again
from ..tracing import Role, transfer_range
from .hot import hot_experts
from .lanes import Phase, SlotLane
from .plan import Plan
from .transport import InFlight

Tensors = tuple[Tensor, ...]


class Flight:
    """What the nodes share: the plan, the lane, and what is under way. The lane's holder."""

    def __init__(self, where: str, users: int) -> None:
        self.where, self.phase = where, Phase.IDLE
        self.plan: Plan | None = None
        self.lane: SlotLane | None = None
        self.brings_early = self.fresh_grads = False
        self.hot: Tensor | None = None  # experts that are reduced; None: all
        self._users = self._to_take = self._to_leave = users
        self._weights: InFlight | None = None
        self._grads: InFlight | None = None
        self._totals: Tensors = ()

    def slots(self) -> Tensors:
        """Weights [S, ...] of the lane."""
        if self.lane is None:
            raise ProtocolError(f"{self.where}: take needs the sync of a plan before it")
        return self.lane.buffers.weights

    def begin(self, plan: Plan, lane: SlotLane, masters: Tensors, second_pass: bool) -> None:
        """Forward: hold the lane and start weight_sync."""
        lane.claim(self)
        self.plan, self.lane, self.phase = plan, lane, Phase.FORWARD
        self._launch_weights(masters)
        lane.content = plan if second_pass else None
        self.brings_early = not may_run_again()

    def take(self) -> None:
        """Wait until the slots are filled."""
        if self.lane is None:
            raise ProtocolError(f"{self.where}: take needs the sync of a plan before it")
        if self._to_take == 0:
            raise ProtocolError(f"{self.where}: take comes once for each micro-batch; route the next one anew")
        self._to_take -= 1
        self._wait_weights()

    def leave(self) -> None:
        """Forward: the experts of one micro-batch have run."""
        self._to_leave -= 1
        if self._to_leave <= 0 and self.phase is Phase.FORWARD:
            self.phase = Phase.IDLE

    def release(self) -> None:
        """Nobody goes on with this."""
        self.phase = Phase.IDLE

    def bring(self, masters: Tensors) -> None:
        """Backward: hold the lane again, with this layer's weights on their way to it; once for all users."""
        if self.phase is Phase.BACKWARD:
            return
        assert self.lane is not None and self.plan is not None, "backward without forward"
        self.lane.claim(self)
        self.phase, self._to_leave = Phase.BACKWARD, self._users
        if self.lane.content is not self.plan:
            self._launch_weights(masters)
        self.lane.content = None

    def return_to(self, masters: Tensors) -> None:
        """Backward: hold the lane, with this layer's weights in it."""
        self.bring(masters)
        self._wait_weights()

    def through(self) -> None:
        """Backward: the experts of one micro-batch have run."""
        self._to_leave -= 1
        if self._to_leave <= 0 and self.phase is Phase.BACKWARD:
            self.phase = Phase.THROUGH

    def launch_grads(self, masters: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
        """Start grad_reduce with the gradients that this rank's experts made."""
        assert self.lane is not None and self.plan is not None, "gradients before a plan"
        hot = hot_experts(self.plan, self.lane.transport.rank, masters[0].device)
        self.hot = hot.locals_B
        self.reduce(hot.plan, tuple(map(hot.of, masters)), slots)

    def reduce(self, plan: Plan, totals: Tensors, slots: Sequence[Tensor]) -> None:
        """Start grad_reduce; `totals` float32, with the home's part, are kept."""
        assert self.lane is not None, "gradients before a plan"
        self.lane.claim(self)
        self.phase = Phase.REDUCING
        self._totals = totals
        transport = self.lane.transport
        used_S = (plan.instances[transport.rank] >= 0).to(slots[0].device)
        for buffer, grad in zip(self.lane.buffers.grads, slots, strict=True):
            torch.where(used_S.view(-1, *[1] * (grad.dim() - 1)), grad, buffer, out=buffer)
        with self._range("launch", "grad_reduce"):
            self._grads = self.lane.launched(
                transport.grad_reduce(plan, self.lane.buffers.grads, totals, where=self.where)
            )

    def settle(self) -> None:
        """Complete the reduction."""
        if self._grads is not None:
            with self._range("wait", "grad_reduce"):
                self._grads.wait()
        self.phase = Phase.IDLE

    def wait_grads(self) -> Tensors:
        """Complete gradients of the masters `hot`, see `grad_dtype`."""
        if self._grads is None:
            raise ProtocolError(
                f"{self.where}: the masters had a backward and their experts had none; give the experts what take gave"
            )
        self.settle()
        totals, self._totals, self._grads = self._totals, (), None
        return totals

    def _launch_weights(self, masters: Sequence[Tensor]) -> None:
        assert self.plan is not None and self.lane is not None, "weights before a plan"
        with self._range("launch", "weight_sync"):
            passed = "" if self.phase is Phase.FORWARD else ", backward"
            slots, where = self.lane.buffers.weights, f"{self.where}{passed}"
            flight = self.lane.transport.weight_sync(self.plan, masters, slots, where=where)
            self._weights = self.lane.launched(flight)

    def _wait_weights(self) -> None:
        if self._weights is not None:
            with self._range("wait", "weight_sync"):
                self._weights.wait()
            self._weights = None

    def _range(self, role: Role, what: str) -> AbstractContextManager[Any]:
        passed = "" if self.phase is Phase.FORWARD else "backward of "
        return transfer_range(role, f"{passed}{what} of {self.where}")

"""The node between masters and experts on one simulated rank and on two: gradients, order of backward, misuse."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep.errors import ProtocolError
from moe_ep.replica import Plan, plan
from moe_ep.replica.lanes import SlotLane
from moe_ep.replica.simulated import LocalTransport, local_transports
from moe_ep.replica.transport import InFlight, SlotBuffers, Tensors
from moe_ep.replica.with_replicas import WithReplicas
from tests.unit.test_replica_transport import in_threads

LOAD = torch.tensor([[6, 1], [6, 1]])  # expert 0 of rank 0 gets a replica on rank 1


class Logged(LocalTransport):
    """Writes down when the reduction is launched, and when it is waited for."""

    def __init__(self, end: LocalTransport, log: list[str]) -> None:
        super().__init__(end._board, end.rank, end.num_ranks)
        self.log = log

    def _pull(self, plan: Plan, slot_grads: Tensors, master_grads: Tensors) -> InFlight:
        self.log.append("launch")
        flight = super()._pull(plan, slot_grads, master_grads)

        def finish() -> None:
            self.log.append("wait")
            flight.wait()

        return InFlight(finish)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log: list[str], x: Tensor) -> Tensor:
        ctx.log = log
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        ctx.log.append("attention")
        return None, grad * 2


def body(end: LocalTransport, dtype: torch.dtype, log: list[str]) -> tuple[Tensor, Tensor]:
    """y = 3 m for the master, 5 s for the slot; returns the master's gradient and the value in the slot."""
    master = torch.full((1, 2), 1.0 + end.rank, dtype=dtype, requires_grad=True)
    buffers = SlotBuffers(1, [master])
    replicas = WithReplicas([master])
    z = Attention.apply(log, master.new_ones(2, requires_grad=True))
    replicas.sync(plan(LOAD, 1), SlotLane(Logged(end, log), buffers))
    masters, slots = replicas.take()
    again = replicas.again(3 * masters[0].sum(0) + 5 * slots[0].sum(0))
    assert not again._is_view(), "FSDP2 warns of views that a module returns"
    y = again + z
    seen = slots[0].detach().clone()
    buffers.weights[0].fill_(99)  # another layer's
    y.sum().backward()
    assert not buffers.grads[0].any()
    assert master.grad is not None
    return master.grad, seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_get_the_gradients_of_their_replicas(dtype: torch.dtype) -> None:
    logs: list[list[str]] = [[], []]
    results = in_threads(local_transports(2, 10), lambda end: body(end, dtype, logs[end.rank]))
    (first, unused), (second, copied) = results  # type: ignore[misc]
    assert first.tolist() == [[8, 8]]  # 3 at home, 5 from rank 1
    assert second.tolist() == [[3, 3]]
    assert copied.tolist() == [[1, 1]]
    assert unused.tolist() == [[0, 0]]
    assert first.dtype == dtype
    assert logs == [["launch", "attention", "wait"]] * 2  # behind what was made after the node of the masters


def test_slots_are_no_parameters_and_leave_nothing_behind() -> None:
    (end,) = local_transports(1)
    master = torch.nn.Parameter(torch.ones(2, 3))
    buffers = SlotBuffers(1, [master])
    assert not any(isinstance(t, torch.nn.Parameter) or t.requires_grad for t in (*buffers.weights, *buffers.grads))
    replicas = WithReplicas([master])
    alive = weakref.ref(replicas.flight)
    del replicas
    gc.collect()
    assert alive() is None  # abandoned before it had a plan
    replicas = WithReplicas([master])
    replicas.sync(plan(torch.ones(1, 2, dtype=torch.int32), 1), SlotLane(end, buffers))
    taken = replicas.take()
    alive = weakref.ref(replicas.flight)
    del replicas, taken
    gc.collect()
    assert alive() is None  # and behind a forward without a backward


def test_calls_out_of_order_are_refused() -> None:
    (end,) = local_transports(1)
    master = torch.ones(2, 3, requires_grad=True)
    made = plan(torch.ones(1, 2, dtype=torch.int32), 1)
    lane, replicas = SlotLane(end, SlotBuffers(1, [master])), WithReplicas([master])
    with pytest.raises(ProtocolError, match="take needs the sync of a plan before it"):
        replicas.take()
    replicas.sync(made, lane)
    with pytest.raises(ProtocolError, match="have a plan already"):
        replicas.sync(made, lane)
    replicas.take()
    with pytest.raises(ProtocolError, match="take comes once for each micro-batch"):
        replicas.take()
    with pytest.raises(ProtocolError, match="give the experts what take gave"):
        replicas._masters[0].sum().backward()

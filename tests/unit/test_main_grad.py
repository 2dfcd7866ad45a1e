"""Masters with Megatron's gradient buffer: it gets the complete gradient in float32, once, and its hook runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_ep.replica import plan
from moe_ep.replica.lanes import SlotLane
from moe_ep.replica.main_grad import deliver
from moe_ep.replica.simulated import LocalTransport, local_transports
from moe_ep.replica.transport import SlotBuffers
from moe_ep.replica.with_replicas import WithReplicas
from tests.unit.test_replica_transport import in_threads

LOAD = torch.tensor([[6, 1], [6, 1]])  # expert 0 of rank 0 gets a replica on rank 1
HOME, COPY = 256.0, 1.0  # their sum is no bfloat16


class Buffered:
    """A parameter as Megatron's DistributedDataParallel keeps it, with its hook (of 0.16 and 0.19)."""

    def __init__(self, dtype: torch.dtype, flag: bool = True) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(1, 2, dtype=dtype))
        self.parameter.main_grad = torch.zeros(1, 2)  # type: ignore[attr-defined]
        if flag:
            self.parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        self.hooked: list[Tensor | None] = []
        self.parameter.register_post_accumulate_grad_hook(self._hook)

    def _hook(self, parameter: Tensor) -> None:
        self.hooked.append(parameter.grad)
        if parameter.grad is not None and not getattr(parameter, "grad_added_to_main_grad", False):
            parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None

    @property
    def main_grad(self) -> list[float]:
        found: Tensor = self.parameter.main_grad  # type: ignore[attr-defined]
        return found.flatten().tolist()


def backward_of(end: LocalTransport, master: Tensor, micro_batches: int) -> None:
    """HOME times the master, COPY times its replica on rank 1, in each micro-batch."""
    total = master.new_zeros((), dtype=torch.float32)
    for _ in range(micro_batches):
        replicas = WithReplicas([master])
        replicas.sync(plan(LOAD, 1), SlotLane(end, SlotBuffers(1, [master])))
        masters, slots = replicas.take()
        total = total + replicas.again((HOME * masters[0] + COPY * slots[0]).sum()).float()
    total.backward()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_buffer_gets_the_float32_sum_and_the_hook_runs_once(dtype: torch.dtype, micro_batches: int) -> None:
    def body(end: LocalTransport) -> list[float]:
        master = Buffered(dtype)
        backward_of(end, master.parameter, micro_batches)
        assert master.parameter.grad is None
        (grad,) = master.hooked
        assert grad is not None, "Megatron's hook insists on one where it overlaps its reduction"
        return master.main_grad

    first, second = in_threads(local_transports(2, 10), body)
    assert first == [micro_batches * (HOME + COPY)] * 2
    assert second == [micro_batches * HOME] * 2


def delivered(
    master: Buffered, total: Tensor, hot: Tensor | None = None, grad: Tensor | None = None, fresh: bool = False
) -> Tensor:
    grad = torch.zeros_like(master.parameter) if grad is None else grad
    return deliver(master.parameter, grad, total, hot, fresh=fresh)


def test_what_the_buffer_held_stays_in_it() -> None:
    master = Buffered(torch.float32)
    master.parameter.main_grad.fill_(3)  # type: ignore[attr-defined]
    delivered(master, torch.full((1, 2), 0.5))
    assert master.main_grad == [3.5, 3.5]
    assert master.parameter.grad_added_to_main_grad is True  # type: ignore[attr-defined]


def test_where_the_hook_adds_all_the_same_it_adds_nothing() -> None:
    master = Buffered(torch.float32)
    master.parameter.zero_out_wgrad = True  # type: ignore[attr-defined]
    assert delivered(master, torch.ones(1, 2)).tolist() == [[0, 0]]


def test_experts_without_copies_add_their_own_gradient_and_others_the_complete_one() -> None:
    master = Buffered(torch.bfloat16)
    master.parameter.data = torch.ones(4, 2, dtype=torch.bfloat16)
    master.parameter.main_grad = torch.full((4, 2), 0.5)  # type: ignore[attr-defined]
    grad = torch.arange(8.0).view(4, 2).bfloat16()
    delivered(master, torch.full((2, 2), 257.0), torch.tensor([2, 0]), grad)
    assert master.main_grad == [257.5, 257.5, 2.5, 3.5, 257.5, 257.5, 6.5, 7.5]


def test_a_buffer_in_bfloat16_takes_the_sum_with_one_rounding() -> None:
    master = Buffered(torch.bfloat16)
    master.parameter.main_grad = torch.full((1, 2), 1.0, dtype=torch.bfloat16)  # type: ignore[attr-defined]
    delivered(master, torch.full((1, 2), 256.5))  # 256.5 alone is rounded to 256, and 257 too
    assert master.main_grad == [258.0, 258.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_the_flag_the_gradient_comes_as_ever(dtype: torch.dtype) -> None:
    """Whoever keeps a buffer of that name and knows no flag adds what autograd brings."""
    master = Buffered(dtype, flag=False)
    total = torch.full((1, 2), HOME + COPY)
    grad = delivered(master, total)
    assert grad.dtype == dtype and torch.equal(grad, total.to(dtype))
    assert master.main_grad == [0, 0]


def test_parameters_of_megatrons_fsdp_get_their_gradient_as_ever() -> None:
    """It makes the buffer when it reduces; one that is there is a left-over."""
    master = Buffered(torch.float32)
    master.parameter.__fsdp_param__ = True  # type: ignore[attr-defined]
    assert delivered(master, torch.ones(1, 2)).tolist() == [[1, 1]]
    assert master.main_grad == [0, 0]

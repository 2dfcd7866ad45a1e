"""Pack, start and finish nodes: what is launched when, in forward and in backward, and that a launch does not wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ep.dispatch.row_transfers import AllToAllRows, GatherRows
from moe_ep.dispatch.transfer import Flight, finish, pack, start
from moe_ep.errors import PeerError, ProtocolError
from moe_ep.in_flight import InFlight
from moe_ep.streams import comm_stream
from moe_ep.testing.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=60) as ranks:
        yield ranks


class Recorder(AllToAllRows):
    """An all-to-all that notes when it is launched."""

    def __init__(self, group: Any, name: str, log: list[str]) -> None:
        super().__init__(group, [2, 2], [2, 2], 4, 4)
        self.name, self.log = name, log

    def forward(self, payload: Any) -> Any:
        self.log.append(f"launch {self.name}")
        return super().forward(payload)

    def backward(self, grads: Any) -> Any:
        self.log.append(f"launch d{self.name}")
        return super().backward(grads)


class Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, log: list[str]) -> torch.Tensor:
        ctx.name, ctx.log = name, log
        log.append(name)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.log.append(f"d{ctx.name}")
        return grads[0], None, None


def without_gradients(group: dist.ProcessGroup, rank: int) -> tuple[list[float], bool]:
    comm = comm_stream(torch.device("cpu"), group)
    x = torch.tensor([[10.0 * rank], [10.0 * rank + 1]], requires_grad=True)
    with torch.no_grad():
        packed, payload = pack(x)
        assert payload[0] is x
        flight = Flight(AllToAllRows(group, [1, 1], [1, 1], 2, 2), comm, "D0", packed)
        (received,) = finish(flight, *start(flight, *payload))
    with pytest.raises(ProtocolError, match="D0: gradients are recorded, but were not when the payload was packed"):
        start(Flight(flight.transfer, comm, "D0", packed), *payload)
    return received.view(-1).tolist(), received.requires_grad


def test_without_gradients_rows_travel_and_no_node_is_made(pool: RankPool) -> None:
    assert pool.run(without_gradients) == [([0.0, 10.0], False), ([1.0, 11.0], False)]


def two_micro_batches(group: dist.ProcessGroup, rank: int, late: bool) -> list[str]:
    log: list[str] = []
    comm = comm_stream(torch.device("cpu"), group)
    leaves = [torch.ones(4, 3, requires_grad=True) for _ in range(2)]
    flights, sent = [], list[Any]()

    def launch(packed: Any, payload: Any) -> None:
        flights.append(Flight(Recorder(group, f"D{len(flights)}", log), comm, f"D{len(flights)}", packed))
        sent.append(start(flights[-1], *(t.view_as(t) for t in payload)))

    waiting = list[Any]()
    for i in range(2):
        a = Note.apply(leaves[i], f"A{i}", log)
        if late and waiting:
            launch(*waiting.pop())
        waiting.append(pack(a))
        if not late:
            launch(*waiting.pop())
    if late:
        launch(*waiting.pop())
    outs = [Note.apply(finish(flights[i], *sent[i])[0], f"E{i}", log) for i in range(2)]
    sum((o * (i + 1)).sum() for i, o in enumerate(outs)).backward()
    assert all(torch.equal(leaf.grad, torch.full((4, 3), i + 1.0)) for i, leaf in enumerate(leaves))
    return log


@pytest.mark.parametrize("late", [False, True])
def test_backward_interleaves_as_forward_did(pool: RankPool, late: bool) -> None:
    """Also where the launch comes behind the next computation, and the payload has been through a view by then."""
    forward = ["A0", "A1", "launch D0"] if late else ["A0", "launch D0", "A1"]
    for log in pool.run(two_micro_batches, late):
        assert log == [*forward, "launch D1", "E0", "E1", "dE1", "launch dD1", "dE0", "launch dD0", "dA1", "dA0"]


def rows_of_all_ranks(group: dist.ProcessGroup, rank: int) -> None:
    comm = comm_stream(torch.device("cpu"), group)
    x = (torch.arange(6.0).view(3, 2) + 10 * rank).requires_grad_()
    packed, payload = pack(x)
    flight = Flight(GatherRows(group, 2, 3), comm, "gather", packed)
    (rows,) = finish(flight, *start(flight, *payload))
    want = torch.cat([torch.arange(6.0).view(3, 2), torch.arange(6.0).view(3, 2) + 10])
    assert torch.equal(rows, want)
    (rows * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 2), 3.0)), "the gradient is the sum over all ranks, not the own slice"


def test_the_transpose_of_a_gather_sums_over_ranks(pool: RankPool) -> None:
    """The trap of NVIDIA-NeMo/Automodel#1260: slicing instead of reducing."""
    pool.run(rows_of_all_ranks)


def launch_is_asynchronous(group: dist.ProcessGroup, rank: int) -> bool:
    comm = comm_stream(torch.device("cpu"), group)
    if rank == 1:
        dist.recv(torch.zeros(1), src=0, group=group)  # rank 0 gets here only if its launch returned
    packed, payload = pack(torch.ones(2, 4))
    flight = Flight(AllToAllRows(group, [1, 1], [1, 1], 2, 2), comm, "probe", packed)
    sent = start(flight, *payload)
    if rank == 0:
        dist.send(torch.zeros(1), dst=1, group=group)
    (got,) = finish(flight, *sent)
    return bool((got == 1).all())


def test_a_launch_returns_before_the_other_rank_takes_part(pool: RankPool) -> None:
    assert pool.run(launch_is_asynchronous) == [True, True]


def test_a_failed_collective_is_a_peer_error_that_names_it() -> None:
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer [127.0.0.1]\ndetails")

    with pytest.raises(PeerError, match=r"dispatch of layer 3, micro-batch 0: .*Connection closed by peer"):
        InFlight("dispatch of layer 3, micro-batch 0", (), [Broken()], None, ()).wait()

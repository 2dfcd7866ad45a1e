"""Ranks as threads of one process: a transport for tests and for what has no processes."""

from __future__ import annotations

import threading

import torch

from ..errors import PeerError
from .plan import Plan
from .transport import InFlight, Tensors, Transport, copies, zero_used


class _Board:
    """What the threads of a simulated group share."""

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=timeout_s)
        self.slots: list[Tensors] = [()] * num_ranks
        self.values = [0] * num_ranks


class LocalTransport(Transport):
    """R ranks as R threads of one process: pushes and pulls straight in the other threads' tensors.

    Made by `local_transports`. A thread that fails calls `abort`, so that the others raise and do not wait.
    """

    def __init__(self, board: _Board, rank: int, num_ranks: int) -> None:
        self._board, self.rank, self.num_ranks = board, rank, num_ranks

    def abort(self) -> None:
        """Let every rank that waits, or will wait, raise a PeerError."""
        self._board.barrier.abort()

    def _fence(self, what: str) -> None:
        try:
            self._board.barrier.wait()
        except threading.BrokenBarrierError as err:
            raise PeerError(f"{what}: another simulated rank failed, or took longer than the timeout") from err

    def _push(self, plan: Plan, masters: Tensors, slots: Tensors) -> InFlight:
        self._board.slots[self.rank] = slots
        self._fence("entry of weight_sync")
        with torch.no_grad():
            for copy in copies(plan):
                if copy.home == self.rank:
                    for master, slot in zip(masters, self._board.slots[copy.rank], strict=True):
                        slot[copy.slot].copy_(master[copy.local])
        return InFlight(lambda: self._fence("exit of weight_sync"))

    def _pull(self, plan: Plan, slot_grads: Tensors, master_grads: Tensors) -> InFlight:
        self._board.slots[self.rank] = slot_grads
        self._fence("entry of grad_reduce")
        for copy in copies(plan):
            if copy.home == self.rank:
                for total, part in zip(master_grads, self._board.slots[copy.rank], strict=True):
                    total[copy.local] += part[copy.slot]

        def finish() -> None:
            self._fence("exit of grad_reduce")
            zero_used(plan, self.rank, slot_grads)

        return InFlight(finish)

    def _gather(self, value: int) -> list[int]:
        self._board.values[self.rank] = value
        self._fence("checksums")
        values = list(self._board.values)
        self._fence("checksums")
        return values


def local_transports(num_ranks: int, timeout_s: float = 60.0) -> list[LocalTransport]:
    """The R ends of a simulated group, one for each thread."""
    board = _Board(num_ranks, timeout_s)
    return [LocalTransport(board, rank, num_ranks) for rank in range(num_ranks)]

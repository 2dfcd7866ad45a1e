"""The benchmark of weight push and gradient pull: checks find what is wrong, and a copy in the same run is 100 %."""

from __future__ import annotations

import argparse
import threading
from unittest import mock

import pytest
import torch
from torch import Tensor

from moe_ep.replica.simulated import LocalTransport, local_transports
from moe_ep.replica.transport import copies
from tests.unit.test_replica_transport import in_threads
from tools.bench_replica_sync import COPY, main, row_of
from tools.bench_setting import Place
from tools.bench_sync_cases import NUM_LOCAL, CopyCase, TransportCase, next_rank_plan
from tools.replica_lines import sync_lines
from tools.timing import Stopwatch

SIZES = (6, 10)
RANKS = 3
Slots = tuple[list[Tensor], list[Tensor]]


def cpu(rank: int, num_ranks: int = RANKS) -> Place:
    return Place(device=torch.device("cpu"), group=None, rank=rank, num_ranks=num_ranks)


def empty_slots() -> Slots:
    return [torch.zeros(2, n, dtype=torch.bfloat16) for n in SIZES], [torch.zeros(2, n) for n in SIZES]


def wrong_tensors(spoil: str) -> list[object]:
    def body(end: LocalTransport) -> int:
        case = TransportCase(cpu(end.rank), end, empty_slots())
        if spoil == "masters" and end.rank == 0:
            case.masters[0][0, 0] += 1
        return case.wrong()

    return in_threads(local_transports(RANKS), body)


@pytest.mark.parametrize(("spoil", "wrong"), [("", [0, 0, 0]), ("masters", [0, 0, 1])])
def test_the_check_finds_what_is_wrong(spoil: str, wrong: list[int]) -> None:
    assert wrong_tensors(spoil) == wrong


@pytest.mark.parametrize(("to", "wrong"), [(-1, [0, 0, 0]), (1, [4, 4, 4])])
def test_copies_bring_weights_to_the_rank_before_and_its_gradients_here(to: int, wrong: list[int]) -> None:
    everybody, fence = [empty_slots() for _ in range(RANKS)], threading.Barrier(RANKS, timeout=30)

    def body(end: LocalTransport) -> int:
        case = CopyCase(cpu(end.rank), everybody[end.rank], everybody[(end.rank + to) % RANKS])
        return case.wrong()

    with mock.patch.object(CopyCase, "meet", lambda _: fence.wait()):
        assert in_threads(local_transports(RANKS), body) == wrong


def test_copies_move_the_bytes_of_a_push_and_a_pull() -> None:
    marks: list[str] = []

    class Marks(Stopwatch):
        def __init__(self) -> None:
            pass

        def begin(self) -> None:
            pass

        def mark(self, name: str) -> None:
            marks.append(name)

    mine, theirs = empty_slots(), empty_slots()
    theirs[1][0].fill_(3)
    case = CopyCase(cpu(0), mine, theirs)
    case.run(0, Marks())
    assert marks == ["push", "pull"]
    assert all(torch.equal(there, master[:2]) for there, master in zip(theirs[0], case.masters, strict=True))
    assert all(torch.equal(here, there) for here, there in zip(case.pulled, theirs[1], strict=True))
    assert not any(slot.any() for slot in mine[0] + mine[1]), "the own slots are the rank behind's business"


def test_the_floor_is_the_copy_of_the_same_run() -> None:
    chosen = argparse.Namespace(hidden=2, intermediate=5)
    case = CopyCase(cpu(0), empty_slots(), empty_slots())
    us = {COPY: [10.0, 8.0, 12.0], "kernels, 16 blocks": [16.0, 11.0, 12.5]}
    copied, pushed = (row_of(cpu(0), chosen, name, case, "push", us) for name in us)
    assert copied["floor_us"] is None and copied["ratio"] is None
    assert pushed["floor_us"] == 10.0 and pushed["ratio"] == 1.25
    assert copied["algbw"] == pytest.approx(2 * sum(SIZES) * 2 / 10 / 1e3)
    assert row_of(cpu(0), chosen, COPY, case, "pull", us)["algbw"] == pytest.approx(2 * copied["algbw"])
    lines = sync_lines([copied, pushed])
    assert lines[0].endswith("copy 10.0 us (p10 8.0, p90 12.0), 0 GB/s")
    assert "kernels, 16 blocks 12.5 us" in lines[1] and lines[1].endswith("80% of the copy's rate")


def test_every_slot_holds_an_expert_of_the_next_rank() -> None:
    found = copies(next_rank_plan(cpu(0), 2))
    assert {(copy.home, copy.rank) for copy in found} == {(1, 0), (2, 1), (0, 2)}
    assert len(found) == 6
    assert all(copy.local == copy.slot < NUM_LOCAL for copy in found)


def test_arguments_that_cannot_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--slots", "5"]) == 2
    assert "1 to 4 slots" in capsys.readouterr().err

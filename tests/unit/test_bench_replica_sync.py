"""The benchmark of weight push and gradient pull: its check passes what is right and counts what is not."""

from __future__ import annotations

import pytest
import torch

from moe_ep.replica.simulated import LocalTransport, local_transports
from moe_ep.replica.transport import copies
from tests.unit.test_replica_transport import in_threads
from tools.bench_replica_sync import NUM_LOCAL, Case, main, next_rank_plan
from tools.bench_setting import Place

SIZES = (6, 10)


def wrong_tensors(spoil: str) -> list[object]:
    def body(end: LocalTransport) -> int:
        place = Place(device=torch.device("cpu"), group=None, rank=end.rank, num_ranks=end.num_ranks)
        slots = (
            [torch.zeros(2, n, dtype=torch.bfloat16) for n in SIZES],
            [torch.zeros(2, n) for n in SIZES],
        )
        case = Case(place, end, slots, SIZES)
        if spoil == "masters" and end.rank == 0:
            case.masters[0][0, 0] += 1
        return case.wrong()

    return in_threads(local_transports(3), body)


@pytest.mark.parametrize(("spoil", "wrong"), [("", [0, 0, 0]), ("masters", [0, 0, 1])])
def test_the_check_finds_what_is_wrong(spoil: str, wrong: list[int]) -> None:
    assert wrong_tensors(spoil) == wrong


def test_every_slot_holds_an_expert_of_the_next_rank() -> None:
    place = Place(device=torch.device("cpu"), group=None, rank=0, num_ranks=3)
    found = copies(next_rank_plan(place, 2))
    assert {(copy.home, copy.rank) for copy in found} == {(1, 0), (2, 1), (0, 2)}
    assert len(found) == 6
    assert all(copy.local == copy.slot < NUM_LOCAL for copy in found)


def test_arguments_that_cannot_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--slots", "5"]) == 2
    assert "1 to 4 slots" in capsys.readouterr().err

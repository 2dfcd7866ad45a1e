"""Weights to replicas and gradients home, between simulated ranks: threads of this process."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_ep.errors import InputError, PeerError, PlanError
from moe_ep.replica import Plan, plan
from moe_ep.replica.simulated import LocalTransport, local_transports
from moe_ep.replica.transport import Transport, copies

SHAPES = ((3, 5), (4,))


def in_threads(ends: list[LocalTransport], body: Callable[[LocalTransport], object]) -> list[object]:
    """body(end) on a thread for each rank; a rank's result, or its exception as a value."""
    results: list[object] = [None] * len(ends)

    def rank(end: LocalTransport) -> None:
        try:
            results[end.rank] = body(end)
        except Exception as err:
            results[end.rank] = err
            if not isinstance(err, PlanError):  # that one every rank raises by itself
                end.abort()

    threads = [threading.Thread(target=rank, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


def hot_plan(num_ranks: int = 4, seed: int = 0) -> Plan:
    """Two experts a rank; rank 0's are hot, others by chance."""
    rng = random.Random(seed)
    totals = [rng.randrange(20, 60) for _ in range(2 * num_ranks)]
    totals[0], totals[1] = 300, 200
    made = plan(torch.tensor([totals] * num_ranks), 2)
    assert int(made.num_replicas()) >= num_ranks - 1
    return made


def tensors(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((rows, *shape), generator=generator).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_hold_their_masters_bit_for_bit_and_others_what_they_held(dtype: torch.dtype) -> None:
    made = hot_plan()
    masters = [tensors(2, rank, dtype) for rank in range(4)]
    slots = [tensors(3, 100 + rank, dtype) for rank in range(4)]  # one slot more than the plan knows
    before = [[t.clone() for t in parts] for parts in slots]
    in_threads(local_transports(4), lambda end: end.weight_sync(made, masters[end.rank], slots[end.rank]).wait())
    filled = {(copy.rank, copy.slot): copy for copy in copies(made)}
    assert len(filled) == int(made.num_replicas())
    for rank in range(4):
        for slot in range(3):
            copy = filled.get((rank, slot))
            for part in range(2):
                expected = before[rank][part][slot] if copy is None else masters[copy.home][part][copy.local]
                assert torch.equal(slots[rank][part][slot], expected)


def test_gradients_are_added_home_first_then_by_rank_and_used_slots_are_zeroed() -> None:
    made = hot_plan()
    totals, parts = [tensors(2, rank) for rank in range(4)], [tensors(3, 100 + rank) for rank in range(4)]
    expected = [[t.clone() for t in group] for group in totals]
    backwards = [[t.clone() for t in group] for group in totals]
    kept = [[t.clone() for t in group] for group in parts]
    for copy in copies(made):
        for part in range(2):
            expected[copy.home][part][copy.local] += parts[copy.rank][part][copy.slot]
    for copy in reversed(copies(made)):
        for part in range(2):
            backwards[copy.home][part][copy.local] += parts[copy.rank][part][copy.slot]
            kept[copy.rank][part][copy.slot] = 0
    in_threads(local_transports(4), lambda end: end.grad_reduce(made, parts[end.rank], totals[end.rank]).wait())
    for got, want in ((totals, expected), (parts, kept)):
        assert all(
            torch.equal(a, b) for ours, theirs in zip(got, want, strict=True) for a, b in zip(ours, theirs, strict=True)
        )
    assert not torch.equal(totals[0][0], backwards[0][0])  # or the order would be no question


def test_the_order_of_copies_is_by_expert_then_by_rank() -> None:
    made = hot_plan()
    order = [(copy.home * 2 + copy.local, copy.rank) for copy in copies(made)]
    assert order == sorted(order)
    assert any(first[0] == second[0] for first, second in itertools.pairwise(order))  # an expert has two


class Delayed(LocalTransport):
    """Leaves out one fence from the second operation on; rank 0 is slow behind its entry fence."""

    def __init__(self, end: LocalTransport, missing: str) -> None:
        super().__init__(end._board, end.rank, end.num_ranks)
        self.missing, self.operations = missing, 0

    def _fence(self, what: str) -> None:
        self.operations += what.startswith("entry")
        if not (self.missing and what.startswith(self.missing) and self.operations > 1):
            super()._fence(what)
        if what.startswith("entry") and self.rank == 0 and self.missing != "entry":
            time.sleep(0.03)  # the home moves late; without an exit fence nobody waits for it


def weights_of_rounds(end: Transport, late: bool) -> list[str]:
    """Three layers share the slots; a holder reads them some time after they were filled."""
    made, wrong = hot_plan(), []
    slots = tensors(2, 50 + end.rank)
    for layer in range(3):
        masters = [tensors(2, 10 * layer + rank) for rank in range(4)]
        end.weight_sync(made, masters[end.rank], slots).wait()
        time.sleep(0.03 if late and end.rank else 0)
        for copy in copies(made):
            if copy.rank == end.rank and not torch.equal(slots[0][copy.slot], masters[copy.home][0][copy.local]):
                wrong.append(f"slot {copy.slot} of rank {end.rank} in layer {layer}")
    return wrong


def gradients_of_rounds(end: Transport, late: bool) -> list[str]:
    """Three layers share the slots' gradients; a holder makes its own late."""
    made, wrong = hot_plan(), []
    slots = [torch.zeros_like(t) for t in tensors(2, 0)]
    for layer in range(3):
        parts = [tensors(2, 10 * layer + rank) for rank in range(4)]
        totals = [torch.zeros_like(t) for t in tensors(2, 0)]
        expected = [t.clone() for t in totals]
        time.sleep(0.03 if late and end.rank else 0)
        for copy in copies(made):
            if copy.rank == end.rank:
                for slot, part in zip(slots, parts[end.rank], strict=True):
                    slot[copy.slot] = part[copy.slot]
            if copy.home == end.rank:
                for total, part in zip(expected, parts[copy.rank], strict=True):
                    total[copy.local] += part[copy.slot]
        end.grad_reduce(made, slots, totals).wait()
        wrong += [f"master of rank {end.rank} in layer {layer}"] * (not torch.equal(totals[0], expected[0]))
        wrong += [f"slots of rank {end.rank} are not zero"] * bool(any(slot.any() for slot in slots))
    return wrong


@pytest.mark.parametrize("rounds", [weights_of_rounds, gradients_of_rounds])
@pytest.mark.parametrize("missing", ["", "entry", "exit"])
def test_each_fence_is_needed(rounds: Callable[[Transport, bool], list[str]], missing: str) -> None:
    ends = [Delayed(end, missing) for end in local_transports(4, timeout_s=20)]
    found = in_threads(ends, lambda end: rounds(end, missing != "exit"))
    problems = [problem for rank in found for problem in rank]  # type: ignore[attr-defined]
    assert bool(problems) == bool(missing), problems


def test_a_rank_that_fails_lets_the_others_raise() -> None:
    made = hot_plan()

    def body(end: LocalTransport) -> None:
        if end.rank == 2:
            raise ValueError("planted")
        end.weight_sync(made, tensors(2, 0), tensors(2, 1)).wait()

    results = in_threads(local_transports(4), body)
    assert isinstance(results[2], ValueError)
    assert all(isinstance(results[rank], PeerError) for rank in (0, 1, 3))


def test_a_rank_that_does_not_come_is_an_error_after_the_timeout() -> None:
    made = hot_plan(2)
    (end, _) = local_transports(2, timeout_s=0.1)
    with pytest.raises(PeerError, match="entry of weight_sync: another simulated rank failed, or took longer"):
        end.weight_sync(made, tensors(2, 0), tensors(2, 1))


def test_plans_that_differ_between_ranks_are_an_error_everywhere() -> None:
    plans = [hot_plan(seed=int(rank == 2)) for rank in range(4)]
    assert in_threads(local_transports(4), lambda end: end.agree(plans[0])) == [None] * 4
    results = in_threads(local_transports(4), lambda end: end.agree(plans[end.rank]))
    assert all(isinstance(result, PlanError) for result in results)
    assert "the replica plans of ranks [2] differ from rank 0's" in str(results[0])


@pytest.mark.parametrize(
    ("masters", "slots", "text"),
    [
        (torch.zeros(3, 4), torch.zeros(2, 4), r"masters \(3, 4\) and slots \(2, 4\) do not fit a plan with 2 masters"),
        (torch.zeros(2, 5), torch.zeros(2, 4), r"masters \(2, 5\) and slots \(2, 4\)"),
        (torch.zeros(2, 4), torch.zeros(1, 4), "and 2 slots on a rank"),
        (
            torch.zeros(2, 4),
            torch.zeros(2, 4, dtype=torch.bfloat16),
            "torch.float32 on cpu, slots torch.bfloat16 on cpu",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(masters: Tensor, slots: Tensor, text: str) -> None:
    end = local_transports(4)[0]
    with pytest.raises(InputError, match=text):
        end.weight_sync(hot_plan(), [masters], [slots])


def test_gradients_of_another_dtype_and_plans_of_another_group_are_refused() -> None:
    end = local_transports(4)[0]
    half = [torch.zeros(2, 4, dtype=torch.bfloat16)]
    with pytest.raises(InputError, match=r"gradients are added in float32, got torch\.bfloat16"):
        end.grad_reduce(hot_plan(), half, half)
    with pytest.raises(InputError, match="a plan for 2 ranks on a transport of 4"):
        end.weight_sync(hot_plan(2), tensors(2, 0), tensors(2, 0))


def test_a_second_wait_does_nothing() -> None:
    def body(end: LocalTransport) -> None:
        flight = end.weight_sync(hot_plan(), tensors(2, 0), tensors(2, 1))
        flight.wait()
        flight.wait()

    assert in_threads(local_transports(4, timeout_s=5), body) == [None] * 4

"""Faults: codes to errors, own error against peers' errors, the device record."""

from __future__ import annotations

import pytest
import torch

from moe_ep import InputError, NonFiniteError, PeerError, ProtocolError, Routing
from moe_ep.fault_words import routing_status, status_words, words_by_ops
from moe_ep.faults import Fault, FaultRecord, place_of, raise_faults


def routing(ids: list[list[int]], bad_tokens: int | None = None) -> Routing:
    expert_ids = torch.tensor(ids)
    bad = None if bad_tokens is None else torch.tensor(bad_tokens)
    return Routing(expert_ids=expert_ids, weights=torch.ones(expert_ids.shape), num_experts=4, bad_tokens=bad)


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (routing([[0, 3], [-1, 2]]), (Fault.NONE, 0)),
        (routing([[4, -2], [-1, 2]]), (Fault.BAD_IDS, 2)),
        (routing([[4, 0], [-1, -1]], bad_tokens=3), (Fault.NON_FINITE, 3)),
        (routing([[1, 0]], bad_tokens=0), (Fault.NONE, 0)),
    ],
)
def test_the_status_of_a_routing_names_its_worst_fault(value: Routing, want: tuple[int, int]) -> None:
    assert tuple(routing_status(value).tolist()) == want


@pytest.mark.parametrize("duplicates", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "value",
    [
        routing([[0, 3], [-1, 2]]),
        routing([[4, -2], [-1, 2]], bad_tokens=0),
        routing([[1, 1], [2, 2], [-1, -1]]),
        routing([[1, 1], [2, 4]]),
        routing([[1, 1], [2, 4]], bad_tokens=3),
    ],
)
def test_the_kernels_find_the_same_words(value: Routing, grad: bool, duplicates: bool) -> None:
    with torch.set_grad_enabled(grad):
        words = status_words(value, 77, duplicates=duplicates)
        assert words.tolist() == [*routing_status(value, duplicates=duplicates).tolist(), 77]
        assert words_by_ops(value, 77, duplicates=duplicates).tolist() == words.tolist()


def test_no_fault_raises_nothing() -> None:
    raise_faults([(0, 0, 5), (0, 0, 5)], 1, "layer 0, micro-batch 0", 4)


def test_words_that_have_not_come_are_seen() -> None:
    where = "layer 0, micro-batch 1"
    raise_faults([(0, 0, 1), (0, 0, 1)], 0, where, 4, place=1)
    for stale in [(-1, -1, -1), (0, 0, 0), (2**62, 0, 1)]:
        with pytest.raises(ProtocolError, match=r"layer 0, micro-batch 1: .* counts were read before they had come"):
            raise_faults([stale, (0, 0, 1)], 0, where, 4, place=1)
    with pytest.raises(PeerError, match=r"rank 1 .* no fault of code 77; install one version"):
        raise_faults([(0, 0, 1), (77, 0, 1)], 0, where, 4, place=1)


def test_the_own_fault_is_raised_as_what_it_is_and_a_peers_as_peer_error() -> None:
    statuses = [(0, 0, 5), (int(Fault.NON_FINITE), 7, 6)]
    with pytest.raises(NonFiniteError, match=r"layer 2, micro-batch 1: non-finite router logits in 7 tokens"):
        raise_faults(statuses, 1, "layer 2, micro-batch 1", 4)
    with pytest.raises(PeerError, match=r"rank 1 reported.*layer 2, micro-batch 1.*7 tokens"):
        raise_faults(statuses, 0, "layer 2, micro-batch 1", 4)


def test_the_record_is_sticky_keeps_layer_micro_batch_and_value_and_clears_when_raised() -> None:
    record = FaultRecord(torch.device("cpu"), 4)
    record.raise_if_set()
    record.note(torch.tensor([int(Fault.BAD_IDS), 5]), layer=17, micro_batch=3)
    record.note(torch.tensor([0, 0]), layer=18, micro_batch=0)
    with pytest.raises(InputError, match=r"layer 17, micro-batch 3: 5 expert ids lie outside \[-1, 4\)"):
        record.raise_if_set()
    record.raise_if_set()


def test_the_record_keeps_the_worse_of_two_faults() -> None:
    record = FaultRecord(torch.device("cpu"), 4)
    record.note(torch.tensor([int(Fault.NON_FINITE), 2]), layer=1, micro_batch=0)
    record.note(torch.tensor([int(Fault.BAD_IDS), 9]), layer=2, micro_batch=0)
    with pytest.raises(NonFiniteError, match="layer 1, micro-batch 0: non-finite router logits in 2 tokens"):
        record.raise_if_set()


def test_an_expert_twice_in_a_token_is_a_fault_only_where_a_back_end_cannot_serve_it() -> None:
    twice = routing([[1, 1, 0], [2, -1, -1], [3, 0, 3]])
    assert routing_status(twice).tolist() == [Fault.NONE, 0]
    assert routing_status(twice, duplicates=False).tolist() == [Fault.DUPLICATES, 2]
    assert routing_status(routing([[1, 0, 2], [-1, -1, -1]]), duplicates=False).tolist() == [Fault.NONE, 0]
    with pytest.raises(InputError, match="2 tokens name an expert twice"):
        raise_faults([(int(Fault.DUPLICATES), 2, 0)], 0, "layer 0, micro-batch 0", 4)


def test_ranks_at_another_layer_or_micro_batch_are_a_fault_of_all() -> None:
    words = [(0, 0, place_of(2, 0)), (0, 0, place_of(2, 1)), (0, 0, place_of(3, 0))]
    for rank in range(3):
        with pytest.raises(
            PeerError, match="rank 0 at layer 2, micro-batch 0, rank 1 at layer 2, micro-batch 1, rank 2 at layer 3"
        ):
            raise_faults(words, rank, "layer 2, micro-batch 0", 4)


@pytest.mark.parametrize("micro_batch", [0, 1, 1023])
def test_ranks_that_interleave_different_numbers_are_a_fault_of_all(micro_batch: int) -> None:
    words = [(0, 0, place_of(65535, micro_batch, num)) for num in (2, 1, 2)]
    for rank in range(3):
        with pytest.raises(PeerError, match="rank 0 interleaves 2, rank 1 interleaves 1, rank 2 interleaves 2"):
            raise_faults(words, rank, "layer 65535", 4, place=words[rank][2])


def test_a_place_fits_into_the_ints_that_carry_it() -> None:
    places = {place_of(layer, i, num) for layer in (0, 1, 65535) for i in (0, 1, 7) for num in (1, 2, 8, 63)}
    assert len(places) == 3 * 3 * 4 and max(places) < 1 << 32
    assert place_of(3, 5, 1000) >> 16 == 3, "whatever is too large stays out of the layer"

"""What a user's pieces of a layer return, and what a user hands to a stack: a sentence on each rank, no waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import InputError, PeerError, raise_on_all_ranks
from moe_ep.testing.ranks import RankPool
from tests.ranks.small_stack import H, same, small_stack

Piece = Callable[[Tensor], Any]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=60) as ranks:
        yield ranks


def micro_batches() -> list[Tensor]:
    """Two sequences each: a tensor that is taken for a pair comes apart without a word."""
    return [torch.randn(2, 3, H, generator=torch.Generator().manual_seed(i)) for i in range(2)]


# method, what it returns, what the message says behind "must return "
WRONG: dict[str, tuple[str, Piece, str]] = {
    "one tensor": ("attention", lambda x: x, "two tensors (h, n) of shape [2, 3, 16], the residual"),
    "three": ("attention", lambda x: (x, x, x), "two tensors (h, n) of shape [2, 3, 16], the residual"),
    "nothing": ("attention", lambda x: None, "two tensors (h, n) of shape [2, 3, 16], the residual"),
    "n flat": ("attention", lambda x: (x, x.flatten(0, 1)), "tensors of shape [2, 3, 16], like its input, got a ten"),
    "h flat": ("attention", lambda x: (x.flatten(0, 1), x), "tensors of shape [2, 3, 16], like its input, got a ten"),
    "h one row": ("attention", lambda x: (x[:1], x), "tensors of shape [2, 3, 16], like its input, got a tensor [1,"),
    "n nothing": ("attention", lambda x: (x, None), "tensors of shape [2, 3, 16], like its input, got NoneType"),
    "shared one row": ("shared", lambda n: n[:, :1], "tensors of shape [2, 3, 16], like its input, got a tensor [2,"),
    "shared a tuple": ("shared", lambda n: (n, n), "tensors of shape [2, 3, 16], like its input, got 2 of them"),
}


def body_piece(group: dist.ProcessGroup, rank: int, name: str) -> None:
    method, piece, said = WRONG[name]
    model = small_stack(group)
    want = model(micro_batches())[0]
    for number, where in ((0, "layer 0"), (1, "a dense layer"), (2, "layer 2")):
        for wrong in ((0, 1), (1,)):
            layer: Any = model.layers[number]
            if rank in wrong:
                setattr(layer, method, piece)
            # behind the last combine nothing of the layer waits for the other rank
            with pytest.raises(InputError if rank in wrong else PeerError) as caught, raise_on_all_ranks(group):
                model(micro_batches())
            assert f"{where}, micro-batch 0: {method} of SmallLayer must return {said}" in str(caught.value)
            layer.__dict__.pop(method, None)
            same(model(micro_batches())[0], want, "the next forward")


@pytest.mark.parametrize("name", WRONG)
def test_a_piece_that_returns_something_else(pool: RankPool, name: str) -> None:
    pool.run(body_piece, name, timeout_s=60)


# what a stack is called with; x: two sequences, so that the first axis looks like two micro-batches
CALLS: dict[str, tuple[Callable[[Tensor], tuple[Any, Any]], str]] = {
    "a tensor": (
        lambda x: (x, None),
        "got a tensor [2, 3, 16] in place of a list of micro-batches; pass lists: 1 tens",
    ),
    "a tensor and its mask": (lambda x: (x, x[..., 0] > 0), "got a tensor [2, 3, 16] in place of a list of micro-batc"),
    "one mask for two": (lambda x: ([x, x], x[..., 0] > 0), "got a tensor [2, 3] in place of a list of masks; pass l"),
    "a mask without list": (
        lambda x: ([x], x[:1, :, 0] > 0),
        "got a tensor [1, 3] in place of a list of masks; pass l",
    ),
    "nothing": (lambda x: (None, None), "got NoneType in place of a list of micro-batches; pass lists: M tensor(s)"),
    "a generator": (lambda x: (iter([x]), None), "got list_iterator in place of a list of micro-batches; pass lists"),
    "none": (lambda x: ([], None), "got 0 micro-batches; give at least one"),
    "too few masks": (lambda x: ([x, x], [None]), "got 2 micro-batches and 1 masks; give at least one, and one mask"),
    "a micro-batch of None": (lambda x: ([x, None], None), "micro-batch 1 must be a Tensor, got NoneType"),
    "lists in a list": (lambda x: ([[x, x]], None), "micro-batch 0 must be a Tensor, got 2 of them"),
}


def body_call(group: dist.ProcessGroup, rank: int, name: str) -> None:
    make, said = CALLS[name]
    model = small_stack(group)
    want = model(micro_batches())[0]
    for wrong in ((0, 1), (1,)):
        arguments = make(micro_batches()[0]) if rank in wrong else (micro_batches(), None)
        with pytest.raises(InputError if rank in wrong else PeerError) as caught:
            model(*arguments)
        assert said in str(caught.value), str(caught.value)
        same(model(micro_batches())[0], want, "the next forward")


@pytest.mark.parametrize("name", CALLS)
def test_a_stack_that_is_called_with_something_else(pool: RankPool, name: str) -> None:
    pool.run(body_call, name, timeout_s=60)


def test_a_layer_that_is_called_with_tensors_in_place_of_pending_outputs() -> None:
    layer = small_stack(None).layers[0]
    with pytest.raises(InputError, match=r"micro-batch 0 must be a Pending, got a tensor \[2, 3, 16\]"):
        layer(micro_batches())


def body_mask(group: dist.ProcessGroup, rank: int) -> None:
    model = small_stack(group)
    masks = [None, torch.ones(3, dtype=torch.bool) if rank == 1 else None]
    with pytest.raises(InputError if rank == 1 else PeerError) as caught:
        model(micro_batches(), masks)
    said = "layer 0, micro-batch 1: " + (
        "valid must be (2, 3)" if rank == 1 else "it failed before its tokens were sent"
    )
    assert said in str(caught.value)


def test_a_mask_of_another_shape_is_told_with_its_micro_batch(pool: RankPool) -> None:
    pool.run(body_mask, timeout_s=60)

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

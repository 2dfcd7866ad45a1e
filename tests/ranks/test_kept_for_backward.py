"""What a micro-batch's dispatch and combine keep for backward: integers alone, as many bytes as the docstrings say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import build_dispatcher, close_dispatchers, find_dispatcher
from moe_ep.routing import Routing
from moe_ep.testing.ranks import RankPool

E, K, H, BLOCK = 8, 3, 64, 12
TOKENS = (7, 12)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=60) as ranks:
        yield ranks


def kept(group: dist.ProcessGroup | None, rank: int, name: str) -> tuple[int, int]:
    """Bytes of integers, each memory once, and the number of expert rows of this rank."""
    config = DispatchConfig(name=name, num_experts=E, top_k=K, hidden_size=H, max_tokens=BLOCK)
    dispatcher = build_dispatcher(config, group)
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, E, (TOKENS[rank], K), generator=generator)
    weights = torch.rand(TOKENS[rank], K, generator=generator, requires_grad=True)
    x = torch.randn(TOKENS[rank], H, generator=generator, requires_grad=True)
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        ticket = dispatcher.dispatch_preprocess(x, Routing(expert_ids=ids, weights=weights, num_experts=E))
        dispatcher.dispatch(ticket)
        rows = dispatcher.dispatch_postprocess(ticket)
    y_NH = rows.rows() * rows.row_weights[:, None]  # what experts keep is theirs
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        dispatcher.combine_preprocess(ticket, y_NH)
        dispatcher.combine(ticket)
        y = dispatcher.combine_postprocess(ticket)
    assert not any(tensor.is_floating_point() for tensor in saved.values())
    y.sum().backward()
    close_dispatchers(group)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()), rows.capacity


# of T tokens of this rank, N expert rows and R ranks
SIZES = {
    "local": lambda T, N, R: 12 * T * K + 4 * (E + 1),
    "all2all": lambda T, N, R: 12 * T * K + 8 * N * (R > 1) + 4 * (E + 1),
    "agrs": lambda T, N, R: 12 * R * BLOCK * K + 4 * R * (BLOCK + T) + 4 * (E // R + 1),
}


@pytest.mark.parametrize("name", SIZES)
def test_one_rank(name: str) -> None:
    size, num_rows = kept(None, 0, name)
    assert num_rows == TOKENS[0] * K
    assert size == SIZES[name](TOKENS[0], num_rows, 1)


@pytest.mark.parametrize("name", ["all2all", "agrs"])
def test_two_ranks(pool: RankPool, name: str) -> None:
    found = pool.run(kept, name)
    assert [size for size, _ in found] == [SIZES[name](TOKENS[rank], found[rank][1], 2) for rank in range(2)]


@pytest.mark.parametrize("name", SIZES)
def test_the_docstring_says_so(name: str) -> None:
    """The formulas above, as they stand there."""
    formulas = {
        "local": "12 T K + 4 (E + 1)", "all2all": "12 T K + 8 N + 4 (E + 1)",
        "agrs": "12 R C K + 4 R (C + T) + 4 (L + 1)",
    }  # fmt: skip
    assert f"Kept for backward: {formulas[name]} bytes of integers" in (find_dispatcher(name).__doc__ or "")

"""What Megatron's router counts of interleaved pieces: padding left out, and nothing forgotten in a second pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep.testing.ranks import RankPool
from tests.ranks import megatron_cpu as cpu

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (moe-ep[megatron])")

BALANCED: dict[str, Any] = dict(
    calculate_per_token_loss=True, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01
)  # fmt: skip
COUNTING: dict[str, Any] = dict(  # beside padding, both versions of Megatron fail on it
    BALANCED, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True
)
WHOLE: dict[str, Any] = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120) as ranks:
        yield ranks


def routers(model: Any) -> list[Any]:
    from moe_ep.integrations.megatron import moe_layers

    return [layer.router for layer in moe_layers(model)]


def counted(model: Any) -> list[Tensor]:
    """The routers' buffers: tokens of each expert, and the bias."""
    return [b.clone() for router in routers(model) for _, b in sorted(router.named_buffers())]


def block_output(model: Any, x: Tensor, padding: Tensor | None) -> Tensor:
    y: Tensor = model.decoder(x, torch.ones(1, 1, 12, 12).triu(1).bool(), padding_mask=padding)
    y.square().sum().backward()
    return y.detach()


@pytest.mark.parametrize("changes", [{}, WHOLE], ids=["kept", "recomputed"])
def test_padding_is_cut_like_the_batch(pool: RankPool, changes: dict[str, Any]) -> None:
    for serial, together, unpadded in pool.run(with_padding, changes):
        assert torch.equal(together[0], serial[0])
        for got, want in zip(together[1], serial[1], strict=True):
            assert (got - want).double().norm() <= 2e-6 * want.double().norm() > 0
        assert not all(map(torch.equal, serial[1], unpadded[1])), "padding takes no part in the balancing loss"


def with_padding(group: Any, rank: int, changes: dict[str, Any]) -> Any:
    from moe_ep.integrations.megatron import use_domino

    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(12, 4, 16, generator=generator).requires_grad_()  # as an embedding does
    padding = torch.arange(12).expand(4, 12) >= torch.tensor([[5], [12], [9], [2]])
    found = []
    with cpu.on_cpu(), cpu.parallel(2):
        for pieces, mask in ((1, padding), (2, padding), (2, None)):
            model = use_domino(cpu.build("all2all", **BALANCED, **changes), pieces)
            if pieces == 1:  # one piece after the other, the last one's gradient first
                halves = [(x[:, i : i + 2], padding[i : i + 2]) for i in (2, 0)]
                y = torch.cat([block_output(model, *half) for half in halves][::-1], dim=1)
            else:
                y = block_output(model, x, mask)
            found.append((y, [router.weight.grad for router in routers(model)]))
    return found


def test_a_second_pass_leaves_what_was_counted_since(pool: RankPool) -> None:
    """Two batches go forward before the first one's second pass, as in a pipeline."""
    for (kept, once), (again, also) in pool.run(counted_twice):
        assert sum(map(Tensor.sum, kept)) > sum(map(Tensor.sum, once)) > 0
        assert all(map(torch.equal, again, kept)) and all(map(torch.equal, also, once))


def counted_twice(group: Any, rank: int) -> Any:
    from moe_ep.integrations.megatron import use_domino

    found = []
    with cpu.on_cpu(), cpu.parallel(2):
        for changes in ({}, WHOLE):
            model = use_domino(cpu.build("all2all", **COUNTING, **changes), 2)
            first = cpu.losses(model, rank, 0, sequences=4).sum()
            once = counted(model)
            second = cpu.losses(model, rank, 1, sequences=4).sum()
            second.backward()
            first.backward()
            found.append((counted(model), once))
    return found

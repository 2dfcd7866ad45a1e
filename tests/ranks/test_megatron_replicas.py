"""Copies of our layer's experts under Megatron's DistributedDataParallel: `main_grad` is the same without copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_ep import MoEConfig, MoELayer
from moe_ep.testing.ranks import RankPool
from tests.ranks import megatron_cpu as cpu

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (moe-ep[megatron])")
from tests.ranks.test_megatron_grads import fused_gradients

H, SLOTS = 16, (0, 2)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120) as ranks:
        yield ranks


class Model(torch.nn.Module):
    """A linear layer of Megatron's, whose weight gradient may be fused, and a MoE layer of ours."""

    def __init__(self, config: Any, group: Any, slots: int) -> None:
        from megatron.core.tensor_parallel import ColumnParallelLinear

        super().__init__()
        torch.manual_seed(3)
        given: dict[str, Any] = dict(config=config, init_method=torch.nn.init.xavier_normal_, bias=False)
        self.linear = ColumnParallelLinear(H, H, **given)
        sizes: dict[str, Any] = dict(hidden_size=H, expert_intermediate_size=24, num_experts=8, top_k=2, max_tokens=24)
        self.moe = MoELayer(MoEConfig(**sizes, replica={"slots": slots}), group)
        for parameter in self.moe.experts.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]  # Megatron's mark of experts

    def forward(self, x: Any) -> Any:
        y, aux = self.moe(self.linear(x)[0])
        return y.square().sum() + aux.loss, aux


def batch(rank: int, step: int) -> Any:
    """Tokens that resemble each other, so that some experts are popular."""
    generator = torch.Generator().manual_seed(10 * step)
    common = 2 * torch.randn(H, generator=generator)
    return common + torch.randn(24 - rank, H, generator=generator.manual_seed(10 * step + rank + 1))


def accumulated(group: Any, rank: int, sharded: bool, fused: bool) -> Any:
    """By slots: main_grad after two batches, the first of which is not reduced; copies made; fused additions."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    found = []
    with cpu.on_cpu(), cpu.parallel(2):
        config = cpu.small_config(gradient_accumulation_fusion=fused)
        for slots in SLOTS:
            calls: list[tuple[int, ...]] = []
            with fused_gradients(calls):
                model = Model(config, parallel_state.get_expert_model_parallel_group(), slots)
                settings = DistributedDataParallelConfig(use_distributed_optimizer=sharded, overlap_grad_reduce=True)
                wrapped = DistributedDataParallel(config, settings, model)
                wrapped.zero_grad_buffer()
                with wrapped.no_sync():
                    first, aux = wrapped(batch(rank, 0))
                    first.backward()
                second, more = wrapped(batch(rank, 1))
                second.backward()
                wrapped.finish_grad_sync()
            grads = {name: p.main_grad.clone() for name, p in model.named_parameters()}
            assert all(p.grad is None for p in model.parameters())
            copies = [torch.zeros(()) if slots == 0 else each.replicas.float() for each in (aux, more)]
            found.append((grads, sum(map(float, copies)), len(calls), _marks(model)))
    return found


def _marks(model: Model) -> dict[str, bool]:
    return {name: bool(p.grad_added_to_main_grad) for name, p in model.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sharded", [False, True], ids=["reduced", "reduce-scattered"])
def test_gradient_buffers_are_those_without_copies(pool: RankPool, sharded: bool, fused: bool) -> None:
    results = pool.run(accumulated, sharded, fused)
    assert sum(copies for _, (_, copies, *_) in results) > 0, "experts of one rank had copies on the other"
    for (want, _, plain_calls, plain_marks), (got, _, calls, marks) in results:
        assert calls == plain_calls == (2 if fused else 0)
        assert plain_marks == {name: fused and name.startswith("linear") for name in plain_marks}
        assert marks == plain_marks | {name: True for name in marks if ".experts." in name}
        assert got.keys() == want.keys()
        for name, grad in want.items():
            assert grad.dtype == torch.float32 and (".experts." not in name or grad.norm() > 0)
            assert (got[name] - grad).double().norm() <= 4e-6 * grad.double().norm(), name

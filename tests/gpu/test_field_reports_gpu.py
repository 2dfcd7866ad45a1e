"""Field reports of streams and memory on two GPUs. See docs/field_reports.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import DominoLayer, DominoStack, MoEConfig, MoELayer, Routing, build_dispatcher, close_dispatchers
from moe_ep.testing.ranks import RankPool
from tests.ranks.small_stack import MOE, H, inputs, small_stack

pytestmark = pytest.mark.gpu(2)
MIB = 2**20
GROUPED = dict(dispatcher="agrs", router="grouped", num_groups=2, top_k=2)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=200) as ranks:
        yield ranks


def masked_ids(rank: int, number: int) -> tuple[Tensor, Tensor]:
    """Ids [64, 2] of 8 experts, and which of them are masked."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    ids = torch.rand(64, 8, generator=generator).argsort(1)[:, :2]
    return ids, torch.rand(64, 2, generator=generator) < 0.5


def body_masked(group: dist.ProcessGroup, rank: int, name: str) -> None:
    dispatcher = build_dispatcher(MoEConfig(**(MOE | dict(dispatcher=name, max_tokens=64))).dispatch(), group)
    x, weights = torch.randn(64, H, device="cuda"), torch.rand(64, 2, device="cuda")
    for number in range(50):
        ids, mask = (t.to("cuda") for t in masked_ids(rank, number))
        torch.cuda._sleep(10_000_000)  # some milliseconds: what follows is far from done when the host goes on
        ids.masked_fill_(mask, -1)
        ticket = dispatcher.dispatch_preprocess(x, Routing(expert_ids=ids, weights=weights, num_experts=8))
        dispatcher.dispatch(ticket)
        rows = dispatcher.dispatch_postprocess(ticket)
        got = rows.tokens_per_expert.tolist()
        dispatcher.combine_preprocess(ticket, rows.rows())
        dispatcher.combine(ticket)
        dispatcher.combine_postprocess(ticket)
        both = [given.masked_fill(hidden, -1) for given, hidden in (masked_ids(r, number) for r in range(2))]
        routes = torch.cat([one.flatten() for one in both])
        want = torch.bincount(routes[routes >= 0], minlength=8)[4 * rank : 4 * rank + 4].tolist()
        assert got == want, f"repeat {number}"


@pytest.mark.parametrize("name", ["all2all", "agrs", "direct"])
def test_ids_masked_behind_a_long_kernel(pool: RankPool, name: str) -> None:
    """pytorch/torchtitan#3413."""
    pool.run(body_masked, name)


def body_fill(group: dist.ProcessGroup, rank: int, name: str) -> None:
    layer = MoELayer(MoEConfig(**(MOE | dict(dispatcher=name, experts="loop"))), group).to("cuda")
    layer.reset_parameters(7)
    x = torch.randn(8, H, device="cuda")
    want = layer(x)[0].detach()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(200):
            y, _ = layer(x)
            wrong += (y.detach() != want).sum()
        assert wrong.item() == 0
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["all2all", "agrs", "direct"])
def test_memory_that_torch_fills_with_nan_is_filled_before_anything_arrives(pool: RankPool, name: str) -> None:
    """deepseek-ai/DeepEP#589."""
    pool.run(body_fill, name)


def step(model: DominoStack, xs: list[Tensor]) -> list[Tensor]:
    """All gradients."""
    model.zero_grad()
    ys, _ = model(xs)
    torch.stack([y.float().square().sum() for y in ys]).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def body_soak(group: dist.ProcessGroup, rank: int, name: str) -> None:
    model = small_stack(group, dict(dispatcher=name, experts="loop")).to("cuda")
    xs = [x.detach().to("cuda") for x in inputs(rank, 2)]
    want = [gradient.clone() for gradient in step(model, xs)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for got, first in zip(step(model, xs), want, strict=True):
            wrong += (got != first).sum()
    assert wrong.item() == 0


@pytest.mark.parametrize("name", ["all2all", "agrs", "direct"])
def test_a_thousand_steps_of_the_same_have_the_same_gradients(pool: RankPool, name: str) -> None:
    """NVIDIA/Megatron-LM#7400."""
    pool.run(body_soak, name)


class WideLayer(DominoLayer):
    """Attention is nothing."""

    def __init__(self, config: MoEConfig, group: dist.ProcessGroup, index: int) -> None:
        super().__init__()
        self.moe = MoELayer(config, group, layer_index=index)
        self.moe.reset_parameters(7)

    def attention(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def wide_stack(group: dist.ProcessGroup, layers: int) -> DominoStack:
    """No host sync, so the host runs far ahead; rows are large, experts small."""
    changes: dict[str, Any] = dict(GROUPED, hidden_size=1024, max_tokens=2048, expert_intermediate_size=32)
    config = MoEConfig(**(MOE | changes | dict(num_shared_experts=0, shared_intermediate_size=0, dtype="bfloat16")))
    return DominoStack(WideLayer(config, group, i) for i in range(layers)).to("cuda")


def body_reuse(group: dist.ProcessGroup, rank: int) -> list[int]:
    """Bytes that the allocator took from the device, beyond what was there, in 4 layers and in 32."""
    found = []
    for layers in (4, 32):
        model = wide_stack(group, layers)
        xs = [torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        with torch.no_grad():
            model(xs)  # whatever a first call sets up
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_reserved()
            torch.cuda._sleep(200_000_000)  # all of the forward is issued before anything runs
            ys, _ = model(xs)
            torch.cuda.synchronize()
        found.append(torch.cuda.max_memory_reserved() - before)
        del model, ys
        close_dispatchers(group)
    return found


def test_memory_in_use_by_the_comm_stream_comes_back_while_the_host_runs_ahead(pool: RankPool) -> None:
    """pytorch/pytorch#147168, sgl-project/sglang#32746: 28 more layers take no more memory."""
    for few, many in pool.run(body_reuse):
        assert many <= 1.25 * few + 8 * MIB


def body_constant(group: dist.ProcessGroup, rank: int, name: str) -> list[int]:
    model = small_stack(group, dict(dispatcher=name, experts="loop")).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    found = []
    for number in range(10):
        step(model, [x.detach().to("cuda") for x in inputs(rank, 2)])
        optimizer.step()
        optimizer.zero_grad()
        found += [torch.cuda.memory_allocated()] if number > 1 else []
    return found


@pytest.mark.parametrize("name", ["all2all", "agrs", "direct"])
def test_no_memory_is_kept_between_steps(pool: RankPool, name: str) -> None:
    """NVIDIA-NeMo/RL#2319, pytorch/torchtitan#979."""
    for found in pool.run(body_constant, name):
        assert len(set(found)) == 1


def body_layers(group: dist.ProcessGroup, rank: int, name: str) -> list[int]:
    """Device memory that one layer takes, and what 23 more take, without their parameters."""
    config = MoEConfig(**(MOE | dict(dispatcher=name, max_tokens=4096)))
    layers, found = list[MoELayer](), list[int]()
    for number in (1, 23):
        before = torch.cuda.mem_get_info()[0]
        layers += [MoELayer(config, group, layer_index=len(layers) + i).to("cuda") for i in range(number)]
        with torch.no_grad():
            layers[-1](torch.randn(8, H, device="cuda"))
        torch.cuda.synchronize()
        found.append(before - torch.cuda.mem_get_info()[0])
    close_dispatchers(group)
    return found


@pytest.mark.gpu(2, apart=True)  # what others hold of the same GPU's memory is counted, too
@pytest.mark.parametrize("name", ["all2all", "agrs", "direct"])
def test_more_layers_take_no_more_buffers(pool: RankPool, name: str) -> None:
    """uccl-project/uccl#924, uccl-project/uccl#925, deepseek-ai/DeepEP#510, deepseek-ai/DeepEP#571,
    pytorch/torchtitan#3865."""
    for _, more in pool.run(body_layers, name):
        assert more <= 8 * MIB, "parameters of 23 small layers are some kilobytes each"

"""Host syncs of a layer, forward and backward, counted in a trace and held to what its dispatcher declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import MoEConfig, MoELayer
from moe_ep.dispatch import close_dispatchers
from moe_ep.testing.chrome_trace import trace_of
from moe_ep.testing.host_syncs import blocking_calls, describe
from moe_ep.testing.ranks import RankPool
from tests.ranks.small_stack import small_stack

pytestmark = pytest.mark.gpu
# what each may need for one micro-batch, forward and backward
BUDGETS = {"all2all": 1, "agrs": 1, "agrs, grouped router": 0, "local": 0, "direct": 1, "direct, capacity": 0}


def build(name: str, group: dist.ProcessGroup | None) -> MoELayer:
    options = dict(
        hidden_size=64, expert_intermediate_size=48, num_experts=8, top_k=2, dtype="bfloat16", max_tokens=64,
        dispatcher=name.split(",")[0], aux_loss_coef=0.01, z_loss_coef=0.001,
        num_shared_experts=1, shared_intermediate_size=32,
    )  # fmt: skip
    if "grouped" in name:
        options |= dict(router="grouped", num_groups=2)
    if "capacity" in name:
        options |= dict(capacity_factor=2.0)
    layer = MoELayer(MoEConfig(**options), group)  # type: ignore[arg-type]
    layer.reset_parameters(0)
    return layer.cuda()


def counted(run: Callable[[], None]) -> tuple[int, str]:
    """Blocking calls of the second run of all: the first one allocates and compiles."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        with torch.profiler.record_function("counted"):
            run()
        torch.cuda.synchronize()
    trace = trace_of(profile)
    calls = blocking_calls(trace, inside="counted")
    return len(calls), describe(trace, calls)


def body_layer(group: dist.ProcessGroup | None, rank: int, name: str, planted: bool) -> tuple[int, str, int]:
    layer = build(name, group)
    x = torch.randn(48, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)

    def run() -> None:
        y, aux = layer(x)
        if planted:
            aux.loss.item()
        torch.autograd.backward([y, aux.loss], [dy, torch.ones_like(aux.loss)])

    result = (*counted(run), layer.dispatcher.host_syncs)
    close_dispatchers(group)
    return result


def check(found: tuple[int, str, int], name: str, extra: int) -> None:
    count, text, declared = found
    assert declared == BUDGETS[name]
    assert count == declared + extra, f"{name}: {declared} declared, {count} counted\n{text}"


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("name", ["local", "all2all", "direct", "direct, capacity"])
def test_one_rank(name: str, planted: bool) -> None:
    """A sync that somebody adds to a layer is seen (planted)."""
    check(body_layer(None, 0, name, planted), name, int(planted))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=120) as ranks:
        yield ranks


@pytest.mark.gpu(2)
@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("name", ["all2all", "agrs", "agrs, grouped router", "direct", "direct, capacity"])
def test_two_ranks(pool: RankPool, name: str, planted: bool) -> None:
    for found in pool.run(body_layer, name, planted):
        check(found, name, int(planted))


def body_stack(group: dist.ProcessGroup, rank: int) -> tuple[int, str, int]:
    """Three layers, two of them with experts, and three micro-batches."""
    bfloat16 = torch.bfloat16  # grouped_mm waits for the host in float32
    model = small_stack(group, dict(dtype="bfloat16")).to("cuda", bfloat16)
    xs = [torch.randn(4 + i, 16, device="cuda", dtype=bfloat16, requires_grad=True) for i in range(3)]

    def run() -> None:
        ys, auxes = model(xs)
        losses: list[Tensor] = [y.float().square().sum() for y in ys]
        losses += [aux.loss for said in auxes for aux in said]
        torch.stack(losses).sum().backward()

    (declared,) = {layer.moe.dispatcher.host_syncs for layer in model.layers if layer.moe is not None}  # type: ignore[union-attr]
    result = (*counted(run), 2 * 3 * declared)
    close_dispatchers(group)
    return result


@pytest.mark.gpu(2)
def test_micro_batches_in_a_stack_add_nothing(pool: RankPool) -> None:
    for count, text, declared in pool.run(body_stack):
        assert declared == 6
        assert count == declared, f"{declared} declared, {count} counted\n{text}"

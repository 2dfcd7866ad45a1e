"""Two GPUs: a dispatch that is issued behind other computation does not wait for it, and is not given its memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import DominoStack, moe_layers
from moe_ep.dispatch.transfer import Flight
from moe_ep.domino import DominoLayer
from moe_ep.testing.ranks import RankPool
from tests.ranks.race_runs import host_ahead, run_both_ways, run_forward
from tests.ranks.small_stack import SmallLayer, small_stack

pytestmark = pytest.mark.gpu(2)
LATE_S = 0.5
DISPATCHERS: dict[str, dict[str, Any]] = {
    "all2all": {},
    "agrs": {},
    "agrs, grouped router": dict(router="grouped", num_groups=2),
    "direct": {},
    "direct, capacity": dict(capacity_factor=2.0),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=150) as ranks:
        yield ranks


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def model_of(group: dist.ProcessGroup, name: str, dense: tuple[bool, ...], **options: Any) -> DominoStack:
    return small_stack(group, DISPATCHERS[name] | dict(dispatcher=name.split(",")[0]) | options, dense).to(here())


def late() -> Any:
    """Half a second of work for the current stream; the event behind it."""
    torch.cuda._sleep(int(LATE_S * 2e9))
    event = torch.cuda.Event()
    event.record()
    return event


def body_beside(group: dist.ProcessGroup, rank: int, name: str) -> dict[str, bool]:
    """Whether what was issued right before each dispatch was still running when the dispatch was over."""
    model = model_of(group, name, (False,), dtype="bfloat16").to(torch.bfloat16)  # whose experts wait for no host
    xs = [torch.randn(8, 16, device=here(), dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    model(xs)  # kernels are loaded, memory is there
    torch.cuda.synchronize()
    (moe,) = moe_layers(model)
    ahead: list[Any] = []
    found: dict[str, bool] = {}
    real_launch, real_attention = Flight.launch_forward, DominoLayer.attention_of

    def attention(layer: SmallLayer, micro_batch: int, x: Tensor) -> tuple[Tensor, Tensor]:
        if micro_batch == 1:
            ahead.append(late())
        return real_attention(layer, micro_batch, x)

    def launch(flight: Flight, payload: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        results = real_launch(flight, payload)
        if flight._what.startswith("dispatch"):
            assert flight._forward is not None and len(ahead) == len(found) + 1
            end = time.monotonic() + 20
            while not flight._forward.event.query() and time.monotonic() < end:
                time.sleep(0.001)
            found[flight._what.split()[-1]] = not ahead[-1].query()
        return results

    hook = moe.experts.register_forward_pre_hook(lambda *_: ahead.append(late()) if len(ahead) == 1 else None)
    with (
        mock.patch.object(DominoLayer, "attention_of", attention),
        mock.patch.object(Flight, "launch_forward", launch),
    ):
        model(xs)
        torch.cuda.synchronize()
    hook.remove()
    return found


@pytest.mark.parametrize("name", DISPATCHERS)
def test_a_dispatch_runs_beside_what_was_issued_before_it(pool: RankPool, name: str) -> None:
    """D0 beside attention 1; D1, whose payload stands behind that attention, beside experts 0."""
    assert pool.run(body_beside, name) == [{"0": True, "1": True}] * 2


def body_memory(group: dist.ProcessGroup, rank: int, name: str, num: int) -> None:
    """Readers of what arrived are late, and without gradients nobody keeps it for them."""
    model = model_of(group, name, (False, False, True, False), experts="loop")

    def late_experts(*_: object) -> None:
        late()

    with torch.no_grad():
        want = run_forward(model, rank, num, here())
        hooks = [moe.experts.register_forward_pre_hook(late_experts) for moe in moe_layers(model)]
        for _ in range(2):
            got = run_forward(model, rank, num, here())
            torch.cuda.synchronize()
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("name", ["all2all", "agrs", "direct"])
def test_late_readers_find_what_arrived(pool: RankPool, name: str, num: int) -> None:
    pool.run(body_memory, name, num)


def body_equal(group: dist.ProcessGroup, rank: int, name: str, num: int) -> None:
    """The order of the host changes nothing, forward and backward."""
    model = model_of(group, name, (False, True, False), experts="loop")
    with host_ahead(False):
        want = run_both_ways(model, rank, num, here())
    with host_ahead(True):
        got = run_both_ways(model, rank, num, here())
    assert len(got) == len(want) > 2 * num
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num", [1, 2, 3, 4])
@pytest.mark.parametrize("name", DISPATCHERS)
def test_both_orders_give_the_same_numbers(pool: RankPool, name: str, num: int) -> None:
    pool.run(body_equal, name, num)

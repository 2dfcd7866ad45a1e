"""torch.compile around the layer: equal results, no exception, and routes that change recompile nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ep import DispatchConfig, MoEConfig, MoELayer, Routing, build_dispatcher
from tests.ranks.small_stack import inputs, small_stack

H = 16


@pytest.fixture
def counter() -> Any:
    testing = pytest.importorskip("torch._dynamo.testing")
    torch._dynamo.reset()
    yield testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


class Block(nn.Module):
    """Something to compile in front of the layer and behind it."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        sizes = dict(hidden_size=H, expert_intermediate_size=24, num_experts=8, top_k=2, max_tokens=32)
        self.norm = nn.RMSNorm(H)
        self.moe = MoELayer(MoEConfig(**(sizes | dict(aux_loss_coef=0.01) | changes)))
        self.moe.reset_parameters(3)

    def forward(self, x: Tensor) -> Tensor:
        y, aux = self.moe(self.norm(x))
        return (x + y).tanh() + aux.loss


def compare(block: Block, compiled: Callable[[Tensor], Tensor], lengths: list[int]) -> None:
    """Outputs and gradients of both on rows that go elsewhere each time; the counters see every forward once."""
    parameters = list(block.parameters())
    for step, length in enumerate(lengths):
        x = torch.randn(length, H, generator=torch.Generator().manual_seed(step)).requires_grad_()
        before = block.moe.router.load_E.clone()
        results = []
        for run in (block, compiled):
            y = run(x)
            grads = torch.autograd.grad(y.square().sum(), [x, *parameters])
            results.append((y.detach(), *grads, block.moe.router.load_E - before))
            before = block.moe.router.load_E.clone()
        torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dispatcher", ["local", "all2all", "agrs"])
def test_a_compiled_block_with_changing_routes(counter: Any, dispatcher: str) -> None:
    """PrimeIntellect-ai/prime-rl#996, pytorch/pytorch#161276, pytorch/torchtitan#2369: breaks, false guards on sums."""
    block = Block(dispatcher=dispatcher)
    compiled = torch.compile(block, backend=counter)
    compare(block, compiled, [9] * 4)
    assert counter.frame_count == 2, "one graph in front of the layer and one behind it, whatever the routes"


def test_a_compiled_block_with_changing_lengths(counter: Any) -> None:
    """pytorch/torchtitan#2369: at most three recompilations of a graph: any length, and torch's own cases 0 and 1."""
    block = Block()
    compiled = torch.compile(block, backend=counter)
    compare(block, compiled, [5, 7, 9, 3, 0, 1, 11, 5])
    assert counter.frame_count <= 2 * (1 + 3)


@pytest.mark.parametrize("experts", ["torch", "loop"])
def test_compiled_experts_and_a_compiled_layer_run_as_they_stand(counter: Any, experts: str) -> None:
    """pytorch/pytorch#161276: a loop over counts that differ each time would be traced anew each time."""
    block, plain = Block(experts=experts), Block(experts=experts)
    block.moe.experts = torch.compile(block.moe.experts, backend=counter)  # type: ignore[assignment]
    for length in (5, 7, 3):
        x = torch.randn(length, H)
        torch.testing.assert_close(block(x), plain(x))
    whole = torch.compile(plain.moe, backend=counter)
    assert torch.equal(whole(torch.ones(3, H))[0], plain.moe(torch.ones(3, H))[0])
    assert counter.frame_count == 0


def test_a_compiled_router_chooses_and_counts_alike(counter: Any) -> None:
    block = Block(router="sigmoid", bias_update_rate=0.1)
    compiled = Block(router="sigmoid", bias_update_rate=0.1)
    compiled.moe.router = torch.compile(compiled.moe.router, backend=counter)  # type: ignore[assignment]
    for seed in range(4):
        x = torch.randn(9, H, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(block(x), compiled(x))
    assert torch.equal(block.moe.router.load_E, compiled.moe.router.load_E) and counter.frame_count > 0


@pytest.mark.parametrize("name", ["local", "all2all", "agrs"])
def test_stages_inside_a_compiled_function(counter: Any, name: str) -> None:
    """A scheduler of one's own that is compiled: every stage of every dispatcher stays outside its graphs."""
    dispatcher = build_dispatcher(DispatchConfig(name=name, num_experts=4, top_k=1, hidden_size=4, max_tokens=8))

    def there_and_back(x: Tensor, ids: Tensor) -> Tensor:
        ticket = dispatcher.dispatch_preprocess(
            x * 2, Routing(expert_ids=ids, weights=torch.ones(ids.shape), num_experts=4)
        )
        dispatcher.dispatch(ticket)
        rows = dispatcher.dispatch_postprocess(ticket).rows()
        dispatcher.combine_preprocess(ticket, rows + 1)
        dispatcher.combine(ticket)
        return dispatcher.combine_postprocess(ticket) + 1

    compiled = torch.compile(there_and_back, backend=counter)
    for step in range(4):
        ids = torch.randint(-1, 4, (6, 1), generator=torch.Generator().manual_seed(step))
        x = torch.randn(6, 4, requires_grad=True)
        want = torch.where(ids < 0, 1, 2 * x + 2)
        got = compiled(x, ids)
        torch.testing.assert_close(got, want)
        (grad,) = torch.autograd.grad(got.sum(), x)
        assert torch.equal(grad, torch.where(ids < 0, 0.0, 2.0).expand(6, 4))


def test_the_import_does_not_bring_the_compiler() -> None:
    code = "import sys, moe_ep.layer; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_a_compiled_stack_of_interleaved_micro_batches(counter: Any) -> None:
    model = small_stack(None)
    xs = inputs(0, 2)
    want = [y.detach() for y in model(xs)[0]]
    ys, _ = torch.compile(model, backend=counter)(xs)
    assert counter.frame_count > 0
    torch.stack([y.sum() for y in ys]).sum().backward()
    for got, wanted in zip(ys, want, strict=True):
        assert torch.allclose(got, wanted, rtol=1e-6, atol=1e-6), "the compiler may fuse"
    assert all(p.grad is not None for p in model.parameters())

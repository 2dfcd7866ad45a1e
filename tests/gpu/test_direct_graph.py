"""A whole layer on `direct` in a CUDA graph: captured once, forward and backward, replayed with other routings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_ep import DominoLayer, DominoStack, MoEConfig, MoELayer
from moe_ep.dispatch import close_dispatchers
from moe_ep.errors import CapacityError, ProtocolError
from moe_ep.testing.ranks import RankPool

pytestmark = pytest.mark.gpu
TOKENS, HIDDEN = 96, 64


def build(group: dist.ProcessGroup | None, layer_index: int = 0, **options: object) -> MoELayer:
    config: dict[str, object] = dict(
        hidden_size=HIDDEN, expert_intermediate_size=48, num_experts=8, top_k=2, dtype="bfloat16", max_tokens=TOKENS,
        dispatcher="direct", capacity_factor=2.0, aux_loss_coef=0.01, z_loss_coef=0.001,
        num_shared_experts=1, shared_intermediate_size=32,
    )  # fmt: skip
    layer = MoELayer(MoEConfig(**(config | options)), group, layer_index=layer_index)  # type: ignore[arg-type]
    layer.reset_parameters(0)
    return layer.cuda()


def body_replay(group: dist.ProcessGroup | None, rank: int, options: dict[str, object]) -> list[list[bool]]:
    """Whether y and every gradient of three replays equal the eager layer's, bit for bit."""
    layer = build(group, **options)
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)

    def run() -> tuple[Tensor, ...]:
        y, aux = layer(x)
        wanted = [x, *layer.parameters()]
        return (y, *torch.autograd.grad([y, aux.loss], wanted, [dy, torch.ones_like(aux.loss)]))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    same = []
    for seed in range(3):
        gen = torch.Generator("cuda").manual_seed(10 * seed + rank)
        with torch.no_grad():
            x.copy_(torch.randn(x.shape, generator=gen, device="cuda"))
            dy.copy_(torch.randn(x.shape, generator=gen, device="cuda"))
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        replayed = [t.clone() for t in captured]
        same.append([torch.equal(a, b) for a, b in zip(replayed, run(), strict=True)])
    layer.dispatcher.raise_if_faulted()
    close_dispatchers(group)
    return same


class Block(DominoLayer):
    """A normalised matrix in the place of attention, then experts."""

    def __init__(self, group: dist.ProcessGroup | None, index: int, num: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.moe = build(group, index, num_micro_batches=num)

    def attention(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See DominoLayer."""
        h = x + self.mix(self.norm(x))
        return h, self.norm(h)


DOCUMENTED = (Path(__file__).parents[2] / "docs" / "cuda_graphs.md").read_text().split("```python\n")[1].split("```")[0]


def body_documented(group: dist.ProcessGroup | None, rank: int, num: int) -> list[str]:
    """What of three replayed steps differs from the same steps without a graph, in any bit."""
    torch.manual_seed(0)
    stack = DominoStack(Block(group, i, num) for i in range(2)).cuda()
    for name, parameter in stack.named_parameters():
        if ".router." not in name:
            parameter.data = parameter.data.bfloat16()

    def draw(seed: int) -> list[Tensor]:
        gen = torch.Generator("cuda").manual_seed(10 * seed + rank)
        return [torch.randn(TOKENS, HIDDEN, generator=gen, device="cuda").bfloat16() for _ in range(num)]

    def loss_of(y: Tensor) -> Tensor:
        return y.float().square().mean()

    names: dict[str, Any] = dict(stack=stack, loss_of=loss_of, first_micro_batches=draw(0))
    exec(compile(DOCUMENTED, "docs/cuda_graphs.md", "exec"), names)
    differ = []
    for seed in range(1, 4):
        loss = names["replay"](draw(seed)).clone()
        replayed = {name: parameter.grad.clone() for name, parameter in stack.named_parameters()}
        grads = {name: parameter.grad for name, parameter in stack.named_parameters()}
        stack.zero_grad(set_to_none=True)
        outputs, _ = stack(draw(seed))
        eager = sum(loss_of(y) for y in outputs)
        eager.backward()
        differ += [f"loss of step {seed}"] if not torch.equal(loss, eager.detach()) else []
        differ += [f"{n}, step {seed}" for n, p in stack.named_parameters() if not torch.equal(p.grad, replayed[n])]
        for name, parameter in stack.named_parameters():
            parameter.grad = grads[name]  # where the graph writes
    stack.layers[0].moe.dispatcher.raise_if_faulted()
    close_dispatchers(group)
    return differ


def body_overflow(group: dist.ProcessGroup | None, rank: int) -> tuple[str, bool]:
    """Every token to expert 0, in a graph: the fault is read behind the step, and the next step is right again."""
    layer = build(group, capacity_factor=1.0, router="softmax")
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[0] = 1.0
    x = torch.ones(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        y, _ = layer(x)
    text = ""
    try:
        layer.dispatcher.raise_if_faulted()
    except CapacityError as err:
        text = str(err)
    layer.reset_parameters(1)
    with torch.no_grad():
        again, _ = layer(torch.randn(8, HIDDEN, device="cuda", dtype=torch.bfloat16))
    layer.dispatcher.raise_if_faulted()
    close_dispatchers(group)
    return text, bool(torch.isfinite(y).all() and torch.isfinite(again).all())


def body_refused(group: dist.ProcessGroup | None, rank: int, name: str) -> tuple[str, bool]:
    """What reads counts refuses to be captured, and the next step outside of a graph is right."""
    options = {"dispatcher": name} if name != "direct" else {}
    layer = build(group, **{"capacity_factor": None, **options})
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        before, _ = layer(x)
        torch.cuda.synchronize()
        text = ""
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                layer(x)
        except ProtocolError as err:
            text = str(err)
        after, _ = layer(x)
    same = torch.equal(before, after)
    close_dispatchers(group)
    return text, same


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=120) as ranks:
        yield ranks


OPTIONS = [{}, {"options": (("expand", True),)}, {"weighting": "activation"}]
NAMES = ["unique", "expanded", "weighted activation"]


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_one_rank(options: dict[str, object]) -> None:
    assert all(all(each) for each in body_replay(None, 0, options))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_two_ranks(pool: RankPool, options: dict[str, object]) -> None:
    for same in pool.run(body_replay, options):
        assert all(all(each) for each in same), same


@pytest.mark.parametrize("num", [1, 2])
def test_what_is_documented_on_one_rank(num: int) -> None:
    assert body_documented(None, 0, num) == []


@pytest.mark.gpu(2)
@pytest.mark.parametrize("num", [1, 2])
def test_what_is_documented_on_two_ranks(pool: RankPool, num: int) -> None:
    """Two layers, micro-batches interleaved."""
    assert pool.run(body_documented, num) == [[], []]


@pytest.mark.gpu(2)
def test_too_many_rows_are_read_behind_the_step(pool: RankPool) -> None:
    for text, finite in pool.run(body_overflow):
        assert "384 expert rows are more than a rank has room for" in text and finite


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", ["direct", "all2all"])
def test_a_graph_cannot_hold_what_reads_counts(pool: RankPool, name: str) -> None:
    for text, same in pool.run(body_refused, name):
        assert "a CUDA graph is being captured" in text and same

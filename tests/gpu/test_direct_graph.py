"""A whole layer on `direct` in a CUDA graph: captured once, forward and backward, replayed with other routings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import MoEConfig, MoELayer
from moe_ep.dispatch import close_dispatchers
from moe_ep.errors import CapacityError, ProtocolError
from moe_ep.testing.ranks import RankPool

pytestmark = pytest.mark.gpu
TOKENS, HIDDEN = 96, 64


def build(group: dist.ProcessGroup | None, **options: object) -> MoELayer:
    config: dict[str, object] = dict(
        hidden_size=HIDDEN, expert_intermediate_size=48, num_experts=8, top_k=2, dtype="bfloat16", max_tokens=TOKENS,
        dispatcher="direct", capacity_factor=2.0, aux_loss_coef=0.01, z_loss_coef=0.001,
        num_shared_experts=1, shared_intermediate_size=32,
    )  # fmt: skip
    layer = MoELayer(MoEConfig(**(config | options)), group)  # type: ignore[arg-type]
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


@pytest.mark.gpu(2)
def test_too_many_rows_are_read_behind_the_step(pool: RankPool) -> None:
    for text, finite in pool.run(body_overflow):
        assert "384 expert rows are more than a rank has room for" in text and finite


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", ["direct", "all2all"])
def test_a_graph_cannot_hold_what_reads_counts(pool: RankPool, name: str) -> None:
    for text, same in pool.run(body_refused, name):
        assert "a CUDA graph is being captured" in text and same

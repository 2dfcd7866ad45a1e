"""The Python of README.md does what the text around it says: every block runs, on gloo ranks and on small sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from moe_ep import PeerError, moe_layers
from moe_ep.consistency import check_copies
from moe_ep.testing.ranks import RankPool

BLOCKS = re.findall(r"^```python\n(.*?)^```", (Path(__file__).parents[2] / "README.md").read_text(), re.M | re.S)
LAYER, STEP, FSDP, DDP, DOMINO, EXTRAS, RECOMPUTE = range(7)
MARKS = ("config = MoEConfig(", "clip_grad_norm_(", "fully_shard(", "DDP(", "DominoStack(", "extras", "recompute_in(")
SMALLER = {
    "hidden_size=2048": "hidden_size=16, init_std=0.3",
    "expert_intermediate_size=768": "expert_intermediate_size=24",
    "num_experts=128": "num_experts=8",
    "top_k=8": "top_k=2",
    'dtype="bfloat16"': 'dtype="float32"',
}
H, WORDS = 16, 11


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120) as ranks:
        yield ranks


def test_each_block_is_run_below() -> None:
    assert len(BLOCKS) == len(MARKS)
    for block, mark in zip(BLOCKS, MARKS, strict=True):
        assert mark in block
    assert [BLOCKS[LAYER].count(size) for size in SMALLER] == [1] * len(SMALLER)


def run(block: int, names: dict[str, Any]) -> dict[str, Any]:
    """Runs a block as a reader would who has these names already; returns what he has then."""
    text = BLOCKS[block]
    for size, smaller in SMALLER.items():
        text = text.replace(size, smaller)
    exec(compile(text, f"README.md, block {block}", "exec"), names)
    return names


def matrix() -> nn.Linear:
    made = nn.Linear(H, H, bias=False)
    made.weight.data = torch.randn(H, H, generator=torch.Generator().manual_seed(3)) / 4
    return made


def rows(rank: int, length: int) -> Tensor:
    return torch.randn(2, length, H, generator=torch.Generator().manual_seed(100 * rank + length))


def reader(ep_group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Names that README's reader brings along, and what the blocks of the layer and of Domino make of them."""
    names: dict[str, Any] = dict(
        ep_group=ep_group, device="cpu", i=2, num_layers=2, x=rows(0, 3), x0=rows(0, 3), x1=rows(0, 5),
        make_norm=lambda: nn.RMSNorm(H), make_attention=matrix, task_loss=lambda y: y.square().sum(), global_tokens=16,
        cross_entropy=cross_entropy,
    )  # fmt: skip
    return run(DOMINO, run(LAYER, names))


def model_of(names: dict[str, Any]) -> nn.Module:
    class Model(names["DominoStack"]):  # type: ignore[misc]  # whose layers the reader made
        def __init__(self) -> None:
            super().__init__(names["Layer"](i) for i in range(2))
            generator = torch.Generator().manual_seed(5)
            self.head = nn.Parameter(torch.randn(WORDS, H, generator=generator))

        def forward(self, x: Tensor) -> Any:
            (y,), (auxes,) = super().forward([x])
            return (y @ self.head.t()).flatten(0, 1), auxes

    return Model()


def micro_batches(ranks: list[int]) -> list[tuple[Tensor, Tensor]]:
    return [(rows(rank, n), torch.arange(2 * n) * (rank + 2) % WORDS) for rank in ranks for n in (3, 5)]


def step(names: dict[str, Any], ranks: list[int], num_ranks: int) -> None:
    """README's step with a large learning rate, on this rank's micro-batches."""
    model = names["model"]
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    others = [p for p in model.parameters() if not isinstance(p, DTensor)]
    groups = [{"params": params} for params in (sharded, others) if params]
    optimizer = torch.optim.SGD(groups, lr=1.0, foreach=True)
    names |= dict(micro_batches=micro_batches(ranks), global_tokens=num_ranks * 16, optimizer=optimizer)
    if isinstance(model, DistributedDataParallel):
        x, targets = names["micro_batches"].pop(0)
        with model.no_sync():
            logits, auxes = model(x)
            loss = cross_entropy(logits, targets, reduction="sum") + names["total_aux_loss"](auxes) * targets.numel()
            (loss / names["global_tokens"]).backward()
    run(STEP, names)


def body_step(group: dist.ProcessGroup, rank: int, way: str) -> None:
    num = group.size()
    mesh = init_device_mesh("cpu", (num // 2, 2), mesh_dim_names=("dp", "ep"))
    whole = init_device_mesh("cpu", (num,))
    names = reader(mesh["ep"].get_group())
    names |= dict(model=model_of(names), group_of_all_ranks=group, mesh_of_all_ranks=whole)
    names["dp_mesh"] = mesh["dp"] if num > 2 else None
    run(FSDP if way == "FSDP2" else DDP, names)
    alone = reader(None)
    alone |= dict(model=model_of(alone), group_of_all_ranks=None)
    before = {name: p.detach().clone() for name, p in alone["model"].named_parameters()}
    step(names, [rank], num)
    step(alone, list(range(num)), num)
    assert alone["norm"] > 1, "nothing was clipped"
    torch.testing.assert_close(names["norm"], alone["norm"], rtol=1e-5, atol=0)
    assert torch.equal(names["loads"], alone["loads"])
    check_copies(names["model"], group)
    for name, param in names["model"].named_parameters():
        name = name.removeprefix("module.")
        got, want, old = whole_of(param.detach()), alone["model"].get_parameter(name), before[name]
        if ".experts." in name:
            want, old = (t.chunk(2)[rank % 2] for t in (want, old))
        torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-5)
        assert (want - old).abs().max() > 1e-3, f"{name} was hardly moved"


def whole_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("way", ["FSDP2", "DDP"])
def test_a_step_on_two_ranks_is_that_of_one(pool: RankPool, way: str) -> None:
    pool.run(body_step, way)


def test_a_step_with_experts_sharded_over_the_ranks_that_hold_the_same() -> None:
    with RankPool(4, timeout_s=120) as four:  # of its own: ranks that made groups before would name theirs otherwise
        four.run(body_step, "FSDP2")


def body_usual_clipping(group: dist.ProcessGroup, rank: int) -> None:
    """What the text warns of, so that the check above is known to see it."""
    names = reader(group)
    names |= dict(model=model_of(names), group_of_all_ranks=group)
    run(DDP, names)
    model = names["model"]
    for x, targets in micro_batches([rank]):
        logits, _ = model(x)
        cross_entropy(logits, targets, reduction="sum").backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    with pytest.raises(PeerError, match=r"copies differ from rank 0's: module\.head on rank 1"):
        check_copies(model, group)


def test_usual_clipping_lets_copies_drift(pool: RankPool) -> None:
    pool.run(body_usual_clipping)


def body_stack(group: dist.ProcessGroup, rank: int) -> None:
    names = reader(group)
    assert names["y"].shape == names["x"].shape and names["aux"].load.sum() == 2 * 6 and names["aux"].loss > 0
    want = [p.grad.clone() for p in names["stack"].parameters()]
    again = reader(group)
    again["stack"].zero_grad()
    run(RECOMPUTE, again)
    calls = count_router_calls(again["stack"])
    losses_of(again).backward()
    assert calls == [2 * 2] * 2, "each router twice for each of two micro-batches"
    for got, grad in zip(again["stack"].parameters(), want, strict=True):
        assert torch.equal(got.grad, grad)


def losses_of(names: dict[str, Any]) -> Tensor:
    ys, auxes = names["stack"]([names["x0"], names["x1"]])
    losses = [
        y.square().sum() + names["total_aux_loss"](said) * y.shape[:-1].numel()
        for y, said in zip(ys, auxes, strict=True)
    ]
    return sum(losses) / 16


def count_router_calls(stack: nn.Module) -> list[int]:
    layers = moe_layers(stack)
    calls = [0] * len(layers)
    for place, layer in enumerate(layers):

        def count(*_: Any, place: int = place) -> None:
            calls[place] += 1

        layer.router.register_forward_pre_hook(count)
    return calls


def test_interleaved_and_recomputed(pool: RankPool) -> None:
    pool.run(body_stack)


def test_extras_belong_to_their_micro_batch() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, factor: float) -> Tensor:
            return x * factor

    names = run(EXTRAS, reader(None) | dict(make_attention=Scaled))
    names["Layer"].__init__.__globals__["make_attention"] = Scaled
    layer = names["LayerWithExtras"](0)

    def outputs(xs: list[Tensor], extras: list[float]) -> list[Tensor]:
        layer.extras = extras
        return names["DominoStack"]([layer])(xs)[0]

    both = outputs([names["x0"], names["x1"]], [0.5, 2.0])
    assert torch.equal(both[0], outputs([names["x0"]], [0.5])[0])
    assert torch.equal(both[1], outputs([names["x1"]], [2.0])[0])
    assert not torch.equal(both[1], outputs([names["x1"]], [0.5])[0])

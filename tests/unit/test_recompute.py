"""Activation recompute replays the first pass's experts, also under a router that decides otherwise the second time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointError,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from moe_ep.config import MoEConfig
from moe_ep.errors import ProtocolError
from moe_ep.recompute import SAVED_OPS, recompute_context_fn, recompute_region
from moe_ep.router import build_router
from moe_ep.sorted_routes import sort_routes

H, E, K, T = 8, 6, 2, 16


class Block(nn.Module):
    """Router and linear experts on ragged rows; `noise` makes every pass see other logits."""

    def __init__(self, noise: float = 0.0, **changes: object) -> None:
        super().__init__()
        sizes = {"hidden_size": H, "expert_intermediate_size": 4, "num_experts": E, "top_k": K, "init_std": 1.0}
        self.router = build_router(MoEConfig(**(sizes | changes)), 0)
        self.experts = nn.Parameter(torch.randn(E, H, H, generator=torch.Generator().manual_seed(1)))
        self.noise = noise
        self.passes: list[Tensor] = []  # ids of each forward, recompute included
        self.weights: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        shaken = x + self.noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(len(self.passes)))
        routing, aux = self.router(shaken)
        self.passes.append(routing.expert_ids.clone())
        self.weights.append(routing.weights.detach())
        order = sort_routes(routing.expert_ids, E)
        used = int((order.row_token >= 0).sum())
        rows = x[order.row_token[:used]]
        sizes = order.counts.tolist()
        out = torch.cat([part @ w for part, w in zip(rows.split(sizes), self.experts, strict=True)])
        out = out * routing.weights.flatten()[order.row_slot[:used], None]
        return torch.zeros_like(x).index_add(0, order.row_token[:used], out) + aux.loss


def rows(seed: int, count: int = T) -> Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradients(block: Block, xs: list[Tensor]) -> list[Tensor]:
    found = [*(x.grad for x in xs), *(p.grad for p in block.parameters())]
    assert all(g is not None for g in found)
    return [g for g in found if g is not None]


ROUTERS = {
    "softmax": {"aux_loss_coef": 0.1, "z_loss_coef": 0.1},
    "sigmoid": {"router": "sigmoid"},
    "grouped": {"router": "grouped", "num_groups": 2, "aux_loss": "sequence", "aux_loss_coef": 0.1},
    "forced": {"force_balance": True},
}


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("kind", ROUTERS)
def test_replay_with_three_micro_batches_in_flight(kind: str, early_stop: bool) -> None:
    """NVIDIA-NeMo/Automodel#2635, NVIDIA-NeMo/RL#1203: the second pass routes a token otherwise."""
    block, xs = Block(noise=10.0, **ROUTERS[kind]), [rows(s, T + s) for s in range(3)]
    with set_checkpoint_early_stop(early_stop):
        outs = [checkpoint(block, x, use_reentrant=False, context_fn=recompute_context_fn) for x in xs]
    first = block.passes[:]
    for i in (1, 2, 0):  # not the order of forward
        outs[i].square().sum().backward()
    assert len(block.passes) == 6
    for i, again in zip((1, 2, 0), block.passes[3:], strict=True):
        assert torch.equal(again, first[i])
    if kind != "forced":
        assert not torch.equal(block.weights[3], block.weights[1])  # the logits did change
    assert all(g.isfinite().all() for g in gradients(block, xs))


def test_without_the_context_the_same_block_fails() -> None:
    """ByteDance-Seed/VeOmni#979: what the replay is for."""
    block, x = Block(noise=10.0), rows(0)
    out = checkpoint(block, x, use_reentrant=False)
    with pytest.raises(CheckpointError):
        out.sum().backward()
    assert not torch.equal(block.passes[0], block.passes[1])


def test_near_ties_and_exact_ties_replay() -> None:
    """NVIDIA-NeMo/Automodel#3156: gaps of 1e-7 that the second pass sees the other way round."""
    block, x = Block(noise=1e-6), rows(0)
    with torch.no_grad():
        block.router.weight[1:] = block.router.weight[0] * (1 + 1e-7 * torch.arange(1, E)[:, None])
    out = checkpoint(block, x, use_reentrant=False, context_fn=recompute_context_fn)
    out.sum().backward()
    assert torch.equal(block.passes[0], block.passes[1])
    block.router(x + 1e-6 * torch.randn_like(x))
    assert not torch.equal(block.router(x + 0.1)[0].expert_ids, block.passes[0])


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("kind", ROUTERS)
def test_gradients_and_counters_equal_a_run_without_recompute(kind: str, early_stop: bool) -> None:
    """NVIDIA-NeMo/Automodel#3247, pytorch/torchtitan#1593: the second pass must not count; nor may it skip a gradient.

    Tencent-Hunyuan/UniRL#140, AI-Hypercomputer/maxtext#4005: and there must be a second pass.
    """
    results = []
    for recompute in (False, True):
        block, xs = Block(**ROUTERS[kind]), [rows(s) for s in range(3)]
        with set_checkpoint_early_stop(early_stop):
            for x in xs:
                if recompute:
                    out = checkpoint(block, x, use_reentrant=False, context_fn=recompute_context_fn)
                else:
                    out = block(x)
                out.square().sum().backward()
        assert len(block.passes) == (6 if recompute else 3)
        assert block.router.load_E.sum() == 3 * T * K
        results.append((gradients(block, xs), block.router.load_E))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_reentrant_recompute_counts_once() -> None:
    """NVIDIA-NeMo/Automodel#3247: its first pass runs without gradients, and still is the one that counts."""
    block = Block()
    checkpoint(block, rows(0), use_reentrant=True).sum().backward()
    assert len(block.passes) == 2 and block.router.load_E.sum() == T * K


@pytest.mark.parametrize("kind", ROUTERS)
def test_an_empty_micro_batch_is_the_same_in_both_passes(kind: str) -> None:
    """NVIDIA-NeMo/Automodel#3680: empty weights that come back with another dtype in recompute."""
    block, x = Block(noise=1.0, **ROUTERS[kind]), rows(0, count=0)
    checkpoint(block, x, use_reentrant=False, context_fn=recompute_context_fn).sum().backward()
    assert [(p.dtype, p.shape) for p in block.passes] == [(torch.int64, (0, K))] * 2
    assert [(w.dtype, w.shape) for w in block.weights] == [(torch.float32, (0, K))] * 2
    assert x.grad is not None and x.grad.shape == (0, H)


def test_a_fault_in_the_second_pass_only_changes_no_id() -> None:
    """NVIDIA-NeMo/RL#1203: row counts must agree also where only one pass saw a NaN."""
    block, x = Block(), rows(0)
    out = checkpoint(block, x, use_reentrant=False, context_fn=recompute_context_fn)
    with torch.no_grad():
        block.router.weight[0] = float("nan")  # stands for whatever may go wrong between the passes
    out.sum().backward()
    assert torch.equal(block.passes[0], block.passes[1]) and (block.passes[1] >= 0).all()
    assert (block.router(x)[0].expert_ids == -1).all()


def test_nested_regions_replay_the_outer_first_pass() -> None:
    inner_a, inner_b = Block(noise=10.0), Block(noise=10.0)

    def outer(x: Tensor) -> Tensor:
        y = checkpoint(inner_a, x, use_reentrant=False, context_fn=recompute_context_fn)
        return inner_b(y)

    with set_checkpoint_early_stop(False):
        out = checkpoint(outer, rows(0), use_reentrant=False, context_fn=recompute_context_fn)
        out.square().sum().backward()
    assert len(inner_a.passes) == 3 and len(inner_b.passes) == 2
    for block in (inner_a, inner_b):
        assert all(torch.equal(p, block.passes[0]) for p in block.passes)


def test_the_ready_made_region_replays() -> None:
    block, x = Block(noise=10.0), rows(0)
    recompute_region(block, x).sum().backward()
    assert len(block.passes) == 2 and torch.equal(*block.passes)
    with pytest.raises(CheckpointError, match="different metadata"):  # what the context is for
        checkpoint(Block(noise=10.0), rows(0), use_reentrant=False).sum().backward()


def test_two_backward_passes_replay_twice() -> None:
    block, x = Block(noise=10.0), rows(0)
    with set_checkpoint_early_stop(False):
        out = checkpoint(block, x, use_reentrant=False, context_fn=recompute_context_fn).square().sum()
        out.backward(retain_graph=True)
        out.backward()
    assert len(block.passes) == 3 and all(torch.equal(p, block.passes[0]) for p in block.passes)


def test_a_region_that_grows_is_an_error() -> None:
    block, x, times = Block(), rows(0), iter((0, 1))

    def fickle(x: Tensor) -> Tensor:
        with torch.no_grad():  # saves nothing, so that torch's own check of saved tensors cannot see it
            for _ in range(next(times)):
                block.router(x)
        return block(x)

    with set_checkpoint_early_stop(False):
        out = checkpoint(fickle, x, use_reentrant=False, context_fn=recompute_context_fn)
        with pytest.raises(ProtocolError, match=r"recompute asks for choice 2 of experts, the first pass made 1"):
            out.sum().backward()


def test_regions_leave_no_trace_behind() -> None:
    """After a pass, or one that failed, a router outside any region chooses for itself."""
    block, x = Block(), rows(0)

    def fails(x: Tensor) -> Tensor:
        block(x)
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        checkpoint(fails, x, use_reentrant=False, context_fn=recompute_context_fn)
    out = checkpoint(block, x, use_reentrant=False, context_fn=recompute_context_fn)
    out.sum().backward()
    other = rows(5)
    assert torch.equal(block.router(other)[0].expert_ids, Block().router(other)[0].expert_ids)


def test_a_selective_policy_of_ones_own_replays_as_well() -> None:
    block, xs = Block(noise=10.0), [rows(s) for s in range(2)]
    outs = [
        checkpoint(
            block, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(list(SAVED_OPS))
        )
        for x in xs
    ]
    first = block.passes[:]
    for out in reversed(outs):
        out.square().sum().backward()
    assert torch.equal(block.passes[2], first[1]) and torch.equal(block.passes[3], first[0])
    assert block.router.load_E.sum() == 2 * T * K

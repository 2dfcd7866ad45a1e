"""Which experts: ties, groups, ids above a byte, and forced balance for every count of experts, tokens and ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ep.config import MoEConfig
from moe_ep.recompute import SAVED_OPS, choose_experts, even_experts
from moe_ep.router import Router, build_router

H, E, K = 8, 6, 2
KINDS = {"softmax": {}, "sigmoid": {"bias_update_rate": 0.1}, "grouped": {"num_groups": 2}}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def config(**changes: object) -> MoEConfig:
    values = {"hidden_size": H, "expert_intermediate_size": 4, "num_experts": E, "top_k": K, "init_std": 1.0}
    return MoEConfig(**(values | changes))


def make(kind: str, **changes: object) -> Router:
    return build_router(config(router=kind, **(KINDS[kind] | changes)), 0)


def rows(count: int, seed: int = 0, width: int = H) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def everyone(count: int, device: str = "cpu") -> Tensor:
    return torch.ones(count, dtype=torch.bool, device=device)


@given(st.data())
def test_choice_equals_a_sort_by_falling_score_and_rising_id(data: st.DataObject) -> None:
    groups, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    per_group = data.draw(st.integers(1, size))
    score = st.sampled_from([-1.5, -0.25, -1e-40, -0.0, 0.0, 0.25, 1.0, 1e-40, float("inf")])
    scores = data.draw(st.lists(st.lists(score, min_size=groups * size, max_size=groups * size), max_size=4))
    expected = [
        [
            e
            for g in range(groups)
            for e in sorted(range(g * size, (g + 1) * size), key=lambda e: (-row[e], e))[:per_group]
        ]
        for row in scores
    ]
    tensor = torch.tensor(scores).view(len(scores), groups * size)
    assert choose_experts(tensor, everyone(len(scores)), groups * per_group, groups).tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("experts", [2, 16, 257, 512])
def test_exact_ties_go_to_the_lower_id(device: str, experts: int) -> None:
    """ByteDance-Seed/VeOmni#979, NVIDIA-NeMo/Automodel#2635: a tie that two passes or devices break differently."""
    flat = torch.full((64, experts), 0.5, device=device)
    top_k = min(experts, 10)
    assert (choose_experts(flat, everyone(64, device), top_k, 1) == torch.arange(top_k, device=device)).all()
    few = torch.randint(0, 3, (64, experts), generator=torch.Generator().manual_seed(experts)).float()
    few[:, ::3] *= -1  # -0.0 ties with 0.0
    ids = choose_experts(few.to(device), everyone(64, device), top_k, 1).tolist()
    assert ids == [sorted(range(experts), key=lambda e: (-row[e], e))[:top_k] for row in few.tolist()]


def test_a_gap_of_one_ulp_is_seen() -> None:
    low = torch.tensor(0.3)
    high = torch.nextafter(low, torch.tensor(1.0))
    assert choose_experts(torch.stack([low, high])[None], everyone(1), 1, 1).item() == 1


def test_experts_above_255_are_chosen() -> None:
    """kekzl/imp#2056, sgl-project/sglang#22583: ids that do not fit a byte, E = 512 and K = 10."""
    router = build_router(config(num_experts=512, top_k=10), 0)
    ids = router(rows(256))[0].expert_ids
    assert ids.dtype == torch.int64 and (ids > 255).any(1).all() and ids.max() > 500
    assert (ids.sort(1).values.diff(dim=1) > 0).all()


def test_ops_pass_the_library_checks() -> None:
    alive = torch.tensor([True, False, True])
    torch.library.opcheck(torch.ops.moe_ep.choose_experts.default, (torch.rand(3, E), alive, K, 2))
    torch.library.opcheck(torch.ops.moe_ep.choose_experts.default, (torch.rand(0, E), alive[:0], K, 1))
    torch.library.opcheck(torch.ops.moe_ep.even_experts.default, (alive, K, E, 1, 2))


# ---- forced balance ----


def spread(load: Tensor) -> int:
    return int(load.max() - load.min())


@given(st.data())
def test_forced_balance_is_even_for_every_expert_and_every_rank_count(data: st.DataObject) -> None:
    """sgl-project/sglang#37741: spacing a token's experts by E//K leaves ranks without a token."""
    experts = data.draw(st.integers(1, 48))
    top_k = data.draw(st.integers(1, experts))
    tokens, ranks = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 4))
    alive = torch.tensor(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)), dtype=torch.bool)
    loads = []
    for rank in range(ranks):
        ids = even_experts(alive, top_k, experts, rank, ranks)
        assert (ids[~alive] == -1).all() and all(len(set(row)) == top_k for row in ids[alive].tolist())
        loads.append(ids[alive].flatten().bincount(minlength=experts))
    for load in (*loads, sum(loads)):
        divisors = [r for r in range(1, experts + 1) if experts % r == 0]
        assert max(spread(load.view(r, -1).sum(1)) for r in divisors) <= 1


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32])
def test_forced_balance_at_the_reported_shape(ranks: int) -> None:
    """sgl-project/sglang#37741: E = 256, K = 8, 8 tokens; odd ranks of 16 got none."""
    router = build_router(config(num_experts=256, top_k=8, force_balance=True), 0)
    load = router(rows(8))[1].load
    assert load.view(ranks, -1).sum(1).tolist() == [64 // ranks] * ranks


@pytest.mark.parametrize("kind", KINDS)
def test_forced_balance_keeps_the_gradient_of_the_weights(kind: str) -> None:
    router = make(kind, force_balance=True, top_k=4)
    x = rows(9)
    routing, aux = router(x)
    assert spread(aux.load) <= 1 and aux.load.sum() == 36
    logits = x @ router.weight.T
    scores = logits.sigmoid() if kind == "sigmoid" else logits.softmax(-1)
    chosen = scores.gather(1, routing.expert_ids)
    torch.testing.assert_close(routing.weights, chosen / chosen.sum(1, keepdim=True))
    (routing.weights * rows(9, 1, 4)).sum().backward()
    got = router.weight.grad
    router.weight.grad = None
    ((chosen / chosen.sum(1, keepdim=True)) * rows(9, 1, 4)).sum().backward()
    torch.testing.assert_close(got, router.weight.grad)


def test_forced_balance_keeps_the_promise_of_groups() -> None:
    router = build_router(config(num_experts=12, top_k=4, router="grouped", num_groups=4, force_balance=True), 0)
    assert (router(rows(11))[0].expert_ids // 3 == torch.arange(4)).all()


def test_forced_balance_interleaves_over_ranks() -> None:
    """sgl-project/sglang#37741: the sum over ranks is what loads an expert; 3 ranks of 5 tokens, E = 6, K = 1."""
    loads = [
        build_router(config(top_k=1, force_balance=True), 0, rank=r, num_ranks=3)(rows(5))[1].load for r in range(3)
    ]
    assert spread(torch.stack(loads).sum(0)) == 1 and sum(int(load.sum()) for load in loads) == 15


class Noting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


def test_whoever_looks_at_ops_sees_one_and_nobody_else_pays_for_it() -> None:
    scores, alive = torch.rand(5, E), everyone(5)
    choices = (lambda: choose_experts(scores, alive, K, 1), lambda: even_experts(alive, K, E, 0, 1))
    for choose, op in zip(choices, SAVED_OPS, strict=True):
        with Noting() as mode:
            watched = choose()
        assert str(op) in mode.seen and "aten.masked_fill.Scalar" not in mode.seen
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert torch.equal(choose(), watched)
        assert not any(event.key.startswith("moe_ep::") for event in profile.key_averages())

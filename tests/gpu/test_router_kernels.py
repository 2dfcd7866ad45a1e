"""The router's kernels against their references, and a router that uses them against one in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep.config import MoEConfig
from moe_ep.recompute import choose_experts
from moe_ep.router import Router, build_router

pytestmark = pytest.mark.gpu

CASES = [(1, 1, 1), (2, 1, 1), (8, 2, 1), (8, 8, 2), (33, 5, 1), (60, 4, 2), (64, 8, 4), (128, 8, 1), (160, 6, 1),
         (256, 8, 8), (384, 8, 1), (512, 22, 2), (1000, 10, 5), (1024, 8, 8)]  # fmt: skip
NAN, INF = float("nan"), float("inf")
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {}, "sigmoid": {"bias_update_rate": 0.1, "routed_scale": 2.5}, "grouped": {"num_groups": 4},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def kernels_are_there() -> None:
    """A GPU without kernels is a failure here, not a reason to skip."""
    from moe_ep.kernels import library

    assert library.missing(torch.cuda.current_device()) is None


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("num_experts", "top_k", "groups"), CASES)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 300])
def test_the_choice_is_a_stable_sort_s(num_tokens: int, num_experts: int, top_k: int, groups: int) -> None:
    from moe_ep.kernels.router import top_experts, top_experts_reference

    scores = draw(num_tokens, num_experts)
    scores[::3] = scores[::3].mul(2).round().div(2)  # many ties, zeros of both signs among them
    scores[1::5, ::2], scores[2::7, ::3] = -INF, INF
    alive = draw(num_tokens, seed=1) < 1
    want = top_experts_reference(scores, alive, top_k, groups)
    assert torch.equal(top_experts(scores.cuda(), alive.cuda(), top_k, groups).cpu(), want)
    chosen = choose_experts(scores.cuda(), alive.cuda(), top_k, groups, kernels=True)
    assert torch.equal(chosen, choose_experts(scores.cuda(), alive.cuda(), top_k, groups))


def test_more_experts_than_the_kernel_s_are_chosen_by_torch() -> None:
    from moe_ep.kernels.router import MAX_EXPERTS

    scores = draw(5, MAX_EXPERTS + 8)
    alive = torch.ones(5, dtype=torch.bool)
    chosen = choose_experts(scores.cuda(), alive.cuda(), 4, 1, kernels=True)
    assert torch.equal(chosen.cpu(), choose_experts(scores, alive, 4, 1))


@pytest.mark.parametrize("num_experts", [1, 31, 64, 1000])
@pytest.mark.parametrize("padded", [False, True])
def test_masks_and_counts(num_experts: int, padded: bool) -> None:
    from moe_ep.kernels.router import mask_logits, mask_logits_reference

    logits, valid = draw(53, num_experts), (draw(53, seed=2) < 0.7) if padded else None
    logits[3, 0], logits[8, -1], logits[9, num_experts // 2] = NAN, INF, -INF
    want = mask_logits_reference(logits, valid)
    got = mask_logits(logits.cuda(), None if valid is None else valid.cuda())
    assert all(torch.equal(one.cpu(), other) for one, other in zip(got, want, strict=True))
    empty = mask_logits(logits[:0].cuda(), None)
    assert empty[0].shape == (0, num_experts) and empty[2].tolist() == [0, 0]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (6, 3), (64, 8), (129, 11), (1030, 40)])
def test_weights_loads_and_gradients(num_experts: int, top_k: int, normalize: bool) -> None:
    from moe_ep.kernels.router import (
        weigh_backward,
        weigh_backward_reference,
        weigh_routes,
        weigh_routes_reference,
    )

    scores, d_weights = draw(91, num_experts).sigmoid(), draw(91, top_k, seed=1)
    scores[5] = 0  # nothing to divide by
    ids = torch.randint(-1, num_experts, (91, top_k), generator=torch.Generator().manual_seed(3))  # with duplicates
    weights, load = weigh_routes(scores.cuda(), ids.cuda(), normalize, 1e-20, 1.5)
    want, counts = weigh_routes_reference(scores.double(), ids, normalize, 1e-20, 1.5)
    torch.testing.assert_close(weights.cpu().double(), want, rtol=top_k * 2.0**-23, atol=0)
    assert torch.equal(load.cpu(), counts)
    grad = weigh_backward(scores.cuda(), ids.cuda(), d_weights.cuda(), normalize, 1e-20, 1.5).cpu().double()
    exact = weigh_backward_reference(scores.double(), ids, d_weights.double(), normalize, 1e-20, 1.5)
    # each of K terms is a difference of d and an average of d's, over the sum; rounded some K times
    largest = torch.full((91, top_k), float(d_weights.abs().max()), dtype=torch.float64)
    sizes = weigh_backward_reference(scores.double(), ids, largest, False, 1e-20, 1.5)
    sums = scores.double().gather(1, ids.clamp_min(0)).masked_fill(ids < 0, 0).sum(-1, keepdim=True).clamp_min(1e-20)
    bound = 2 * sizes / (sums if normalize else 1) * (3 * top_k + 4) * 2.0**-24
    assert bool(((grad - exact).abs() <= bound).all())


def both(kind: str, **changes: Any) -> tuple[Router, Router]:
    config = MoEConfig(
        hidden_size=32, expert_intermediate_size=4, num_experts=16, top_k=4, router=kind, init_std=1.0,
        **(KINDS[kind] | changes),
    )  # fmt: skip
    made = [build_router(config, 0).cuda() for _ in range(2)]
    made[0].kernels = True
    return made[0], made[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "losses", [{"aux_loss": "none"}, {"aux_loss": "batch", "aux_loss_coef": 0.1, "z_loss_coef": 0.2}]
)
@pytest.mark.parametrize("normalize", [True, False])
def test_a_router_is_the_same_either_way(kind: str, losses: dict[str, Any], normalize: bool) -> None:
    x, d_weights = draw(57, 32).cuda(), draw(57, 4, seed=9).cuda()
    valid = (draw(57, seed=4) < 1).cuda()
    x[4] = NAN  # a bad token, or padding
    found = []
    for router in both(kind, normalize_weights=normalize, **losses):
        leaf = x.clone().requires_grad_()
        routing, aux = router(leaf, valid_T=valid)
        ((routing.weights * d_weights).sum() + aux.loss).backward()
        assert leaf.grad is not None and router.weight.grad is not None
        found.append((routing, aux, leaf.grad, router.weight.grad, router.load_E))
    (ours, our_aux, *our_grads, our_load), (theirs, their_aux, *their_grads, their_load) = found
    assert torch.equal(ours.expert_ids, theirs.expert_ids) and torch.equal(our_load, their_load)
    assert torch.equal(our_aux.load, their_aux.load) and int(our_aux.num_tokens) == int(valid.sum())
    assert ours.bad_tokens is not None and theirs.bad_tokens is not None
    assert int(ours.bad_tokens) == int(theirs.bad_tokens)
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=2e-6, atol=0)
    torch.testing.assert_close(our_aux.loss, their_aux.loss)
    alive = torch.isfinite(x).all(-1)
    torch.testing.assert_close(our_grads[0][alive], their_grads[0][alive], rtol=1e-5, atol=1e-6)
    if not bool(valid[4]):
        torch.testing.assert_close(our_grads[1], their_grads[1], rtol=1e-5, atol=1e-6)


def test_what_a_router_asks_of_the_host() -> None:
    """Some twenty launches less a micro-batch: they are what the kernels are for."""
    launches = []
    for router in both("softmax", aux_loss="none"):
        x = draw(64, 32).cuda()
        router(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            router(x)
        launches.append(sum(event.count for event in profile.key_averages() if "Launch" in event.key))
    assert launches[0] <= 12 < 20 <= launches[1], launches


def test_a_captured_router_follows_new_rows() -> None:
    router, plain = both("softmax", aux_loss="none")
    x = draw(40, 32).cuda()
    for _ in range(2):
        router(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routing, aux = router(x)
    x.copy_(draw(40, 32, seed=8))
    graph.replay()
    want, want_aux = plain(x)
    assert torch.equal(routing.expert_ids, want.expert_ids) and torch.equal(aux.load, want_aux.load)

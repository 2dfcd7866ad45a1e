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


@pytest.mark.parametrize("num_experts", [1, 6, 64, 129, 1000])
@pytest.mark.parametrize("num_tokens", [0, 1, 77, 3000])
def test_the_balancing_loss_and_its_gradient(num_experts: int, num_tokens: int) -> None:
    from moe_ep.kernels.balance import (
        balance_backward,
        balance_backward_reference,
        balance_loss,
        balance_loss_reference,
    )

    probs, alive = draw(num_tokens, num_experts).softmax(-1), draw(num_tokens, seed=1) < 1
    load = torch.randint(0, 50, (num_experts,), generator=torch.Generator().manual_seed(2))
    loss, slope = balance_loss(probs.cuda(), load.cuda(), alive.cuda(), 3)
    exact, exact_slope = balance_loss_reference(probs.double(), load, alive, 3)
    torch.testing.assert_close(slope.cpu().double(), exact_slope, rtol=2.0**-23, atol=0)
    # all terms are positive, and none is added more often than a warp has tokens, then warps, blocks and threads
    torch.testing.assert_close(loss.cpu().double(), exact, rtol=(num_tokens / 8 + 200) * 2.0**-24, atol=0)
    assert all(torch.equal(loss, balance_loss(probs.cuda(), load.cuda(), alive.cuda(), 3)[0]) for _ in range(3))
    grad = torch.tensor(1.7)
    want = balance_backward_reference(slope.cpu(), alive, grad)
    assert torch.equal(balance_backward(slope, alive.cuda(), grad.cuda()).cpu(), want)


@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (5, 1), (3, 64), (130, 7168), (77, 30)])
@pytest.mark.parametrize("beside", [False, True])
def test_parts_of_float32(rows: int, columns: int, beside: bool) -> None:
    from moe_ep.kernels.split import split_bfloat16, split_bfloat16_reference

    words = torch.randint(-(2**31), 2**31, (rows, columns + 1), generator=torch.Generator().manual_seed(rows))
    x = words.int().view(torch.float32)  # every kind of number, infinities and NaN among them
    for given in (x[:, :-1].contiguous(), x[:, 1:]):  # the second one is not where 16 bytes begin
        got = split_bfloat16(given.cuda(), [0, 1, 2, 0], beside).cpu()
        want = split_bfloat16_reference(given, [0, 1, 2, 0], beside)
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(0.0), want.nan_to_num(0.0))


def error_of(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("num_tokens", "hidden", "num_experts"), [(300, 512, 64), (2000, 2048, 128), (5, 7168, 256)])
def test_logits_in_the_tensor_cores_are_float32s(num_tokens: int, hidden: int, num_experts: int) -> None:
    """Against float64. Two parts of three would leave 2^-17 and more, bfloat16 2^-9.

    Tensor cores cut off where they add: at most 2^-23 of a sum at each of some H / 16 steps, towards zero, while the
    sum grows with the root of H.
    """
    from moe_ep.router_product import masked_logits

    x = draw(num_tokens, hidden).cuda().bfloat16().requires_grad_()
    weight = draw(num_experts, hidden, seed=1).cuda().requires_grad_()
    given = draw(num_tokens, num_experts, seed=2).cuda()
    exact = x.detach().double() @ weight.detach().double().t()
    exact_dx, exact_dw = given.double() @ weight.detach().double(), given.double().t() @ x.detach().double()
    errors = []
    for kernels in (True, False):
        logits, alive, bad, count = masked_logits(x, weight, None, kernels=kernels)
        assert bool(alive.all()) and int(bad) == 0 and int(count) == num_tokens
        dx, dw = torch.autograd.grad(logits, (x, weight), given)
        errors.append([error_of(logits.detach(), exact), error_of(dw, exact_dw), error_of(dx, exact_dx)])
    ours, torchs = errors
    assert max(ours[:2]) < 2.0**-18, (ours, torchs)
    assert ours[2] <= torchs[2] * 1.01  # rounded to bfloat16 once, as that is


def test_rows_that_are_not_finite_cost_the_others_nothing() -> None:
    from moe_ep.router_product import masked_logits

    x, valid = draw(6, 64).bfloat16().cuda(), torch.tensor([True] * 5 + [False], device="cuda")
    x[1, 3], x[2, 0] = NAN, INF
    weight = draw(16, 64, seed=1).cuda()
    ours, theirs = (masked_logits(x, weight, valid, kernels=kernels) for kernels in (True, False))
    assert ours[1].tolist() == theirs[1].tolist() == [True, False, False, True, True, False]
    assert int(ours[2]) == int(theirs[2]) == 2 and int(ours[3]) == int(theirs[3]) == 5
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize(
    ("losses", "most", "torchs"), [({"aux_loss": "none"}, 10, 18), ({"aux_loss_coef": 0.1}, 12, 30)]
)
def test_what_a_router_asks_of_the_host(losses: dict[str, Any], most: int, torchs: int) -> None:
    """Some twenty launches less a micro-batch: they are what the kernels are for."""
    launches = []
    for router in both("softmax", **losses):
        x = draw(64, 32).cuda().bfloat16()
        router(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            router(x)
        launches.append(sum(event.count for event in profile.key_averages() if "Launch" in event.key))
    assert launches[0] <= most < torchs <= launches[1], launches


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

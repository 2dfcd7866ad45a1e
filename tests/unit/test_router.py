"""Routers: which experts, which weights, what survives a cast, what padding, NaN and empty batches do."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor

from moe_ep.config import MoEConfig
from moe_ep.errors import InputError, RecipeError
from moe_ep.router import Router, SigmoidRouter, build_router

H, E, K = 8, 6, 2
KINDS = {"softmax": {}, "sigmoid": {"bias_update_rate": 0.1}, "grouped": {"num_groups": 2}}


def config(**changes: object) -> MoEConfig:
    values = {"hidden_size": H, "expert_intermediate_size": 4, "num_experts": E, "top_k": K, "init_std": 1.0}
    return MoEConfig(**(values | changes))


def make(kind: str, **changes: object) -> Router:
    return build_router(config(router=kind, **(KINDS[kind] | changes)), 0)


def rows(count: int, seed: int = 0, width: int = H) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def with_logits(router: Router, logits: list[list[float]]) -> Tensor:
    """Rows that give these logits: the first E columns of x go straight through."""
    with torch.no_grad():
        router.weight.copy_(torch.eye(E, H))
    return torch.nn.functional.pad(torch.tensor(logits), (0, H - E))


def everyone(count: int, device: str = "cpu") -> Tensor:
    return torch.ones(count, dtype=torch.bool, device=device)


# ---- the three routers ----


@pytest.mark.parametrize("normalize", [True, False])
def test_softmax_router_equals_qwen3(normalize: bool) -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    names = {"hidden_size": H, "num_experts": E, "num_experts_per_tok": K, "norm_topk_prob": normalize}
    theirs = qwen.Qwen3MoeTopKRouter(qwen.Qwen3MoeConfig(**names))
    ours = make("softmax", normalize_weights=normalize)
    theirs.load_state_dict(ours.state_dict())
    _, weights, ids = theirs(rows(32))
    routing, _ = ours(rows(32))
    assert torch.equal(routing.expert_ids, ids)
    torch.testing.assert_close(routing.weights, weights)


@pytest.mark.parametrize("normalize", [True, False])
def test_sigmoid_bias_chooses_and_does_not_weigh(normalize: bool) -> None:
    router = make("sigmoid", normalize_weights=normalize, routed_scale=2.5)
    router.bias.copy_(torch.tensor([0, 0, 0, 0, 5.0, 9.0]))
    x = rows(10)
    routing, _ = router(x)
    assert (routing.expert_ids == torch.tensor([5, 4])).all()
    scores = (x @ router.weight.T).sigmoid()[:, [5, 4]]
    expected = 2.5 * (scores / scores.sum(-1, keepdim=True) if normalize else scores)
    torch.testing.assert_close(routing.weights, expected)


def test_sigmoid_weights_of_underflowed_scores_are_finite() -> None:
    router = make("sigmoid")
    x = with_logits(router, [[-200.0] * E]).requires_grad_()
    routing, _ = router(x)
    routing.weights.sum().backward()
    assert routing.weights.tolist() == [[0, 0]] and x.grad is not None and x.grad.isfinite().all()


def test_grouped_router_keeps_group_order() -> None:
    """InternLM/xtuner#1245: column j of the ids must lie on rank j; logits falling with the id, 8 groups of 2."""
    router = build_router(config(num_experts=16, top_k=8, router="grouped", num_groups=8), 0)
    ids = router(rows(50))[0].expert_ids
    assert (ids // 2 == torch.arange(8)).all()
    two = build_router(config(num_experts=16, top_k=8, router="grouped", num_groups=4), 0)
    assert torch.equal(two.weight, router.weight)
    routing, aux = two(rows(50))
    assert (routing.expert_ids // 4 == torch.arange(8) // 2).all()
    best = (rows(50) @ two.weight.T).view(50, 4, 4).topk(2).indices + 4 * torch.arange(4)[:, None]
    assert torch.equal(routing.expert_ids, best.view(50, 8))
    assert aux.load.sum() == 400 and torch.equal(aux.load, routing.expert_ids.flatten().bincount(minlength=16))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_carry_gradient_to_router_and_rows(kind: str) -> None:
    """NVIDIA-NeMo/Automodel#2995: a router that learns from auxiliary losses only."""
    router, x = make(kind), rows(5).requires_grad_()
    weights = router(x)[0].weights
    (weights * torch.arange(10.0).view(5, 2)).sum().backward()
    assert x.grad is not None and router.weight.grad is not None
    assert (x.grad.abs().sum(1) > 0).all() and router.weight.grad.any()
    torch.testing.assert_close(weights.sum(1), torch.ones(5))


def test_unknown_router_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RecipeError, match=r"router = 'softmx' is not one of 'softmax', 'sigmoid', 'grouped'"):
        build_router(config(router="softmx"), 0)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_a_router_that_nothing_trains_is_refused(kind: str) -> None:
    """With one expert a token, normalised weights are all 1: rounding noise would move the router."""
    with pytest.raises(RecipeError, match="top_k = 1 with normalize_weights = true makes every weight 1"):
        build_router(config(router=kind, top_k=1), 0)
    build_router(config(router=kind, top_k=1, normalize_weights=False), 0)
    build_router(config(router=kind, top_k=1, aux_loss_coef=0.1), 0)


# ---- float32 ----


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double", "to", "to_device"])
@pytest.mark.parametrize("kind", KINDS)
def test_router_parameters_stay_float32(kind: str, cast: str) -> None:
    """deepspeedai/DeepSpeed#7747, PrimeIntellect-ai/prime-rl#3524: a wrapper that casts the whole model."""
    plain, router = make(kind), make(kind)
    for module in (plain, router):
        if isinstance(module, SigmoidRouter):
            module.bias.copy_(torch.linspace(0, 1e-4, E))
    parent = torch.nn.Sequential(router, torch.nn.Linear(H, H))
    casts = {"to": lambda: parent.to(torch.bfloat16), "to_device": lambda: parent.to("cpu", torch.float16)}
    casts.get(cast, getattr(parent, cast, None))()
    assert parent[1].weight.dtype != torch.float32
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), router.state_dict().values(), strict=True)
    )
    assert {t.dtype for t in router.state_dict().values()} == {torch.float32} and router.load_E.dtype == torch.int64
    x = rows(20).bfloat16()
    (got, _), (want, _) = router(x), plain(x.float())
    assert torch.equal(got.expert_ids, want.expert_ids) and torch.equal(got.weights, want.weights)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_does_not_reach_the_router(kind: str) -> None:
    """sgl-project/sglang#39351, ROCm/aiter#323: routing weights silently rounded to the hidden dtype."""
    router = make(kind, normalize_weights=False, z_loss_coef=1.0)
    want, want_aux = router(rows(20))
    with torch.autocast("cpu", torch.bfloat16):
        got, aux = router(rows(20))
    assert got.weights.dtype == torch.float32 and torch.equal(got.weights, want.weights)
    assert torch.equal(aux.loss, want_aux.loss) and aux.loss.dtype == torch.float32
    x = rows(20).bfloat16().requires_grad_()
    weights = router(x)[0].weights
    assert weights.dtype == torch.float32 and not torch.equal(weights, weights.bfloat16().float())
    (grad,) = torch.autograd.grad(weights.sum(), x)
    assert grad.dtype == torch.bfloat16


def test_a_weight_that_was_cast_anyway_is_refused() -> None:
    """deepspeedai/DeepSpeed#7747: what no override can stop must not pass in silence."""
    router = make("sigmoid")
    low = {name: value.bfloat16() for name, value in router.state_dict().items()}
    assigned = copy.deepcopy(router)
    assigned.load_state_dict(low, assign=True)
    with pytest.raises(InputError, match=r"router weight of layer 0 is torch\.bfloat16, must be float32"):
        assigned(rows(2))
    router.load_state_dict(low)  # the ordinary way widens
    assert router.weight.dtype == router.bias.dtype == torch.float32


def test_state_dict_holds_weight_and_bias_only() -> None:
    """ISEEKYAN/Megatron-LM#81, deepspeedai/DeepSpeed#8358: the bias is a buffer, and must be saved in float32."""
    router = make("sigmoid").bfloat16()
    router.bias.copy_(torch.linspace(-0.123456789, 0.1, E))
    file = io.BytesIO()
    torch.save(router.state_dict(), file)
    file.seek(0)
    other = make("sigmoid").half()
    other.load_state_dict(torch.load(file))
    assert list(other.state_dict()) == ["weight", "bias"]
    assert torch.equal(other.bias, router.bias) and torch.equal(
        other(rows(64))[0].expert_ids, router(rows(64))[0].expert_ids
    )
    assert list(make("softmax").state_dict()) == ["weight"]


def test_initial_weights_depend_on_seed_and_layer_only() -> None:
    weights = []
    for seed, layer in ((1, 0), (1, 1), (2, 0), (1, 0)):
        with torch.device("meta"):
            router = build_router(config(router="sigmoid"), layer)
        router.to_empty(device="cpu")
        router.reset_parameters(seed)
        assert not router.bias.any() and not router.load_E.any()
        weights.append(router.weight.detach())
    assert torch.equal(weights[0], weights[3])
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


# ---- padding, faults, empty batches ----


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_has_no_route_no_weight_no_count(kind: str, force: bool) -> None:
    """NVIDIA/Megatron-LM#5542: padding masked in the loss only still takes part in routing."""
    router = make(kind, force_balance=force)
    x, valid = rows(8), everyone(8)
    valid[[1, 6, 7]] = False
    x[1] = float("nan")
    x.requires_grad_()
    routing, aux = router(x, valid_T=valid)
    assert (routing.expert_ids[~valid] == -1).all() and not routing.weights[~valid].any()
    assert (routing.expert_ids[valid] >= 0).all() and routing.bad_tokens == 0
    assert aux.num_tokens == 5 and aux.load.sum() == router.load_E.sum() == 5 * K
    routing.weights.square().sum().backward()
    assert x.grad is not None and not x.grad[~valid].any() and x.grad.isfinite().all()
    assert router.weight.grad is not None and router.weight.grad.isfinite().all()
    assert torch.equal(routing.weights[valid], router(x[valid])[0].weights)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_logits_are_counted_and_never_duplicate_ids(kind: str, force: bool) -> None:
    """vllm-project/vllm#39391, flashinfer-ai/flashinfer#1351, ROCm/aiter#4530: sentinels, or one id K times."""
    nan, inf = float("nan"), float("inf")
    router = make(kind, force_balance=force, aux_loss_coef=1.0, z_loss_coef=1.0)
    good = [0.5, 0.25, 0.0, -0.25, -0.5, 1.0]
    bad = [[nan] * E, [-inf] * E, [inf, *good[1:]], [*good[:5], nan], [-inf, *good[1:]]]
    x = with_logits(router, [good, *bad, good])
    # an infinite entry of x times a zero of the weight is NaN, so the whole row of logits is not finite
    routing, aux = router(x)
    assert routing.bad_tokens is not None and routing.bad_tokens == 5 and routing.bad_tokens.dtype == torch.int64
    assert (routing.expert_ids[1:6] == -1).all() and not routing.weights[1:6].any()
    assert all(len(set(ids)) == K and min(ids) >= 0 for ids in routing.expert_ids[[0, 6]].tolist())
    assert aux.load.sum() == router.load_E.sum() == 2 * K and aux.loss.isfinite()


@pytest.mark.parametrize("bad_value", [float("nan"), float("inf"), -float("inf")])
def test_one_non_finite_logit_is_enough(bad_value: float) -> None:
    """vllm-project/vllm#39391: a single -inf or NaN among finite logits, with top_k = E."""
    router = make("softmax", top_k=E)
    with torch.no_grad():
        router.weight[2] = bad_value
    routing, _ = router(rows(4).abs() + 1)
    assert routing.bad_tokens == 4 and (routing.expert_ids == -1).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("force", [False, True])
def test_zero_tokens_forward_and_backward(kind: str, force: bool) -> None:
    """InternLM/xtuner#1799: a rank without tokens takes part in forward and backward."""
    router = make(kind, force_balance=force, aux_loss_coef=1.0, aux_loss="sequence", z_loss_coef=1.0)
    x = rows(0).requires_grad_()
    routing, aux = router(x, valid_T=everyone(0), num_sequences=3)
    assert routing.expert_ids.shape == routing.weights.shape == (0, K)
    assert routing.expert_ids.dtype == torch.int64 and routing.weights.dtype == torch.float32
    (routing.weights.sum() + aux.loss).backward()
    assert x.grad is not None and x.grad.shape == (0, H)
    assert router.weight.grad is not None and not router.weight.grad.any()
    assert aux.load.tolist() == [0] * E and aux.num_tokens == 0 and routing.bad_tokens == 0


@pytest.mark.parametrize("shape", [(1, 1), (E, E), (1, E)])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_extreme_top_k(kind: str, shape: tuple[int, int]) -> None:
    top_k, experts = shape
    value = config(router=kind, top_k=top_k, num_experts=experts, z_loss_coef=0.1)
    routing, _ = build_router(value, 0)(rows(7))
    if top_k == experts:
        assert (routing.expert_ids.sort(1).values == torch.arange(experts)).all()
    assert ((routing.expert_ids >= 0) & (routing.expert_ids < experts)).all()
    torch.testing.assert_close(routing.weights.sum(1), torch.ones(7))


def test_wrong_inputs_are_refused_with_their_values() -> None:
    router = make("softmax")
    with pytest.raises(InputError, match=r"\[T, 8\], got \(2, 3, 8\) torch\.float32; flatten"):
        router(torch.zeros(2, 3, H))
    with pytest.raises(InputError, match=r"got \(2, 7\)"):
        router(torch.zeros(2, 7))
    with pytest.raises(InputError, match=r"torch\.int64"):
        router(torch.zeros(2, H, dtype=torch.int64))
    with pytest.raises(InputError, match=r"valid_T must be bool \[2\] on cpu, got torch\.int64 \(2,\)"):
        router(torch.zeros(2, H), valid_T=torch.ones(2, dtype=torch.int64))
    with pytest.raises(InputError, match=r"bool \(3,\)"):
        router(torch.zeros(2, H), valid_T=everyone(3))

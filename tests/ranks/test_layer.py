"""The layer on several ranks against the same layer on one: outputs, every gradient, faults, disagreement."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import (
    CapacityError,
    InputError,
    MoEConfig,
    MoEError,
    MoELayer,
    NonFiniteError,
    PeerError,
    ProtocolError,
    Unavailable,
    update_routers,
)
from moe_ep.testing.ranks import RankPool

BASE: dict[str, Any] = dict(
    hidden_size=16, expert_intermediate_size=24, num_experts=8, top_k=2, max_tokens=12, num_shared_experts=1,
    shared_intermediate_size=8, shared_expert_gate=True, aux_loss_coef=0.01, z_loss_coef=0.001,
)  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "all2all": {},
    "all2all sigmoid": dict(router="sigmoid", bias_update_rate=0.001, routed_scale=2.5),
    "all2all activation weighting": dict(weighting="activation"),
    "all2all loop experts": dict(experts="loop"),
    "agrs": dict(dispatcher="agrs"),
    "agrs grouped": dict(dispatcher="agrs", router="grouped", num_groups=4, top_k=4),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=60) as ranks:
        yield ranks


def inputs(rank: int) -> Tensor:
    lengths = [4, 0, 3, 1]
    return torch.randn(3, lengths[rank], 16, generator=torch.Generator().manual_seed(rank))


def assert_near(got: Tensor, want: Tensor) -> None:
    """Equal up to float32 summation order: 1e-6 of the tensor's norm (measured 1e-7)."""
    assert got.shape == want.shape
    assert (got - want).double().norm() <= 1e-6 * want.double().norm()


def run_layer(layer: MoELayer, x: Tensor) -> Tensor:
    y, aux = layer(x)
    (y.square().sum() * 100 + aux.loss * aux.num_tokens).backward()
    return y.detach()


def against_one_rank(group: dist.ProcessGroup, rank: int, changes: dict[str, Any]) -> int:
    config = MoEConfig(**(BASE | changes))
    layer, alone = MoELayer(config, group), MoELayer(config, None)
    layer.reset_parameters(5)
    alone.reset_parameters(5)
    x = inputs(rank).requires_grad_()
    y = run_layer(layer, x)
    for peer in range(group.size()):
        peer_x = inputs(peer).requires_grad_()
        peer_y = run_layer(alone, peer_x)
        if peer == rank:
            assert_near(y, peer_y)
            assert_near(x.grad, peer_x.grad)
    first, num_local = layer.experts.first_expert, layer.dispatcher.num_local
    for name in ("w_gate_up", "w_down"):
        own, whole = getattr(layer.experts, name).grad, getattr(alone.experts, name).grad
        assert_near(own, whole[first : first + num_local])
    for module, other in ((layer.router, alone.router), (layer.shared, alone.shared)):
        for parameter, reference in zip(module.parameters(), other.parameters(), strict=True):
            total = parameter.grad.clone()
            dist.all_reduce(total, group=group)
            assert_near(total, reference.grad)
    with torch.no_grad():
        _, aux = layer(x)
    return int(aux.cross_rank_routes)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_and_gradients_equal_one_ranks(pool: RankPool, name: str, num_ranks: int) -> None:
    """Gradients are plain sums: no factor of R hides in them (pytorch/torchtitan#1551, pytorch/pytorch#160285)."""
    changes = dict(CONFIGS[name])
    if changes.get("num_groups"):
        changes |= dict(num_groups=num_ranks, top_k=num_ranks)
    cross = pool.run(against_one_rank, changes, num_ranks=num_ranks)
    assert sum(cross) > 0


def error_of(group: dist.ProcessGroup, rank: int, changes: dict[str, Any], fault: str) -> tuple[str, str]:
    layer = MoELayer(MoEConfig(**(BASE | changes)), group, layer_index=7)
    x = torch.randn(2, 3, 16)
    if rank == 1:
        x = {
            "nan": x.clone().fill_(float("nan")),
            "wide": torch.randn(2, 3, 17),
            "long": torch.randn(2, 7, 16),
            "dtype": x.bfloat16(),
            "router": x,
        }[fault]
    if rank == 1 and fault == "router":
        layer.router.forward = fail_in_router
    try:
        layer(x)
    except (MoEError, ZeroDivisionError) as err:
        layer.router.__dict__.pop("forward", None)
        y, _ = layer(torch.randn(2, 3, 16))  # the layer and the group are still usable
        assert y.shape == (2, 3, 16)
        return type(err).__name__, str(err)
    return "none", ""


def fail_in_router(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("in the router")


FAULTS = {
    "nan": (NonFiniteError.__name__, "layer 7, micro-batch 0: non-finite router logits in 6 tokens"),
    "wide": (InputError.__name__, "x must be [..., 16] (hidden_size), got (2, 3, 17)"),
    "long": (CapacityError.__name__, "layer 7, micro-batch 0: 14 tokens are more than max_tokens = 12"),
    "dtype": (InputError.__name__, "layer 7, micro-batch 0: x is torch.bfloat16, the dispatcher was built for float32"),
    "router": (ZeroDivisionError.__name__, "in the router"),
}


@pytest.mark.parametrize("dispatcher", ["all2all", "agrs"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_rank_raises_on_every_rank(pool: RankPool, fault: str, dispatcher: str) -> None:
    """Nobody waits for the rank that failed (Tencent-Hunyuan/UniRL#226)."""
    results = pool.run(error_of, dict(dispatcher=dispatcher), fault, num_ranks=2, timeout_s=20)
    kind, text = FAULTS[fault]
    assert results[1][0] == kind and text in results[1][1]
    assert results[0][0] == PeerError.__name__ and "rank 1 reported a fault" in results[0][1]
    assert "layer 7" in results[0][1]


def build(group: dist.ProcessGroup, rank: int, per_rank: list[dict[str, Any]]) -> tuple[str, str]:
    try:
        MoELayer(MoEConfig(**(BASE | per_rank[rank])), group)
    except MoEError as err:
        return type(err).__name__, str(err)
    return "none", ""


def test_ranks_that_disagree_get_the_same_message_with_every_difference(pool: RankPool) -> None:
    results = pool.run(build, [dict(top_k=2), dict(top_k=3, dispatcher="agrs")], num_ranks=2, timeout_s=20)
    assert results[0] == results[1] and results[0][0] == PeerError.__name__
    assert "top_k is 2 on rank 0, 3 on rank 1" in results[0][1]
    assert "dispatcher is 'all2all' on rank 0, 'agrs' on rank 1" in results[0][1]


def test_a_configuration_that_no_rank_can_run_is_refused_on_every_rank(pool: RankPool) -> None:
    results = pool.run(build, [dict(num_experts=6)] * 4, timeout_s=20)
    assert {kind for kind, _ in results} == {Unavailable.__name__}
    assert all("num_experts = 6 is not divisible by the 4 ranks" in text for _, text in results)


def no_collective(group: dist.ProcessGroup, rank: int, dispatcher: str) -> int:
    layer = MoELayer(MoEConfig(**(BASE | dict(dispatcher=dispatcher))), None)
    for _ in range(3 - rank):  # ranks run different numbers of steps: a collective would block or mix them up
        run_layer(layer, torch.randn(2, 3, 16))
    return 3 - rank


@pytest.mark.parametrize("dispatcher", ["local", "all2all", "agrs"])
def test_one_expert_rank_makes_no_collective(pool: RankPool, dispatcher: str) -> None:
    """deepspeedai/DeepSpeed#7141: independent replicas must not wait for each other."""
    assert pool.run(no_collective, dispatcher, num_ranks=2, timeout_s=20) == [3, 2]


def repeat(group: dist.ProcessGroup, rank: int, num_steps: int) -> None:
    config = MoEConfig(
        **(BASE | dict(num_experts=group.size(), top_k=1, normalize_weights=False, shared_expert_gate=False))
    )
    layer, alone = MoELayer(config, group), MoELayer(config, None)
    for step in range(num_steps):
        x = torch.randn(rank + step % 3, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        with torch.no_grad():
            assert_near(layer(x)[0], alone(x)[0])
    assert layer.dispatcher.lanes.num_lanes == layer.dispatcher.lanes.num_free == 1


def test_one_local_expert_and_changing_lengths(pool: RankPool) -> None:
    """vllm-project/vllm-ascend#3005: with one expert a rank, sizes must not be read before they have arrived."""
    pool.run(repeat, 100)


def global_loads(group: dist.ProcessGroup, rank: int) -> tuple[list[int], list[float]]:
    config = MoEConfig(**(BASE | dict(router="sigmoid", bias_update_rate=0.5, top_k=1)))
    model = torch.nn.ModuleList([MoELayer(config, group, layer_index=i) for i in range(2)])
    for _ in range(2):  # two micro-batches of one step
        for layer in model:
            run_layer(layer, torch.randn(rank + 1, 16))
    with torch.no_grad():
        model.eval()
        model[0](torch.randn(5, 16))
        model.train()
    loads = update_routers(model, group)
    again = update_routers(model, group)
    assert again.sum() == 0 and loads.shape == (2, 8)
    step = 0.5 * (loads.double().mean(1, keepdim=True) - loads).sign()
    biases = torch.stack([layer.router.bias for layer in model])
    assert torch.equal(biases, step.float()), "the second call, with equal loads, moves no bias"
    return loads.sum(1).tolist(), biases.flatten().tolist()


def test_routers_are_updated_once_a_step_from_the_loads_of_all_ranks(pool: RankPool) -> None:
    results = pool.run(global_loads)
    assert all(result == results[0] for result in results), "biases are equal on all ranks"
    assert results[0][0] == [2 * (1 + 2 + 3 + 4)] * 2


def layers_in_another_order(group: dist.ProcessGroup, rank: int, dispatcher: str) -> str:
    layers = [MoELayer(MoEConfig(**(BASE | dict(dispatcher=dispatcher))), group, layer_index=i) for i in range(2)]
    try:
        for layer in layers if rank == 0 else reversed(layers):
            layer(torch.randn(2, 16))
    except PeerError as err:
        return str(err)
    return ""


@pytest.mark.parametrize("dispatcher", ["all2all", "agrs"])
def test_layers_called_in_another_order_are_named_on_every_rank(pool: RankPool, dispatcher: str) -> None:
    """Rows of two layers would be mixed up without a word: nothing but the order says what belongs together."""
    for text in pool.run(layers_in_another_order, dispatcher, num_ranks=2):
        assert "rank 0 at layer 0, micro-batch 0, rank 1 at layer 1, micro-batch 0" in text


def second_derivative(group: dist.ProcessGroup, rank: int) -> str:
    layer = MoELayer(MoEConfig(**(BASE | dict(experts="loop"))), group)
    x = torch.randn(3, 16, requires_grad=True)
    y, _ = layer(x)
    try:
        torch.autograd.grad(y.sum(), x, create_graph=True)
    except ProtocolError as err:
        return str(err)
    return ""


def test_second_derivatives_are_refused_and_not_wrong(pool: RankPool) -> None:
    assert all("second derivatives do not travel" in text for text in pool.run(second_derivative, num_ranks=2))


def evaluate_first(group: dist.ProcessGroup, rank: int, dispatcher: str) -> None:
    layer = MoELayer(MoEConfig(**(BASE | dict(dispatcher=dispatcher))), group)
    with torch.inference_mode():
        layer(torch.randn(3, 16))
    run_layer(layer, torch.randn(3, 16))


@pytest.mark.parametrize("dispatcher", ["all2all", "agrs"])
def test_a_check_in_inference_mode_before_training_spoils_nothing(pool: RankPool, dispatcher: str) -> None:
    pool.run(evaluate_first, dispatcher, num_ranks=2)


def build_with(group: dist.ProcessGroup, rank: int, case: str) -> str:
    config = MoEConfig(**BASE)
    try:
        if case == "index":
            MoELayer(config, group, layer_index=rank)
        else:
            MoELayer(config, {"number": 3, "outsider": dist.GroupMember.NON_GROUP_MEMBER}[case])
    except MoEError as err:
        return str(err)
    return ""


@pytest.mark.parametrize(
    ("case", "want"),
    [
        ("index", "layer_index is 0 on rank 0, 1 on rank 1"),
        ("number", "must be a ProcessGroup or None, got int"),
        ("outsider", "this rank is not in the expert-parallel group"),
    ],
)
def test_what_cannot_be_a_layer_of_this_group_is_refused(pool: RankPool, case: str, want: str) -> None:
    assert all(want in text for text in pool.run(build_with, case, num_ranks=2))


def test_padding_may_hold_anything_with_shared_experts_too() -> None:
    layer = MoELayer(MoEConfig(**BASE))
    valid = torch.tensor([True, False, True])
    x = torch.randn(3, 16, requires_grad=True)
    with torch.no_grad():
        x[1] = float("nan")
    y, aux = layer(x, valid)
    (y[valid].square().sum() + aux.loss).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    assert (y[1] == 0).all() and x.grad is not None and (x.grad[1] == 0).all()


def test_a_closed_dispatcher_is_not_handed_out_again() -> None:
    config = MoEConfig(**BASE)
    MoELayer(config).dispatcher.close()
    MoELayer(config)(torch.randn(2, 16))


def test_stages_of_another_dispatcher_or_wrong_rows_are_refused() -> None:
    one, other = MoELayer(MoEConfig(**BASE)), MoELayer(MoEConfig(**(BASE | dict(top_k=3))))
    flight = one.launch_dispatch(torch.randn(4, 16))
    with pytest.raises(ProtocolError, match="dispatch_postprocess was called on another dispatcher"):
        other.dispatcher.dispatch_postprocess(flight.ticket)
    rows = one.dispatcher.dispatch_postprocess(flight.ticket)
    with pytest.raises(
        InputError, match=r"must be \(8, 16\) torch.float32, one row for each row of the ExpertInput, got \(7"
    ):
        one.dispatcher.combine_preprocess(flight.ticket, torch.zeros(rows.capacity - 1, 16))

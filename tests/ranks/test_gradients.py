"""The gradient norm of a model whose experts are spread, copied or sharded, against one rank that holds it all."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from moe_ep import DominoStack, InputError, clip_grad_norm_, grad_norm, moe_layers
from moe_ep.testing.ranks import RankPool
from tests.ranks.small_stack import H, loss_of, small_stack

WAYS = ["copies", "FSDP2 of the rest", "FSDP2 of the rest in each group", "FSDP2 of both"]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=120) as ranks:
        yield ranks


def rows(rank: int) -> Tensor:
    return torch.randn(5 + rank, H, generator=torch.Generator().manual_seed(rank))


def backward(model: DominoStack, ranks: list[int]) -> None:
    for rank in ranks:
        (y,), (auxes,) = model([rows(rank)])
        loss_of(y, auxes).backward()


def expert_parameters(model: DominoStack) -> set[torch.nn.Parameter]:
    return {p for layer in moe_layers(model) for p in layer.experts.parameters()}


def spread(way: str, rank: int) -> DominoStack:
    """Two expert-parallel groups of two ranks: a mesh [dp 2, ep 2]; gradients of all four ranks, summed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = small_stack(mesh["ep"].get_group())
    experts = expert_parameters(model)
    if way == "FSDP2 of both":
        for layer in moe_layers(model):
            fully_shard(layer.experts, mesh=mesh["dp"])
    if way != "copies":
        everybody = init_device_mesh("cpu", (4,))
        for layer in model.layers:
            over = mesh["ep"] if "each group" in way else everybody
            ignored = set() if way == "FSDP2 of both" else experts
            fully_shard(layer, mesh=over, ignored_params=ignored)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    backward(model, [rank])
    for name, param in model.named_parameters():
        if (isinstance(param, DTensor) and param.device_mesh.size() == 4) or (".experts." in name and way == WAYS[-1]):
            continue
        grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        over_dp = ".experts." in name or isinstance(param, DTensor)
        dist.all_reduce(grad, group=mesh["dp"].get_group() if over_dp else None)
    return model


def whole_of(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def body_norm(group: dist.ProcessGroup, rank: int, way: str) -> None:
    model, alone = spread(way, rank), small_stack(None)
    backward(alone, [0, 1, 2, 3])
    for norm_type in (1.0, 2.0, math.inf):
        norm = grad_norm(model, group, norm_type=norm_type)
        everything = torch.cat([p.grad.flatten() for p in alone.parameters() if p.grad is not None]).double()
        want = torch.linalg.vector_norm(everything, norm_type)
        torch.testing.assert_close(norm, want, rtol=1e-5, atol=0)
        torch.testing.assert_close(grad_norm(alone, None, norm_type=norm_type), want, rtol=1e-5, atol=0)
    before = clip_grad_norm_(model, 0.5, group)
    torch.testing.assert_close(before, clip_grad_norm_(alone, 0.5, None), rtol=1e-5, atol=0)
    for name, param in model.named_parameters():
        want_grad = alone.get_parameter(name).grad
        assert param.grad is not None and want_grad is not None
        if ".experts." in name:  # this rank's half of the experts
            want_grad = want_grad.chunk(2)[rank % 2]
        torch.testing.assert_close(whole_of(param.grad), want_grad, rtol=1e-4, atol=1e-6)
    assert grad_norm(model, group).item() == pytest.approx(0.5, rel=1e-4)
    assert clip_grad_norm_(model, 10.0, group).item() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_the_norm_is_that_of_one_rank_with_everything(pool: RankPool, way: str) -> None:
    pool.run(body_norm, way)


def body_refused(group: dist.ProcessGroup, rank: int) -> None:
    model = small_stack(group)
    backward(model, [rank])
    with pytest.raises(InputError, match=r"spread over ranks \[0, 1\], of which the group lacks"):
        grad_norm(model, None)
    with pytest.raises(InputError, match="max_norm must lie above 0, got 0"):
        clip_grad_norm_(model, 0, group)
    with pytest.raises(InputError, match=r"must be an nn\.Module, got generator; .* in place of model\.parameters"):
        clip_grad_norm_(model.parameters(), 1.0, group)
    with pytest.raises(InputError, match="norm_type must lie above 0"):
        grad_norm(model, group, norm_type=0)

    fully_shard(moe_layers(model)[0].experts, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(InputError, match="sharded over 2 ranks and spread over 2, which makes 4, but the group has 2"):
        grad_norm(model, group)


def test_what_would_count_wrongly_is_refused(pool: RankPool) -> None:
    pool.run(body_refused, num_ranks=2)

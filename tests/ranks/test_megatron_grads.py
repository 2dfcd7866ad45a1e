"""Megatron's gradient buffers, fused weight gradients and distributed optimizer on our dispatchers and interleaved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moe_ep.testing.ranks import RankPool
from tests.ranks import megatron_cpu as cpu

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (moe-ep[megatron])")

KINDS: list[tuple[str | None, int]] = [(None, 1), ("all2all", 1), ("all2all", 2)]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120) as ranks:
        yield ranks


@contextlib.contextmanager
def fused_gradients(calls: list[tuple[int, ...]]) -> Iterator[None]:
    """Apex's kernel that adds a weight's gradient straight to `main_grad`, as plain torch."""
    from megatron.core.tensor_parallel import layers

    def accumulate(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        calls.append(tuple(main_grad.shape))
        main_grad.add_(grad.t() @ x)

    kernel = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    with (
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", kernel, create=True),
    ):
        yield


def wrapped_model(kind: tuple[str | None, int], sharded: bool, overlap: bool = False, **changes: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from moe_ep.integrations.megatron import use_domino

    model = cpu.build(kind[0], **changes)
    model = use_domino(model, kind[1]) if kind[1] > 1 else model
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded, overlap_grad_reduce=overlap, overlap_param_gather=overlap, bucket_size=1000
    )
    return DistributedDataParallel(model.config, settings, model)


def accumulated(group: Any, rank: int, sharded: bool, changes: dict[str, Any]) -> Any:
    """main_grad after two batches, the first of which is not reduced; and shapes of what was added in a fused way."""
    from megatron.core.distributed import finalize_model_grads

    found, calls = [], []
    with cpu.on_cpu(), cpu.parallel(2):
        for kind in KINDS:
            fused: list[tuple[int, ...]] = []
            with fused_gradients(fused):
                wrapped = wrapped_model(kind, sharded, **changes)
                wrapped.zero_grad_buffer()
                with wrapped.no_sync():
                    cpu.losses(wrapped, rank, 0, sequences=4).mean().backward()
                cpu.losses(wrapped, rank, 1, sequences=4).mean().backward()
                finalize_model_grads([wrapped])
            found.append({name: p.main_grad.clone() for name, p in wrapped.module.named_parameters()})
            calls.append(fused)
    return found, calls


WHOLE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.mark.parametrize("sharded", [False, True], ids=["reduced", "reduce-scattered"])
@pytest.mark.parametrize("changes", [{}, WHOLE], ids=["kept", "recomputed"])
def test_fused_weight_gradients_are_the_plain_ones(pool: RankPool, sharded: bool, changes: dict[str, Any]) -> None:
    plain = pool.run(accumulated, sharded, changes)
    fused = pool.run(accumulated, sharded, dict(changes, gradient_accumulation_fusion=True))
    for (want, none), (got, calls) in zip(plain, fused, strict=True):
        assert none == [[], [], []]
        experts = [len([shape for shape in each if 24 in shape or 48 in shape]) for each in calls]
        assert experts[0] == experts[1] >= 2 * 2 * 4 * 2, "two batches, two layers, four experts, two weights"
        assert experts[2] == 2 * experts[1], "two pieces"
        for grads in (*want[1:], *got):
            assert grads.keys() == want[0].keys()
            for name, grad in grads.items():
                error = (grad - want[0][name]).double().norm()
                assert error <= 4e-6 * want[0][name].double().norm(), name
        assert all(torch.equal(got[1][name], grad) for name, grad in got[0].items()), "native and ours, bit for bit"


class NamedAsOnGpu(TorchFunctionMode):
    """Megatron's optimizer knows a dtype by `tensor.type()` and wants it to say "torch.cuda"."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else result


def optimized(group: Any, rank: int, overlap: bool) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    found = []
    with cpu.on_cpu(), cpu.parallel(2), NamedAsOnGpu():
        for kind in KINDS:
            wrapped = wrapped_model(kind, True, overlap)
            config = OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=0.1, use_distributed_optimizer=True)
            optimizer, history = get_megatron_optimizer(config, [wrapped]), []
            for _ in range(4):
                wrapped.zero_grad_buffer()
                optimizer.zero_grad()
                loss = cpu.losses(wrapped, rank, 0, sequences=4).mean()
                loss.backward()
                finalize_model_grads([wrapped])
                _, norm, _ = optimizer.step()
                history.append((loss.item(), float(norm)))
            found.append(history)
    return found


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_megatrons_distributed_optimizer(pool: RankPool, overlap: bool) -> None:
    """Overlapped: gradients are reduced behind backward, parameters gathered by hooks in front of modules' forward."""
    for native, ours, pieces in pool.run(optimized, overlap):
        assert ours == native, "losses and global gradient norms, bit for bit"
        assert native[-1][0] < native[0][0]
        for got, want in zip(pieces, native, strict=True):
            assert got == pytest.approx(want, rel=1e-5)

"""Copies of hot experts in Megatron's own MoE layer: everything but the rows' place is as without them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from moe_ep import RecipeError
from moe_ep.replica.messages import GroupTransport
from moe_ep.replica.transport import InFlight
from moe_ep.testing.ranks import RankPool
from tests.ranks import megatron_cpu as cpu

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (moe-ep[megatron])")
from tests.ranks.test_megatron_grads import fused_gradients

WHOLE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
MOE = dict(recompute_granularity="selective", recompute_modules=["moe"])
SHARED = dict(moe_shared_expert_intermediate_size=24)
COPIES = {"slots": 2}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120) as ranks:
        yield ranks


def build(replica: dict[str, Any] | None, pieces: int = 1, dispatcher: str = "all2all", **changes: Any) -> Any:
    """A small GPT on our dispatcher."""
    from moe_ep.integrations.megatron import use_domino, use_moe_ep

    config = cpu.small_config(**changes)
    spec = use_moe_ep(cpu.layer_spec(config), dispatcher=dispatcher, max_tokens=64, replica=replica)
    model = cpu.small_gpt(config, spec)
    return model if pieces == 1 else use_domino(model, pieces)


def check_returned(model: Any) -> None:
    from moe_ep.integrations.megatron import moe_layers

    for layer in moe_layers(model):
        if layer.token_dispatcher.copies is not None:
            layer.token_dispatcher.copies.runtime.check_returned()


def trained(group: Any, rank: int, pieces: int, changes: dict[str, Any], dispatcher: str, lose: bool) -> Any:
    """Without and with copies: losses of steps with updates, the last gradients; and how many copies there were."""
    found, copies = [], list[int]()
    lost = mock.patch.object(GroupTransport, "_pull", lambda *_: InFlight(lambda: None))
    with cpu.on_cpu(), cpu.parallel(2), cpu.counted_copies(copies), lost if lose else contextlib.nullcontext():
        for replica in (None, COPIES):
            model, losses = build(replica, pieces, dispatcher, **changes), []
            model.train()
            for step in range(4):
                loss = cpu.losses(model, rank, step, sequences=2 * pieces).mean()
                loss.backward()
                check_returned(model)
                losses.append(loss.item())
                grads = {name: p.grad.clone() for name, p in model.named_parameters()}
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.5 * p.grad
                        p.grad = None
            found.append((losses, grads))
    return found, copies


def difference(want: Any, got: Any) -> float:
    """The largest, of losses relatively and of gradients by their norm."""
    (losses, grads), (other_losses, other) = want, got
    assert grads.keys() == other.keys()
    apart = [abs(a - b) / abs(a) for a, b in zip(losses, other_losses, strict=True)]
    return max(*apart, *(float((grads[n] - other[n]).norm() / grads[n].norm()) for n in grads))


@pytest.mark.parametrize(
    ("pieces", "changes", "dispatcher"),
    [
        *((1, {}, "all2all"), (1, {}, "agrs"), (1, MOE, "all2all"), (1, WHOLE, "all2all"), (2, {}, "all2all")),
        (2, WHOLE, "all2all"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, MOE, "all2all"), (1, SHARED, "all2all"))),
    ],
)
def test_training_equals_training_without(
    pool: RankPool, pieces: int, changes: dict[str, Any], dispatcher: str
) -> None:
    for (plain, copied), copies in pool.run(trained, pieces, changes, dispatcher, False):
        assert sum(count > 0 for count in copies) >= len(copies) / 2 > 0
        assert difference(plain, copied) < 1e-5


def test_gradients_of_copies_that_stay_away_show(pool: RankPool) -> None:
    assert max(difference(*found) for found, _ in pool.run(trained, 1, {}, "all2all", True)) > 1e-3


def buffers(group: Any, rank: int, sharded: bool, fused: bool, overlapped: bool) -> Any:
    """Without and with copies: main_grad after two batches and a step of Megatron's distributed optimizer, if any."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from tests.ranks.test_megatron_grads import NamedAsOnGpu

    found, copies, late = [], list[int](), list[bool]()
    with cpu.on_cpu(), cpu.parallel(2), cpu.counted_copies(copies, late), fused_gradients([]), NamedAsOnGpu():
        for replica in (None, COPIES):
            model = build(replica, gradient_accumulation_fusion=fused, expert_model_parallel_size=2)
            how = dict(overlap_grad_reduce=overlapped, overlap_param_gather=overlapped)
            settings = DistributedDataParallelConfig(use_distributed_optimizer=sharded, **how)
            wrapped = DistributedDataParallel(model.config, settings, model)
            config = OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=sharded)
            config.overlap_param_gather = overlapped
            optimizer, losses = get_megatron_optimizer(config, [wrapped]), []
            for step in range(3):
                wrapped.zero_grad_buffer()
                optimizer.zero_grad()
                with wrapped.no_sync():
                    cpu.losses(wrapped, rank, 2 * step).mean().backward()
                loss = cpu.losses(wrapped, rank, 2 * step + 1).mean()
                loss.backward()
                finalize_model_grads([wrapped])
                losses.append(loss.item())
                grads = {name: p.main_grad.clone() for name, p in model.named_parameters()}
                optimizer.step()
            found.append((losses, grads))
    assert set(late) == {overlapped}
    return found, copies


@pytest.mark.parametrize(
    ("sharded", "fused", "overlapped"),
    [(False, False, False), (False, True, False), (True, False, False), (True, True, False), (True, True, True)],
)
def test_gradient_buffers_of_megatron(pool: RankPool, sharded: bool, fused: bool, overlapped: bool) -> None:
    """Reduced or reduce-scattered, fused or not; and gathered in the experts' hooks, behind which copies set off."""
    for (plain, copied), copies in pool.run(buffers, sharded, fused, overlapped):
        assert sum(count > 0 for count in copies) >= len(copies) / 2 > 0
        assert difference(plain, copied) < 1e-5


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=120) as ranks:
        yield ranks


@pytest.mark.parametrize("overlapped", [False, True])
def test_two_groups_of_ranks_with_the_same_experts(four: RankPool, overlapped: bool) -> None:
    """Each places copies by its own load; gradients are reduced over both, and parameters gathered from both."""
    for (plain, copied), copies in four.run(buffers, True, True, overlapped):
        assert sum(count > 0 for count in copies) >= len(copies) / 2 > 0
        assert difference(plain, copied) < 1e-5


def described(group: Any, rank: int) -> Any:
    found = []
    with cpu.on_cpu(), cpu.parallel(2):
        for replica in (None, COPIES):
            model = build(replica)
            state = model.sharded_state_dict()
            keys = sorted((s.key, str(getattr(s, "global_shape", "")), str(s.replica_id)) for s in state.values())
            values = {name: p.detach().clone() for name, p in model.named_parameters()}
            with torch.no_grad():
                loss = cpu.losses(model, rank, 0).mean()
            check_returned(model)
            found.append((keys, sorted(model.state_dict()), values, len(list(model.modules())), loss, repr(model)))
    return found


def test_parameters_checkpoints_and_initial_values_know_no_copies(pool: RankPool) -> None:
    for (keys, names, values, modules, loss, _), (keys2, names2, values2, modules2, loss2, text) in pool.run(described):
        assert (keys, names, modules) == (keys2, names2, modules2)
        assert all(torch.equal(value, values2[name]) for name, value in values.items())
        assert torch.allclose(loss, loss2, rtol=1e-6)
        assert "replicas: 2 slot(s) a rank" in text


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "replica.transport = 'peer'": ({"slots": 2, "transport": "peer"}, {}),
    "replica.joint = true": ({"slots": 2, "joint": True}, {}),
    "unknown option 'slot'": ({"slot": 2}, {}),
    "gated_linear_unit = False": (COPIES, dict(gated_linear_unit=False)),
    "add_bias_linear = True": (COPIES, dict(add_bias_linear=True)),
    "replica.slots = 5 are more than the 4 experts": ({"slots": 5}, {}),
}


def refused(group: Any, rank: int) -> dict[str, str]:
    said = {}
    with cpu.on_cpu(), cpu.parallel(2):
        for words, (replica, changes) in REFUSED.items():
            try:
                build(replica, **changes)
            except RecipeError as err:
                said[words] = str(err)
    return said


def test_what_copies_are_not_served_with_is_refused_by_name(pool: RankPool) -> None:
    for said in pool.run(refused):
        assert said.keys() == REFUSED.keys()
        for words, text in said.items():
            assert words in text, text

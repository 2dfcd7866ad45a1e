"""Replicas in the layer on two GPUs: over messages and peer memory, all experts that can, bfloat16 and float32.

Bounds for bfloat16: a weight gradient is rounded where it is made and where it is added up, so with a copy twice more,
2^-9 each; some 2e-3 of a gradient's norm are seen on a CPU, 2e-2 are allowed. What a lost copy does is ten times that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep import MoEConfig, MoEError, MoELayer, close_dispatchers, moe_layers
from moe_ep.experts_registry import find_experts
from moe_ep.replica import runtime
from moe_ep.replica.messages import GroupTransport
from moe_ep.replica.transport import InFlight
from moe_ep.testing.ranks import RankPool
from tests.gpu.test_host_syncs_gpu import counted
from tests.ranks.small_runtime import Step, Training, largest_difference

pytestmark = pytest.mark.gpu(2)
PEER, MESSAGES = (dict(replica=dict(slots=2, transport=kind)) for kind in ("peer", "messages"))
QUACK: dict[str, Any] = dict(dtype="bfloat16", experts="quack")
DIRECT: dict[str, Any] = dict(dispatcher="direct")
BFLOAT16: dict[str, dict[str, Any]] = {
    "all2all torch": dict(dtype="bfloat16"),
    "agrs torch": dict(dtype="bfloat16", dispatcher="agrs"),
    "all2all quack": QUACK,
    "direct torch": dict(dtype="bfloat16") | DIRECT,
    "direct quack": QUACK | DIRECT,
    "direct quack, no host": QUACK | DIRECT | dict(capacity_factor=2.0),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=180) as ranks:
        yield ranks


def need(changes: dict[str, Any]) -> None:
    """Skip where the experts' library is not to be had."""
    reasons = find_experts(changes.get("experts", "torch")).machine_reasons()
    if reasons:
        pytest.skip("; ".join(reasons))


def train(
    group: dist.ProcessGroup, rank: int, changes: dict[str, Any], steps: int, num: int = 1, layers: int = 2
) -> list[Step]:
    training = Training(group, changes, num, device="cuda", layers=layers)
    done = [training.step(number) for number in range(steps)]
    moe = moe_layers(training.stack)[0]
    moe.dispatcher.raise_if_faulted()
    if moe.replicas is not None:
        moe.replicas.check_returned()
        assert moe.replicas.lanes[0].transport.reads_plan == (moe.config.replica.transport == "messages")
    close_dispatchers(group)
    return done


def norm_difference(ours: list[list[Step]], theirs: list[list[Step]]) -> float:
    """Of the first step's gradients, relative to their norms."""
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a[0].grads, b[0].grads, strict=True)]
    return max(float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-9)) for a, b in pairs)


def check_replicas_worked(steps: list[Step]) -> None:
    copies = [count for step in steps for count in step.replicas]
    assert sum(count > 0 for count in copies) >= 0.9 * len(copies)
    assert all(moved > 0 for step in steps for moved, count in zip(step.moved, step.replicas, strict=True) if count)
    assert all(after <= before for s in steps for after, before in zip(s.after, s.before, strict=True))


@pytest.mark.parametrize("transport", [PEER, MESSAGES], ids=["peer", "messages"])
@pytest.mark.parametrize("dispatcher", ["all2all", "agrs", "direct"])
def test_float32_training_equals_training_without(pool: RankPool, dispatcher: str, transport: dict[str, Any]) -> None:
    ours = pool.run(train, transport | dict(dispatcher=dispatcher), 20)
    theirs = pool.run(train, dict(dispatcher=dispatcher), 20)
    assert largest_difference(ours, theirs) < 1e-4
    check_replicas_worked(ours[0])


@pytest.mark.parametrize("transport", [PEER, MESSAGES], ids=["peer", "messages"])
@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_gradients_and_losses(pool: RankPool, name: str, transport: dict[str, Any]) -> None:
    """Gradients behind one layer, whose router sees the same bits; losses over 20 steps of two layers."""
    changes = BFLOAT16[name]
    need(changes)
    ours, theirs = (pool.run(train, changes | how, 1, 1, 1) for how in (transport, {}))
    assert norm_difference(ours, theirs) < 2e-2
    ours, theirs = (pool.run(train, changes | how, 20) for how in (transport, {}))
    for mine, other in zip(ours[0], theirs[0], strict=True):
        assert mine.loss == pytest.approx(other.loss, rel=2e-2)
    check_replicas_worked(ours[0])


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("dispatcher", ["all2all", "direct"])
def test_interleaved(pool: RankPool, dispatcher: str, num: int, joint: bool) -> None:
    where = dict(dispatcher=dispatcher)
    ours = pool.run(train, where | dict(replica=dict(slots=2, joint=joint, transport="peer")), 5, num)
    assert largest_difference(ours, pool.run(train, where, 5, num)) < 1e-4
    assert all(count > 0 for step in ours[0] for count in step.replicas)


def not_reduced(group: dist.ProcessGroup, rank: int, changes: dict[str, Any]) -> list[Step]:
    kept = mock.MagicMock(side_effect=lambda *_: InFlight(lambda: None))
    with mock.patch.object(GroupTransport, "_pull", kept):
        return train(group, rank, changes, 1, 1, 1)


def test_gradients_that_stay_with_the_copies_show(pool: RankPool) -> None:
    theirs = pool.run(train, {}, 1, 1, 1)
    assert norm_difference(pool.run(not_reduced, MESSAGES), theirs) > 0.2


def refusals(group: dist.ProcessGroup, rank: int) -> list[str]:
    said = []
    sizes: dict[str, Any] = dict(
        hidden_size=64, expert_intermediate_size=64, num_experts=8, top_k=2, max_tokens=64, dtype="bfloat16"
    )
    for changes in (dict(capacity_factor=2.0), dict()):
        try:
            MoELayer(MoEConfig(**sizes, **DIRECT, **PEER, **changes), group)
            said.append("built")
        except MoEError as err:
            said.append(f"{type(err).__name__}: {err}")
    close_dispatchers(group)
    return said


def test_experts_in_two_calls_need_counts_on_the_host(pool: RankPool) -> None:
    for without, with_counts in pool.run(refusals):
        assert without.startswith("RecipeError: replica.slots = 2 cannot be had with experts = 'torch'")
        assert "leave capacity_factor and budget_rows unset, or take experts = 'quack'" in without
        assert with_counts == "built"


def syncs(group: dist.ProcessGroup, rank: int, changes: dict[str, Any]) -> tuple[int, str, int]:
    layer = MoELayer(
        MoEConfig(hidden_size=64, expert_intermediate_size=64, num_experts=8, top_k=2, max_tokens=64, **changes), group
    ).cuda()
    x = torch.randn(48, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    result = (*counted(lambda: layer(x)[0].backward(dy)), layer.dispatcher.host_syncs)
    assert layer.replicas is not None and layer.replicas.host_syncs == 0
    close_dispatchers(group)
    return result


@pytest.mark.parametrize("name", ["all2all quack", "direct quack, no host"])
def test_kernels_over_peer_memory_wait_for_no_host(pool: RankPool, name: str) -> None:
    need(BFLOAT16[name])
    for count, text, declared in pool.run(syncs, BFLOAT16[name] | PEER):
        assert count == declared, f"{declared} declared, {count} counted\n{text}"


def other_plan(group: dist.ProcessGroup, rank: int) -> str:
    """Rank 1 plans from other loads; nothing is read on the host, so the record says it behind the step."""
    real = runtime.plan_by_kernels
    training = Training(group, PEER, device="cuda")
    dispatcher = moe_layers(training.stack)[0].dispatcher
    plan = real if rank == 0 else lambda replica, load: real(replica, load.flip(1).contiguous())
    with mock.patch.object(runtime, "plan_by_kernels", plan):
        training.stack(training.inputs(0, 0))
    try:
        dispatcher.raise_if_faulted()
    except MoEError as err:
        return f"{type(err).__name__}: {err}"
    finally:
        close_dispatchers(group)
    return "nothing"


def test_a_plan_that_differs_is_in_the_fault_record(pool: RankPool) -> None:
    with RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=120) as two:
        for said in two.run(other_plan):
            assert said.startswith("PlanError: layer ") and "the replica plan of rank 1 differs" in said

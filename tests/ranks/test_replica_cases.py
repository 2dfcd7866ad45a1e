"""Replicas at the edges: no tokens, one popular expert, no gradients, faults on one rank, leases kept too long."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from moe_ep import (
    MoEConfig,
    MoEError,
    MoELayer,
    RecipeError,
    close_dispatchers,
    moe_layers,
    register_experts,
)
from moe_ep.dispatch.all2all import All2All
from moe_ep.experts import GroupedExperts
from moe_ep.experts_registry import find_experts, known_experts
from moe_ep.replica import exchange, planning
from moe_ep.replica.lease import Lease
from moe_ep.testing.ranks import RankPool
from tests.ranks.small_runtime import SIZES, Training, largest_difference, train
from tests.ranks.small_stack import MOE

ON = dict(replica=dict(slots=2))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=90) as ranks:
        yield ranks


def layer_of(group: dist.ProcessGroup | None, index: int = 0, **changes: Any) -> MoELayer:
    return MoELayer(MoEConfig(**(MOE | SIZES | ON | changes)), group, layer_index=index)


def one_popular(group: dist.ProcessGroup, rank: int) -> list[Any]:
    """Every token of every rank on expert 2, with replicas and without: outputs, gradients, rows of each rank."""
    results = []
    for changes in (ON, dict(replica={})):
        layer = layer_of(group, top_k=1, num_shared_experts=0, shared_intermediate_size=0, **changes)
        x = torch.randn(24, 16, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        with torch.no_grad():
            layer.router.weight.zero_()[2] = 1.0
            x.abs_()
        y, aux = layer(x)
        y.square().sum().backward()
        rows = aux.rank_load.clone()
        dist.all_reduce(rows, group=group)
        results.append((y.detach(), [x.grad, *(p.grad for p in layer.parameters())], rows.tolist()))
    return results


def test_all_load_in_one_expert(pool: RankPool) -> None:
    for (y, grads, rows), (plain_y, plain_grads, plain_rows) in pool.run(one_popular):
        torch.testing.assert_close(y, plain_y, rtol=1e-5, atol=1e-7)
        for grad, plain in zip(grads, plain_grads, strict=True):
            torch.testing.assert_close(grad, plain, rtol=1e-4, atol=1e-6)
        assert (rows, plain_rows) == ([24] * 4, [0, 96, 0, 0])


def nobody(group: dist.ProcessGroup, rank: int) -> None:
    layer = layer_of(group)
    y, aux = layer(torch.zeros(0, 16, requires_grad=True))
    (y.sum() + aux.loss).backward()
    assert y.shape == (0, 16) and int(aux.replicas) == 0
    assert all(p.grad is not None and not p.grad.any() for p in layer.experts.parameters())


def test_no_token_on_any_rank(pool: RankPool) -> None:
    pool.run(nobody)


def evaluated(group: dist.ProcessGroup, rank: int, context: Callable[[], Any]) -> list[Any]:
    """Steps with evaluations in between, the first of them before anything else."""
    training, done = Training(group, ON), []
    for number in range(3):
        with context():
            outputs, auxes = training.stack(training.inputs(number, 7))
        assert not outputs[0].requires_grad and int(sum(aux.replicas for aux in auxes[0])) >= 0
        done.append(training.step(number))
    training.runtime.check_returned()
    return done


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_in_between_changes_nothing(pool: RankPool, context: Callable[[], Any]) -> None:
    ours = pool.run(evaluated, context, num_ranks=2)
    assert largest_difference(ours, pool.run(train, ON, 3, num_ranks=2)) == 0


def test_gradient_accumulation(pool: RankPool) -> None:
    ours = pool.run(train, ON, 3, 2, 2, num_ranks=2)
    assert largest_difference(ours, pool.run(train, {}, 3, 2, 2, num_ranks=2)) < 1e-5


def parts_of_a_gradient(group: dist.ProcessGroup, rank: int) -> list[float]:
    """Of x alone, and with experts that are not trained."""
    differences = []
    for frozen in (False, True):
        results = []
        for changes in (ON, {}):
            training = Training(group, changes)
            for layer in moe_layers(training.stack) if frozen else []:
                layer.experts.requires_grad_(False)
            (x,) = training.inputs(3, 0)
            (y,), _ = training.stack([x.requires_grad_()])
            if frozen:
                y.square().sum().backward()
                results.append(x.grad)
            else:
                results += torch.autograd.grad(y.square().sum(), x)
            if changes:
                training.runtime.check_returned()
            if changes and not frozen:
                training.step(0)
        differences.append(float((results[0] - results[1]).norm() / results[1].norm()))
    return differences


def test_gradients_of_some_inputs_only(pool: RankPool) -> None:
    assert max(max(each) for each in pool.run(parts_of_a_gradient, num_ranks=2)) < 1e-6


def sharded_as_a_whole(group: dist.ProcessGroup, rank: int, num: int) -> float:
    """Layers with all that is in them as units of FSDP2 over two ranks that hold the same experts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    results = []
    for changes in (ON, {}):
        training = Training(mesh["ep"].get_group(), changes, num)
        for layer in training.stack.layers:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=True)
            assert isinstance(layer, FSDPModule)
            layer.set_force_sum_reduction_for_comms(True)
            layer.set_gradient_divide_factor(1.0)
        for _ in range(2):
            ys, _ = training.stack(training.inputs(mesh["dp"].get_local_rank(), 0))
            torch.stack([y.square().mean() for y in ys]).sum().backward()
        if changes:
            assert all(lane.holder is None for lane in training.runtime.lanes)
        grads = [p.grad for p in training.stack.parameters()]
        results.append([grad.full_tensor() for grad in grads if isinstance(grad, DTensor)])
        assert len(results[-1]) == len(grads)
    return max(float((a - b).norm() / b.norm().clamp_min(1e-9)) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("num", [1, 2])
def test_a_framework_that_takes_weights_away_in_between(pool: RankPool, num: int) -> None:
    assert max(pool.run(sharded_as_a_whole, num)) < 1e-5


# faults: what a call on one rank makes every rank raise, and the next step works


def said_by(fn: Callable[[], Any]) -> str:
    try:
        fn()
    except MoEError as err:
        return f"{type(err).__name__}: {err}"
    except ValueError as err:
        return f"a bare ValueError: {err}"
    return "nothing"


def fault(group: dist.ProcessGroup, rank: int, kind: str) -> tuple[str, float]:
    layer = layer_of(group)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(rank))
    wrong, real = rank == 1, layer._route

    def route(*args: Any) -> Any:
        x_TH, routing, aux = real(*args)
        if kind == "exception" and wrong:
            raise ValueError("planted")
        if kind == "ids" and wrong:
            routing = dataclasses.replace(routing, expert_ids=routing.expert_ids + 99)
        return x_TH, routing, aux

    def run() -> None:
        given = {"nan": x * float("nan"), "width": x[:, :3], "dtype": x.double()}.get(kind, x) if wrong else x
        with mock.patch.object(layer, "_route", route), torch.set_grad_enabled(kind != "no grad" or not wrong):
            layer(given, micro_batch=int(kind == "place" and wrong))

    said = said_by(run)
    y, _ = layer(x)
    y.sum().backward()
    return said, float(y.sum())


FAULTS = {
    "nan": ("NonFiniteError: layer 0, micro-batch 0: non-finite router logits in 5 tokens", "rank 1 reported a fault"),
    "ids": ("InputError: layer 0, micro-batch 0: 10 expert ids lie outside [-1, 8)", "rank 1 reported a fault"),
    "width": ("InputError: layer 0, micro-batch 0: x must be [..., 16]", "rank 1 reported a fault"),
    "dtype": ("InputError: layer 0, micro-batch 0: x", "rank 1 reported a fault"),
    "exception": ("a bare ValueError: planted", "rank 1 reported a fault"),
    "no grad": ("PeerError: layer 0, micro-batch 0: rank 1 of 2 runs under no_grad",) * 2,
    "place": ("PeerError: the ranks are not at the same micro-batch",) * 2,
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_on_one_rank_is_raised_by_every_rank_and_the_next_step_works(pool: RankPool, kind: str) -> None:
    (other, _), (own, _) = pool.run(fault, kind, num_ranks=2)
    assert own.startswith(FAULTS[kind][0])
    assert other.startswith("PeerError: ") and FAULTS[kind][1] in f"PeerError: {other}"


def disagreement(group: dist.ProcessGroup, rank: int, kind: str) -> str:
    close_dispatchers(group)
    training = Training(group, ON)
    xs = training.inputs(0, 0)
    real_plan, real_load = planning.plan, exchange.expert_load
    planted: Any = {
        "plan": mock.patch.object(planning, "plan", lambda load, *args, **how: real_plan(load.flip(1), *args, **how)),
        "overflow": mock.patch.object(exchange, "expert_load", lambda *args: real_load(*args) + (1 << 31)),
    }[kind]
    if rank != 1:
        return said_by(lambda: training.stack(xs))
    with planted:
        return said_by(lambda: training.stack(xs))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("plan", "PlanError: layer 0, micro-batch 0: the replica plans of ranks [1] differ from rank 0's; all ranks"),
        ("overflow", "PlanError: the loads add up to"),
    ],
)
def test_plans_that_differ_and_loads_that_overflow_raise_on_every_rank(pool: RankPool, kind: str, text: str) -> None:
    for said in pool.run(disagreement, kind, num_ranks=2):
        assert said.startswith(text)


def other_slots(group: dist.ProcessGroup, rank: int) -> str:
    return said_by(lambda: layer_of(group, replica=dict(slots=2 + rank % 2)))


def test_ranks_with_other_settings_all_hear_of_it(pool: RankPool) -> None:
    for said in pool.run(other_slots):
        assert said.startswith("PeerError: the ranks disagree about MoE layer 0: replica is {'slots': 2")


class OneSet(GroupedExperts):
    """Experts of somebody else, who knows nothing of replicas."""


def refusals(group: dist.ProcessGroup, rank: int) -> list[str]:
    if "one set" not in known_experts():
        register_experts("one set")(OneSet)
    assert find_experts("one set") is OneSet
    said = [
        said_by(lambda: layer_of(group, replica=dict(slots=1, planner="fixed_rows"))),
        said_by(lambda: layer_of(group, replica=dict(slots=5))),
        said_by(lambda: layer_of(group, experts="one set")),
    ]
    with mock.patch.object(All2All, "host_syncs", 0):
        said.append(said_by(lambda: layer_of(group)))
        said.append(said_by(lambda: layer_of(group, experts="loop")))
    return said


def test_what_cannot_compute_replicas_is_refused(pool: RankPool) -> None:
    for few, many, foreign, no_counts, loop in pool.run(refusals, num_ranks=2):
        assert few.startswith("RecipeError: fixed_rows needs a slot for each of the L = 4 experts of a rank")
        assert many.startswith("RecipeError: replica.slots = 5 are more than the 4 experts that the other ranks hold")
        assert "OneSet defines no compute_sets" in foreign and "or set slots = 0" in foreign
        assert "this dispatcher reads no counts there" in no_counts and "take experts = 'quack'" in no_counts
        assert loop == "nothing"


@pytest.mark.parametrize("dispatcher", ["all2all", "local"])
def test_one_rank_has_nobody_to_copy_to(dispatcher: str) -> None:
    with pytest.raises(RecipeError, match=r"replica\.slots = 2 would have no effect on one rank"):
        layer_of(None, dispatcher=dispatcher)
    with pytest.raises(RecipeError, match="min_quota would have no effect with slots = 0"):
        MoEConfig(**MOE, replica=dict(min_quota=4))


# leases


def misuse(group: dist.ProcessGroup, rank: int) -> list[str]:
    layer = layer_of(group)
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(rank))
    said = []
    first = layer.launch_dispatch(x)
    said.append(said_by(lambda: layer.launch_dispatch(x)))  # the first one's experts have not run
    said.append(said_by(layer.replicas.check_returned))  # type: ignore[union-attr]
    layer.launch_combine(first)
    layer.resolve(first).sum().backward()
    layer.replicas.check_returned()  # type: ignore[union-attr]
    lease = layer.open_replicas(0, 1)
    routed = layer.run_router(x, None, micro_batch=0, lease=lease)
    layer.place([routed])
    again = layer.run_router(x, None, micro_batch=0, lease=lease)
    said.append(said_by(lambda: layer.place([again])))
    assert lease is not None
    lease.take((layer.experts.w_gate_up, layer.experts.w_down))
    said.append(said_by(lambda: lease.take((layer.experts.w_gate_up, layer.experts.w_down))))
    lease.release()
    for routings in ([], [again.routing] * 2):
        fresh = layer.replicas.open(None, 0)  # type: ignore[union-attr]
        said.append(said_by(lambda: layer.replicas.route(fresh, routings)))  # type: ignore[union-attr]  # noqa: B023
    late = Lease(None, 0, 0, 1, 1)
    said.append(said_by(lambda: late.take((layer.experts.w_gate_up, layer.experts.w_down))))
    flights = [layer.launch_dispatch(x, micro_batch=i) for i in range(3)]  # as many slots as the index says
    assert len(layer.replicas.lanes) == 3  # type: ignore[union-attr]
    flights.clear()
    layer.replicas.check_returned()  # type: ignore[union-attr]
    return said


def test_a_lease_kept_used_twice_or_taken_early_is_named(pool: RankPool) -> None:
    for overrun, leak, reuse, twice, none, two, early in pool.run(misuse, num_ranks=2):
        assert overrun.startswith("ProtocolError: layer 0, micro-batch 0: no replica slots are free: layer 0, micro-ba")
        assert "holds them in forward until its experts have run" in overrun
        assert leak.startswith("ProtocolError: replica slots were not given back at the end of a step: layer 0")
        assert reuse.startswith("ProtocolError: layer 0, micro-batch 0: this lease has a plan already")
        assert twice.startswith("ProtocolError: layer 0, micro-batch 0: take comes once for each micro-batch")
        for number, said in ((0, none), (2, two)):
            assert f"{number} routings for a lease that 1 micro-batch(es) share; give one of each" in said
        assert early.startswith("ProtocolError: layer 0, micro-batch 0: its experts run before it was routed")

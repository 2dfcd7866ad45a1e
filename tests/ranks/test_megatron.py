"""Megatron-Core's GPT on our dispatchers against the same on its own: losses, gradients, checkpoints, misuse."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from moe_ep import InputError, MoEError, PeerError, ProtocolError, RecipeError
from moe_ep.testing.ranks import RankPool
from tests.ranks import megatron_cpu as cpu

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (moe-ep[megatron])")

STAGES = (
    "dispatch_preprocess", "dispatch", "dispatch_postprocess", "combine_preprocess", "combine", "combine_postprocess",
)  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120) as ranks:
        yield ranks


def norms(model: Any) -> dict[str, float]:
    return {name: p.grad.double().norm().item() for name, p in model.named_parameters()}


def trained(rank: int, ours: str | None, steps: int, **changes: Any) -> tuple[list[Any], collections.Counter[str]]:
    """Loss and gradient norms of each step, and how often each stage of either kind ran."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from moe_ep.integrations.megatron import moe_layers

    model, calls, history = cpu.build(ours, **changes), collections.Counter[str](), []

    def counting(owner: Any, name: str, label: str) -> Any:
        fn = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[label] += 1
            return fn(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    patches = [counting(MoEAlltoAllTokenDispatcher, "token_dispatch", "native")]
    if ours is not None:
        (inner,) = {layer.dispatcher for layer in moe_layers(model)}
        assert inner.name == ours
        patches += [counting(inner, name, name) for name in STAGES]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(steps):
            optimizer.zero_grad(set_to_none=True)
            loss = cpu.losses(model, rank, step).mean()
            loss.backward()
            history.append((loss.item(), norms(model)))
            optimizer.step()
    return history, calls


def both(group: Any, rank: int, ours: str, steps: int, changes: dict[str, Any]) -> Any:
    with cpu.on_cpu(), cpu.parallel(2):
        return trained(rank, None, steps, **changes), trained(rank, ours, steps, **changes)


@pytest.mark.parametrize("steps", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_a_gpt_trains_as_on_megatrons_own_dispatcher(pool: RankPool, steps: int) -> None:
    for (native, native_calls), (ours, calls) in pool.run(both, "all2all", steps, {}, timeout_s=200):
        assert native_calls == {"native": 2 * steps}
        assert calls == {name: 2 * steps for name in STAGES}, "two layers, each stage once a step, Megatron's never"
        assert native[0][0] != native[-1][0]
        assert len(native[0][1]) == 5 * 2 + 2 * 2 * 4 + 3, "every parameter has a gradient"
        assert ours == native, "float32 on a CPU: the same sums in the same order, bit for bit"


VARIANTS = {
    "shared experts, gated": dict(moe_shared_expert_intermediate_size=24),
    "sigmoid router with bias and groups": dict(
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_num_groups=4,
        moe_router_group_topk=2, moe_router_topk_scaling_factor=2.5,
    ),
    "balancing loss and z-loss": dict(
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01, moe_z_loss_coeff=0.001
    ),
    "one dense layer": dict(moe_layer_freq=[0, 1]),
    "biases": dict(add_bias_linear=True),
    "top-1, weights on the input": dict(
        moe_router_topk=1, moe_router_pre_softmax=True, moe_apply_probs_on_input=True
    ),
    "every expert": dict(moe_router_topk=8),
    "the MoE layer recomputed": dict(recompute_granularity="selective", recompute_modules=["moe"]),
    "all recomputed": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
}  # fmt: skip


@pytest.mark.parametrize("ours", ["all2all", "agrs"])
def test_variants_of_the_layer(pool: RankPool, ours: str) -> None:
    for results in pool.run(all_variants, ours, timeout_s=200):
        assert set(results) == set(VARIANTS)
        for name, (native, got) in results.items():
            (loss, grads), (our_loss, our_grads) = native[0], got[0]
            assert our_loss == pytest.approx(loss, rel=1e-6), name
            assert our_grads.keys() == grads.keys(), name
            for parameter, norm in grads.items():
                assert our_grads[parameter] == pytest.approx(norm, rel=1e-5, abs=1e-9), (name, parameter)


def all_variants(group: Any, rank: int, ours: str) -> Any:
    with cpu.on_cpu(), cpu.parallel(2):
        return {
            name: (trained(rank, None, 1, **changes)[0], trained(rank, ours, 1, **changes)[0])
            for name, changes in VARIANTS.items()
        }


def test_multi_token_prediction(pool: RankPool) -> None:
    for native, ours, indices in pool.run(with_prediction):
        assert ours == native
        assert indices == [0, 1, 2]
        assert any(".mtp." in f".{name}" and ".experts." in name and norm > 0 for name, norm in native[1].items())


def with_prediction(group: Any, rank: int) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from moe_ep.integrations.megatron import moe_layers, use_moe_ep

    found = []
    with cpu.on_cpu(), cpu.parallel(2):
        for ours in (False, True):
            config = cpu.small_config(mtp_num_layers=1)
            spec = cpu.layer_spec(config)
            spec = use_moe_ep(spec, dispatcher="all2all") if ours else spec
            mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
            model = cpu.small_gpt(config, spec, mtp_block_spec=mtp)
            loss = cpu.losses(model, rank, 0).mean()
            loss.backward()
            found.append((loss.item(), norms(model)))
    return *found, [layer.token_dispatcher.layer_index for layer in moe_layers(model)]


def test_bfloat16_experts_see_the_routers_own_dtype(pool: RankPool) -> None:
    """Rows are added up in float32 here and in bfloat16 there: the outputs differ by that rounding alone."""
    for native, ours in pool.run(layer_in_bfloat16):
        scale = native.abs().max()
        # K = 2 addends, one rounding of their sum here and one there: 2 x 2^-8 of the largest
        assert (native - ours).abs().max() <= 2 * 2**-8 * scale
        assert scale > 0


def layer_in_bfloat16(group: Any, rank: int) -> Any:
    changes = dict(bf16=True, params_dtype=torch.bfloat16, moe_router_dtype=None)
    with cpu.on_cpu(), cpu.parallel(2):
        x = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(rank)).bfloat16()
        layers = [cpu.build(ours, **changes).bfloat16().decoder.layers[0].mlp for ours in (None, "all2all")]
        return [layer(x)[0].detach().float() for layer in layers]


def test_tensor_parallel_attention_with_whole_experts(pool: RankPool) -> None:
    """TP = 2 with sequence parallelism, EP = 2 over the same ranks, experts not split: the layer alone."""
    for native, ours in pool.run(layer_under_tensor_parallelism):
        assert len(ours) == 11
        for a, b in zip(native, ours, strict=True):
            assert torch.equal(a, b)


def layer_under_tensor_parallelism(group: Any, rank: int) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    from moe_ep.integrations.megatron import moe_spec

    found = []
    with cpu.on_cpu(), cpu.parallel(2, tensor_model_parallel_size=2, expert_tensor_parallel_size=1):
        config = cpu.small_config(tensor_model_parallel_size=2, sequence_parallel=True)
        native = cpu.layer_spec(config).layer_specs[0].submodules.mlp
        given = dict(config=config, layer_number=1, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
        for spec in (native, moe_spec(native, dispatcher="all2all")):
            torch.manual_seed(0)
            layer = build_module(spec, **given) if hasattr(spec, "module") else spec(**given)
            generator = torch.Generator().manual_seed(rank)
            with torch.no_grad():
                for name, parameter in layer.named_parameters():
                    if "experts" in name:
                        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            x = torch.randn(6, 2, 16, generator=generator).requires_grad_()
            y = layer(x)[0]
            y.square().sum().backward()
            found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    return found


def test_checkpoints_and_marks_of_parameters_are_megatrons(pool: RankPool) -> None:
    for native, ours in pool.run(described):
        assert native == ours
        keys, marks = ours
        assert "decoder.layers.mlp.experts.experts.linear_fc1.weight" in {key for key, *_ in keys}
        assert {mark for name, mark in marks if ".experts." in name} == {False}


def described(group: Any, rank: int) -> Any:
    found = []
    with cpu.on_cpu(), cpu.parallel(2):
        for ours in (None, "all2all"):
            model = cpu.build(ours)
            state = model.sharded_state_dict()
            keys = sorted((s.key, str(getattr(s, "global_shape", "")), str(s.replica_id)) for s in state.values())
            found.append((keys, [(n, getattr(p, "allreduce", True)) for n, p in model.named_parameters()]))
    return found


def test_micro_batches_under_way_do_not_mix(pool: RankPool) -> None:
    for one_by_one, interleaved in pool.run(two_at_once):
        for a, b in zip(one_by_one, interleaved, strict=True):
            assert torch.equal(a, b)


def two_at_once(group: Any, rank: int) -> Any:
    with cpu.on_cpu(), cpu.parallel(2):
        layer = cpu.build("all2all").decoder.layers[0].mlp
        d, xs = layer.token_dispatcher, []
        for i in range(2):
            x = torch.randn(5 + i, 1, 16, generator=torch.Generator().manual_seed(10 * rank + i))
            xs.append(x.requires_grad_())
        serial = [layer(x)[0] for x in xs]
        want = [*serial, *torch.autograd.grad(sum(y.square().sum() for y in serial), xs)]
        routed = [layer.route(x) for x in xs]
        sent = [d.dispatch_preprocess(x, chosen, p) for x, (p, chosen) in zip(xs, routed, strict=True)]
        sent = [d.token_dispatch(*pair) for pair in sent]
        back = []
        for pair in sent:
            y, _ = layer.experts(*d.dispatch_postprocess(*pair))
            back.append(d.combine_preprocess(y))
        back = [d.token_combine(y) for y in back]
        ys = [d.combine_postprocess(y) for y in back]
        got = [*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), xs)]
        return [t.detach() for t in want], [t.detach() for t in got]


@pytest.mark.parametrize("name", ["local", "all2all"])
def test_the_same_tensors_go_on_two_trips_at_a_time(pool: RankPool, name: str) -> None:
    for want, *got in pool.run(one_input_twice, name):
        assert len(got) == 2 and all(torch.equal(y, want) for y in got)


@torch.no_grad()
def one_input_twice(group: Any, rank: int, name: str) -> Any:
    """On one rank without gradients, where what a stage is given goes on as it is."""
    with cpu.on_cpu(), cpu.parallel(1):
        layer = cpu.build(name, expert_model_parallel_size=1).decoder.layers[0].mlp
        d, x = layer.token_dispatcher, torch.randn(5, 1, 16, generator=torch.Generator().manual_seed(rank))
        p, chosen = layer.route(x)
        sent = [d.token_dispatch(*pair) for pair in [d.dispatch_preprocess(x, chosen, p) for _ in range(2)]]
        back, y = [], None
        for pair in sent:
            rows = d.dispatch_postprocess(*pair)
            y = layer.experts(*rows)[0] if y is None else y
            back.append(d.combine_preprocess(y))
        back = [d.token_combine(y) for y in back]
        return [layer(x)[0], *map(d.combine_postprocess, back)]


def test_stages_refuse_what_they_did_not_hand_out(pool: RankPool) -> None:
    for messages in pool.run(misused):
        assert len(messages) == 4
        foreign, twice, two_in_experts, too_many = messages
        assert foreign[0] is ProtocolError and "hand on what a stage returns" in foreign[1]
        assert twice[0] is ProtocolError and "a second time" in twice[1]
        assert two_in_experts[0] is ProtocolError and "call combine_preprocess first" in two_in_experts[1]
        assert too_many[0] in (InputError, PeerError)


def misused(group: Any, rank: int) -> Any:
    said = []

    def attempt(fn: Any, *args: Any) -> None:
        try:
            fn(*args)
        except MoEError as err:
            said.append((type(err), str(err)))

    with cpu.on_cpu(), cpu.parallel(2):
        layer = cpu.build("all2all").decoder.layers[0].mlp
        d, x = layer.token_dispatcher, torch.randn(4, 1, 16)
        p, chosen = layer.route(x)
        rows, weights = d.dispatch_preprocess(x, chosen, p)
        attempt(d.token_dispatch, rows * 2, weights)
        sent = d.token_dispatch(rows, weights)
        attempt(d.token_dispatch, rows, weights)
        other = d.token_dispatch(*d.dispatch_preprocess(x, chosen, p))
        d.dispatch_postprocess(*sent)
        attempt(d.dispatch_postprocess, *other)
        d.abandon()
        rows, weights = d.dispatch_preprocess(x, torch.ones_like(chosen) if rank == 0 else chosen, p)
        attempt(d.token_dispatch, rows, weights)
    return said


def test_an_error_in_one_ranks_experts_ends_all(pool: RankPool) -> None:
    first, second = pool.run(one_fails)
    assert first[:2] == ("ZeroDivisionError", "planted")
    assert second[0] == "PeerError"
    assert "planted" in second[1] and "layer 0 (experts)" in second[1]
    assert first[2] and second[2], "the next step is as if nothing had happened"


def one_fails(group: Any, rank: int) -> Any:
    with cpu.on_cpu(), cpu.parallel(2):
        model = cpu.build("all2all")
        experts, before = model.decoder.layers[0].mlp.experts, cpu.losses(model, rank, 0)

        def fail(*_: Any) -> Any:
            raise ZeroDivisionError("planted")

        if rank == 0:
            experts.forward = fail
        try:
            cpu.losses(model, rank, 0)
        except Exception as err:
            experts.__dict__.pop("forward", None)
            return type(err).__name__, str(err), torch.equal(cpu.losses(model, rank, 0), before)
    return None


def test_unsupported_flags_are_refused_by_name(pool: RankPool) -> None:
    for said in pool.run(refused):
        assert [flag in text for flag, text in said.items()] == [True] * len(REFUSED), said


REFUSED: dict[str, dict[str, Any]] = {
    "moe_shared_expert_overlap": dict(moe_shared_expert_overlap=True, moe_shared_expert_intermediate_size=24),
    "moe_expert_capacity_factor": dict(moe_expert_capacity_factor=1.5),
    "moe_token_dispatcher_type": dict(moe_token_dispatcher_type="flex", tensor_model_parallel_size=1),
    "dispatcher 'diret'": dict(),
}


def refused(group: Any, rank: int) -> Any:
    said = {}
    with cpu.on_cpu(), cpu.parallel(2):
        for flag, changes in REFUSED.items():
            try:
                cpu.build("diret" if not changes else "all2all", **changes)
            except RecipeError as err:
                said[flag] = str(err)
    return said


@pytest.mark.parametrize("sharded", [False, True])
def test_megatrons_gradient_buffers(pool: RankPool, sharded: bool) -> None:
    """Its DistributedDataParallel: main_grad, dense and expert buffers, reduced or reduce-scattered."""
    for native, ours in pool.run(with_gradient_buffers, sharded):
        assert native == ours
        losses, sums = ours
        assert losses[0] != losses[-1]
        assert all(value > 0 for name, value in sums.items() if ".experts." in name)


def with_gradient_buffers(group: Any, rank: int, sharded: bool) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    found = []
    with cpu.on_cpu(), cpu.parallel(2):
        for ours in (None, "all2all"):
            model = cpu.build(ours)
            settings = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
            wrapped = DistributedDataParallel(model.config, settings, model)
            losses = []
            for step in range(3):
                wrapped.zero_grad_buffer()
                loss = cpu.losses(wrapped, rank, step).mean()
                loss.backward()
                finalize_model_grads([wrapped])
                losses.append(loss.item())
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.main_grad
            found.append((losses, {n: p.main_grad.double().norm().item() for n, p in model.named_parameters()}))
    return found

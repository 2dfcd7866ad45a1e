"""A Megatron block that takes its batch as interleaved pieces against the pieces one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from moe_ep import Capabilities, InputError, MoEError, RecipeError, register_dispatcher
from moe_ep.dispatch.all2all import All2All
from moe_ep.testing.ranks import RankPool
from tests.ranks import megatron_cpu as cpu

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (moe-ep[megatron])")

WHOLE: dict[str, Any] = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared experts": dict(moe_shared_expert_intermediate_size=24, moe_shared_expert_gate=False),
    "a dense layer first": dict(moe_layer_freq=[0, 1], moe_shared_expert_intermediate_size=24),
    "biases": dict(add_bias_linear=True, moe_layer_freq=[0, 1]),
    "losses summed over tokens": dict(
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01, calculate_per_token_loss=True
    ),
    "core attention recomputed": dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
    "MoE layers recomputed": dict(
        recompute_granularity="selective", recompute_modules=["moe", "core_attn"], moe_layer_freq=[0, 1]
    ),
    "all recomputed": dict(WHOLE, moe_layer_freq=[0, 1], moe_shared_expert_intermediate_size=24),
    "the first layer recomputed, groups, losses": dict(
        WHOLE, recompute_method="block", moe_router_num_groups=4, moe_router_group_topk=2,
        calculate_per_token_loss=True, moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.01,
        moe_z_loss_coeff=0.001,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120) as ranks:
        yield ranks


def run(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    tokens, positions, mask, labels = batch
    return model(tokens, positions, mask, labels=labels)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def one_by_one_and_together(group: Any, rank: int, pieces: int, changes: dict[str, Any], per_sequence: bool) -> Any:
    from moe_ep.integrations.megatron import DominoTransformerBlock, use_domino

    with cpu.on_cpu(), cpu.parallel(2):
        tokens, positions, mask, labels = cpu.batch(rank, 0, sequences=2 * pieces)
        if per_sequence:  # each sequence hides another token besides
            mask = mask.repeat(2 * pieces, 1, 1, 1)
            for i in range(2 * pieces):
                mask[i, :, i + 1 :, i] = True
        serial = cpu.build("all2all", **changes)
        losses, outputs = [], []
        serial.decoder.register_forward_hook(lambda _, __, out: outputs.insert(0, out.detach()))
        for i in reversed(range(pieces)):  # the order in which the pieces' gradients add up
            own = [t[2 * i : 2 * i + 2] for t in (tokens, positions, labels)]
            part = mask[2 * i : 2 * i + 2] if per_sequence else mask
            loss = run(serial, (own[0], own[1], part, own[2]))
            loss.sum().backward()
            losses.insert(0, loss.detach())
        want = torch.cat(outputs, dim=1)
        model = use_domino(cpu.build("all2all", **changes), pieces)
        assert type(model.decoder) is DominoTransformerBlock
        names = [name for name, _ in serial.named_parameters()]
        assert names == [name for name, _ in model.named_parameters()]
        assert set(serial.sharded_state_dict()) == set(model.sharded_state_dict())
        model.decoder.register_forward_hook(lambda _, __, out: outputs.insert(0, out.detach()))
        loss = run(model, (tokens, positions, mask, labels))
        loss.sum().backward()
        got = outputs[0]
        model.eval()
        with torch.no_grad():
            evaluated = run(model, (tokens, positions, mask, labels))
        return want, got, torch.cat(losses), loss.detach(), evaluated, gradients(serial), gradients(model)


@pytest.mark.parametrize(
    ("name", "pieces"), [("plain", 3), ("plain", 4), ("all recomputed", 4), *((name, 2) for name in VARIANTS)]
)
def test_values_are_those_of_the_pieces_one_by_one(pool: RankPool, name: str, pieces: int) -> None:
    for result in pool.run(one_by_one_and_together, pieces, VARIANTS[name], name == "plain"):
        want, got, serial, together, evaluated, grads, got_grads = result
        assert torch.equal(got, want), "the block's output, bit for bit"
        assert torch.allclose(together, serial, rtol=1e-6)  # one output layer over all tokens
        assert torch.allclose(evaluated, serial, rtol=1e-5)
        assert grads.keys() == got_grads.keys()
        for parameter, grad in grads.items():
            error = (got_grads[parameter] - grad).double().norm()
            assert error <= 2e-6 * grad.double().norm(), parameter


def test_a_second_pass_neither_counts_nor_logs_nor_chooses_again(pool: RankPool) -> None:
    for (grads, counters, logged, _), (again_grads, again_counters, again_logged, ids) in pool.run(computed_twice):
        assert all(torch.equal(again_grads[name], grad) for name, grad in grads.items())
        assert sum(map(torch.Tensor.sum, counters)) > 0 and len(logged) == 2 * 2 * 2
        assert all(map(torch.equal, again_counters, counters)) and again_logged == logged
        assert len(ids) == 2 * 2 * 2, "two layers, two pieces, two passes"
        first, second = ids[:4], [ids[6], ids[7], ids[4], ids[5]]  # backward reaches the last layer first
        assert all(map(torch.equal, first, second)), "though the router was given other logits"
        assert not torch.equal(first[0], first[1])


def computed_twice(group: Any, rank: int) -> Any:
    changes = dict(
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, calculate_per_token_loss=True,
        moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.01, moe_z_loss_coeff=0.001,
    )  # fmt: skip
    with cpu.on_cpu(), cpu.parallel(2):
        plain, whole = recorded(rank, changes, False), recorded(rank, {**changes, **WHOLE}, False)
        return plain, (*whole[:3], recorded(rank, {**changes, **WHOLE}, True)[3])


def test_a_second_pass_drops_what_the_first_one_dropped(pool: RankPool) -> None:
    for plain, dropped, again in pool.run(with_dropout):
        assert all(torch.equal(again[name], grad) for name, grad in dropped.items())
        assert not torch.equal(dropped["embedding.word_embeddings.weight"], plain["embedding.word_embeddings.weight"])


def with_dropout(group: Any, rank: int) -> Any:
    found = []
    with cpu.on_cpu(), cpu.parallel(2):
        for changes in ({}, dict(attention_dropout=0.5), dict(WHOLE, attention_dropout=0.5)):
            with cpu.one_tracker():
                found.append(recorded(rank, changes, False)[0])
    return found


def recorded(rank: int, changes: dict[str, Any], disturbed: bool) -> tuple[Any, ...]:
    """Gradients, the routers' counters, losses that they logged, and the ids of all dispatches in one step."""
    from moe_ep.integrations.megatron import moe_layers, use_domino
    from moe_ep.recompute import in_second_pass

    model, logged, ids = use_domino(cpu.build("all2all", **changes), 2), list[Any](), list[Tensor]()
    with contextlib.ExitStack() as stack:
        for router in [layer.router for layer in moe_layers(model)]:
            gating = router.gating

            def other(x: Tensor, gating: Any = gating) -> Tensor:
                logits: Tensor = gating(x)
                return logits.flip(-1) if disturbed and in_second_pass() else logits

            stack.enter_context(mock.patch.object(router, "gating", other))
        (inner,) = {layer.dispatcher for layer in moe_layers(model)}
        preprocess = inner.dispatch_preprocess

        def note(x: Tensor, routing: Any, **others: Any) -> Any:
            ids.append(routing.expert_ids)
            return preprocess(x, routing, **others)

        stack.enter_context(mock.patch.object(inner, "dispatch_preprocess", note))
        stack.enter_context(cpu.logging_to(logged))
        run(model, cpu.batch(rank, 0)).sum().backward()
    counters = [b.clone() for layer in moe_layers(model) for _, b in sorted(layer.router.named_buffers())]
    return gradients(model), counters, logged, ids


def test_communication_of_one_piece_is_launched_beside_another(pool: RankPool) -> None:
    """The stages of two layers and two pieces, in the order of the schedule, forward; and all of them in backward."""
    expected = []
    for layer in range(2):
        for piece in range(2):
            if layer:
                expected.append(("combine_postprocess", layer - 1, piece))
            expected += [("dispatch_preprocess", layer, piece), ("dispatch", layer, piece)]
        for piece in range(2):
            expected += [(n, layer, piece) for n in ("dispatch_postprocess", "combine_preprocess", "combine")]
    expected += [("combine_postprocess", 1, piece) for piece in range(2)]
    for order in pool.run(stages):
        assert order == expected


def stages(group: Any, rank: int) -> Any:
    from moe_ep.dispatch.base import Dispatcher
    from moe_ep.integrations.megatron import use_domino

    order: list[Any] = []
    with cpu.on_cpu(), cpu.parallel(2):
        model = use_domino(cpu.build("all2all"), 2)
        enter = Dispatcher._enter

        def note(self: Any, ticket: Any, stage: Any) -> None:
            order.append((stage.label, ticket.layer, ticket.micro_batch))
            enter(self, ticket, stage)

        Dispatcher._enter = note  # type: ignore[method-assign]
        try:
            run(model, cpu.batch(rank, 0)).sum().backward()
        finally:
            Dispatcher._enter = enter  # type: ignore[method-assign]
    return order


@register_dispatcher("single_file_all2all")
class SingleFile(All2All):
    """Holds one micro-batch at a time."""

    name: ClassVar[str] = "single_file_all2all"
    capabilities: ClassVar[Capabilities] = replace(All2All.capabilities, max_tickets=1)


REFUSED: dict[str, dict[str, Any]] = {
    "hidden_dropout": dict(hidden_dropout=0.1),
    "recompute_num_layers": dict(WHOLE, recompute_num_layers=2),
    "recompute_modules": dict(recompute_granularity="selective", recompute_modules=["layernorm"]),
    "moe_router_load_balancing_type": dict(WHOLE, moe_router_load_balancing_type="sinkhorn"),
    "moe_aux_loss_coeff": dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01),
}  # fmt: skip


def test_what_cannot_be_interleaved_is_refused(pool: RankPool) -> None:
    for said in pool.run(refused):
        assert len(said) == len(REFUSED) + 4
        for flag, (kind, text) in zip(REFUSED, said, strict=False):
            assert kind is RecipeError and text.startswith(f"{flag} = "), text
        native, single, odd, packed = said[len(REFUSED) :]
        assert native[0] is RecipeError and "use_moe_ep" in native[1]
        assert single[0] is RecipeError and "it holds 1 micro-batch(es) in flight, and 2 are to be inter" in single[1]
        assert odd[0] is InputError and "3 sequences" in odd[1]
        assert packed[0] is InputError and "packed_seq_params" in packed[1]


def refused(group: Any, rank: int) -> Any:
    from moe_ep.integrations.megatron import use_domino

    said = []

    def attempt(fn: Any) -> None:
        try:
            fn()
        except MoEError as err:
            said.append((type(err), str(err)))

    with cpu.on_cpu(), cpu.parallel(2):
        for changes in REFUSED.values():
            attempt(lambda changes=changes: use_domino(cpu.build("all2all", **changes), 2))
        attempt(lambda: use_domino(cpu.build(None), 2))
        attempt(lambda: use_domino(cpu.build("single_file_all2all"), 2))
        model = use_domino(cpu.build("all2all"), 2)
        attempt(lambda: run(model, cpu.batch(rank, 0, sequences=3)))
        mask = cpu.batch(rank, 0)[2]
        attempt(lambda: model.decoder(torch.ones(12, 2, 16), mask, packed_seq_params=object()))
    return said

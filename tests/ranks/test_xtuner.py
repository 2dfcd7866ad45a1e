"""XTuner's call sequence, of one micro-batch and of several in one layer, on our dispatchers against dense experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import InputError, MoEError, ProtocolError, RecipeError, close_dispatchers
from moe_ep.integrations.xtuner import XTunerDispatcher, build_dispatcher
from moe_ep.testing.ranks import RankPool

H, E, K, WORLD = 8, 4, 2, 2


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD, timeout_s=60) as ranks:
        yield ranks


def micro_batch(rank: int, i: int) -> tuple[Tensor, Tensor, Tensor]:
    """hidden_states [T, H], topk_ids [T, K], topk_weights [T, K]; T as XTuner has it, equal in all micro-batches."""
    generator = torch.Generator().manual_seed(10 * rank + i)
    x = torch.randn(6, H, generator=generator)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(6)])
    return x.requires_grad_(), ids, torch.rand(6, K, generator=generator).requires_grad_()


def weight(expert: int) -> Tensor:
    return torch.randn(H, H, generator=torch.Generator().manual_seed(100 + expert)).requires_grad_()


def dense(x: Tensor, ids: Tensor, w: Tensor, weights: list[Tensor]) -> Tensor:
    rows = [sum(w[t, k] * (x[t] @ weights[int(ids[t, k])]) for k in range(K)) for t in range(x.shape[0])]
    return torch.stack(rows)


def experts(rows: Tensor, counts: Tensor, weights: list[Tensor], decoding: bool = False) -> Tensor:
    parts = rows.split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def layer(d: XTunerDispatcher, batches: list[Any], local: list[Tensor], early: bool) -> list[Tensor]:
    """The order of the micro-batch forward of XTuner's MoE decoder layer; `early`: weights come with preprocess."""
    pre, sent, post, back, combined = [], [], [], [], []
    inputs, states = d.prepare_layer_inputs([x for x, *_ in batches])
    for x, state, (_, ids, w) in zip(inputs, states, batches, strict=True):
        x = d.prepare_microbatch_input(x, state)
        extra = {"topk_weights": w, "layer_state": state} if early else {}
        pre.append(d.dispatch_preprocess(hidden_states=x.view(-1, H), topk_ids=ids, async_op=True, **extra))
    for i, (_, _, w) in enumerate(batches):
        sent.append(d.dispatch(pre_dispatched=pre[i], topk_weights=w, async_op=True))
        post.append(d.dispatch_postprocess(pre_dispatched=pre[i], dispatched=sent[i], async_op=True))
        out = experts(post[i]["hidden_states"], post[i]["tokens_per_expert"], local, decoding=False)
        before = dict(pre_dispatched=pre[i], dispatched=sent[i], post_dispatched=post[i])
        back.append(d.combine_preprocess(hidden_states=out, async_op=True, **before))
    for i in range(len(batches)):
        before = dict(pre_dispatched=pre[i], dispatched=sent[i], post_dispatched=post[i], pre_combined=back[i])
        combined.append(d.combine(async_op=True, **before))
    ys = []
    for i in range(len(batches)):
        before = dict(pre_dispatched=pre[i], dispatched=sent[i], post_dispatched=post[i], pre_combined=back[i])
        ys.append(d.combine_postprocess(combined=combined[i], async_op=True, **before)["hidden_states"])
    return ys


def plain(d: XTunerDispatcher, batches: list[Any], local: list[Tensor], early: bool) -> list[Tensor]:
    """The order of the plain forward; what a stage returns is read at once, as without `async_op` it may be."""
    ys = []
    for x, ids, w in batches:
        extra = {"topk_weights": w} if early else {}
        before: dict[str, Any] = {}
        before["pre_dispatched"] = d.dispatch_preprocess(hidden_states=x, topk_ids=ids, **extra)
        before["dispatched"] = d.dispatch(topk_weights=w, decoding=False, **before)
        assert before["dispatched"]["hidden_states"].isfinite().all()
        before["post_dispatched"] = d.dispatch_postprocess(**before)
        after = before["post_dispatched"]
        assert after["tokens_per_expert"].sum() == after["hidden_states"].shape[0]
        on_host = after["tokens_per_expert_cpu"]
        assert on_host.device.type == "cpu" and torch.equal(on_host, after["tokens_per_expert"])
        out = experts(after["hidden_states"], after["tokens_per_expert"], local)
        before["pre_combined"] = d.combine_preprocess(hidden_states=out, decoding=False, **before)
        before["combined"] = d.combine(decoding=False, **before)
        assert before["combined"]["hidden_states"].isfinite().all()
        ys.append(d.combine_postprocess(**before)["hidden_states"])
    return ys


def run(group: Any, rank: int, name: str, together: bool, early: bool, num: int) -> Any:
    d = build_dispatcher(name, n_routed_experts=E, ep_group=group, training_dtype="bf16", max_tokens=8)
    batches = [micro_batch(rank, i) for i in range(num)]
    local = [weight(e) for e in range(rank * E // WORLD, (rank + 1) * E // WORLD)]
    ys = (layer if together else plain)(d, batches, local, early)
    sum(y.square().sum() for y in ys).backward()
    assert d.inner.name == name
    close_dispatchers(group)
    grads = [[x.grad, w.grad] for x, _, w in batches]
    return [y.detach() for y in ys], grads, [t.grad for t in local]


@pytest.mark.parametrize("early", [True, False], ids=["weights with preprocess", "weights with dispatch"])
@pytest.mark.parametrize(("together", "num"), [(False, 1), (True, 1), (True, 2), (True, 3)])
@pytest.mark.parametrize("name", ["all2all", "agrs"])
def test_layer_equals_dense_experts(pool: RankPool, name: str, together: bool, num: int, early: bool) -> None:
    got = pool.run(run, name, together, early, num)
    weights = [weight(e) for e in range(E)]
    want = [[micro_batch(rank, i) for i in range(num)] for rank in range(WORLD)]
    outputs = [[dense(*batch, weights) for batch in batches] for batches in want]
    sum(y.square().sum() for ys in outputs for y in ys).backward()
    for rank, (ys, grads, local) in enumerate(got):
        for i in range(num):
            x, _, w = want[rank][i]
            torch.testing.assert_close(ys[i], outputs[rank][i].detach())
            torch.testing.assert_close(grads[i], [x.grad, w.grad])
        torch.testing.assert_close(local, [t.grad for t in weights[rank * 2 : rank * 2 + 2]])


def test_one_rank_needs_no_group() -> None:
    with pytest.warns(UserWarning, match="'all2all' is not used"):
        d = build_dispatcher("all2all", n_routed_experts=E)
    batches, weights = [micro_batch(0, i) for i in range(2)], [weight(e) for e in range(E)]
    for y, batch in zip(layer(d, batches, weights, True), batches, strict=True):
        torch.testing.assert_close(y, dense(*batch, weights))


def test_misuse_is_named() -> None:
    d = build_dispatcher(None, n_routed_experts=E, hidden_size=H, top_k=K, dtype="float32")
    (x, ids, w), (x2, ids2, w2) = micro_batch(0, 0), micro_batch(0, 1)
    a = d.dispatch_preprocess(hidden_states=x, topk_ids=ids, topk_weights=w, async_op=True)
    b = d.dispatch_preprocess(hidden_states=x2, topk_ids=ids2, topk_weights=w2, async_op=True)
    with pytest.raises(ProtocolError, match="async_op = False, but dispatch_preprocess had True"):
        d.dispatch(pre_dispatched=a, topk_weights=w)
    with pytest.raises(ProtocolError, match="other topk_weights"):
        d.dispatch(pre_dispatched=a, topk_weights=w2, async_op=True)
    with pytest.raises(InputError, match="decoding = True"):
        d.dispatch(pre_dispatched=a, topk_weights=w, async_op=True, decoding=True)
    early = d.dispatch_preprocess(hidden_states=x2, topk_ids=ids2, async_op=True)
    nothing = {"trip": early["trip"]}
    with pytest.raises(ProtocolError, match="a stage was called before dispatch"):
        d.dispatch_postprocess(pre_dispatched=early, dispatched=nothing, async_op=True)
    sent = d.dispatch(pre_dispatched=a, topk_weights=w, async_op=True)
    with pytest.raises(ProtocolError, match="combine_preprocess was called before dispatch_postprocess"):
        d.combine_preprocess(hidden_states=x, pre_dispatched=a, dispatched=sent, post_dispatched=sent, async_op=True)
    with pytest.raises(ProtocolError, match="different micro-batches"):
        d.dispatch_postprocess(pre_dispatched=b, dispatched=sent, async_op=True)
    with pytest.raises(MoEError, match="dispatch was called"):
        d.dispatch(pre_dispatched=a, topk_weights=w, async_op=True)


@pytest.mark.parametrize("setting", [dict(training_dtype="fp8"), dict(generate_dtype="fp8")])
def test_fp8_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=f"{next(iter(setting))} = 'fp8' is not served"):
        build_dispatcher(None, n_routed_experts=E, **setting)


def test_a_misspelt_name_is_refused_where_one_rank_would_not_use_it() -> None:
    with pytest.raises(
        RecipeError, match=r"dispatcher = 'al2all' is unknown; did you mean 'all2all'\? known: .*\bagrs\b"
    ):
        build_dispatcher("al2all", n_routed_experts=E)


def test_bfloat16_rows_are_weighed_in_float32_and_rounded_once() -> None:
    d = build_dispatcher(None, n_routed_experts=E)
    generator = torch.Generator().manual_seed(5)
    x, w = torch.randn(64, H, generator=generator).bfloat16(), torch.rand(64, 1, generator=generator)
    ids = torch.randint(0, E, (64, 1), generator=generator)
    pre = d.dispatch_preprocess(hidden_states=x, topk_ids=ids, topk_weights=w)
    before: dict[str, Any] = dict(pre_dispatched=pre, dispatched=d.dispatch(pre_dispatched=pre, topk_weights=w))
    before["post_dispatched"] = d.dispatch_postprocess(**before)
    rows = before["post_dispatched"]["hidden_states"]
    before["pre_combined"] = d.combine_preprocess(hidden_states=rows, **before)
    before["combined"] = d.combine(**before)
    y = d.combine_postprocess(**before)["hidden_states"]
    assert torch.equal(y, (x.float() * w).bfloat16()) and not torch.equal(y, x * w.bfloat16())


@pytest.mark.parametrize("name", ["tp_group", "ep_tp_group"])
def test_split_experts_are_refused(pool: RankPool, name: str) -> None:
    for text in pool.run(refuse_split, name):
        assert text.startswith(f"{name} of 2 ranks is not served")


def refuse_split(group: Any, rank: int, name: str) -> str:
    groups = {name: group}
    try:
        build_dispatcher(None, n_routed_experts=E, **groups)
    except RecipeError as err:
        return str(err)
    return ""


def test_the_dispatcher_is_not_there_before_it_can_be() -> None:
    with pytest.raises(ProtocolError, match="no micro-batch has come yet"):
        _ = build_dispatcher(None, n_routed_experts=E).inner

"""The decoder: its configuration, its arithmetic, its initial values, its pieces, and text from it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moe_ep.errors import RecipeError
from moe_ep.schema import from_mapping
from recipes.attention import Attention, Rotary
from recipes.data import IGNORE, VOCAB_SIZE
from recipes.generate import generate
from recipes.model import Decoder, loss_sum, named_normal
from recipes.model_config import ModelConfig

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_layers": 3,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "top_k": 2,
    "expert_intermediate_size": 16,
    "intermediate_size": 48,
    "first_dense_layers": 1,
    "rope_theta": 1e4,
}


def decoder(seed: int = 0, moe: dict[str, Any] | None = None, **changes: Any) -> Decoder:
    config = ModelConfig(**{**SIZES, **changes})
    model = Decoder(config, config.moe(dispatcher="local", experts="loop", **(moe or {})))
    model.reset_parameters(seed)
    return model


def some_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads = 3 must divide num_attention_heads = 4"),
        ({"head_dim": 7}, "head_dim = 7 must be even"),
        ({"first_dense_layers": 4}, "first_dense_layers = 4 must lie between 0 and num_layers = 3"),
        ({"first_dense_layers": 0}, "intermediate_size = 48 is of the dense layers only, and first_dense_layers = 0"),
        ({"first_dense_layers": 0, "intermediate_size": -1}, "intermediate_size = -1 is of the dense layers only"),
        ({"intermediate_size": 0}, "first_dense_layers = 1 needs intermediate_size >= 1"),
        ({"top_k": 9}, "top_k = 9 is larger than num_experts = 8"),
        ({"dtype": "float8"}, "dtype 'float8' is not one of"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be at least 1e-12 and at most 1, got 0.0"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"hiden_size": 32}, "did you mean 'hidden_size'"),
        ({"num_layers": 2.5}, "must be int, got float"),
    ],
)
def test_bad_model_sections_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        from_mapping(ModelConfig, {**SIZES, **changes}, "r.toml [model]")


def test_model_and_experts_must_agree() -> None:
    config = ModelConfig(**SIZES)
    with pytest.raises(RecipeError, match="num_experts is 8 in the model and 4 in its MoE layers"):
        Decoder(config, dataclasses.replace(config.moe(dispatcher="local"), num_experts=4))


def test_rotary_keeps_length_and_turns_by_the_distance_only() -> None:
    rotary = Rotary(8, 1e4)
    x = torch.randn(8, generator=torch.Generator().manual_seed(0)).expand(20, 8)
    y = rotary(x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(y[0], x[0])
    products = y @ y.T
    for distance in (1, 5):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert (products.diagonal(1)[0] - products.diagonal(5)[0]).abs() > 1e-2


def test_rotary_tables_of_inference_serve_training() -> None:
    rotary = Rotary(8, 1e4)
    x = torch.ones(4, 8, requires_grad=True)
    with torch.inference_mode():
        rotary(x)
    rotary(x).square().sum().backward()
    assert x.grad is not None


def test_attention_equals_a_loop_over_heads_and_tokens() -> None:
    torch.manual_seed(0)
    rotary = Rotary(6, 1e4)
    attention = Attention(16, 4, 2, 6, 1e-6, rotary, torch.float64)
    with torch.no_grad():
        attention.q_norm.weight.uniform_(0.5, 2)
        attention.k_norm.weight.uniform_(0.5, 2)
    x = torch.randn(2, 5, 16, dtype=torch.float64)

    def normed(v: torch.Tensor, norm: torch.nn.RMSNorm) -> torch.Tensor:
        return v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight

    expected = torch.zeros(2, 5, 24, dtype=torch.float64)
    for b in range(2):
        for head in range(4):
            of, kv = slice(head * 6, head * 6 + 6), slice(head // 2 * 6, head // 2 * 6 + 6)
            q = rotary(normed(attention.q_proj(x[b])[:, of], attention.q_norm))
            k = rotary(normed(attention.k_proj(x[b])[:, kv], attention.k_norm))
            v = attention.v_proj(x[b])[:, kv]
            for t in range(5):
                share = (q[t] @ k[: t + 1].T / 6**0.5).softmax(-1)
                expected[b, t, of] = share @ v[: t + 1]
    torch.testing.assert_close(attention(x), attention.o_proj(expected))


@pytest.mark.parametrize("dense", [0, 1, 3])
def test_shapes_dtypes_and_one_aux_for_each_layer_with_experts(dense: int) -> None:
    logits, auxes = decoder(first_dense_layers=dense, intermediate_size=48 if dense else 0)(some_ids(2, 7))
    assert logits.shape == (2, 7, VOCAB_SIZE) and logits.dtype == torch.float32
    assert len(auxes) == 3 - dense
    for aux in auxes:
        assert aux.load.sum() == 2 * 7 * 2 and aux.num_tokens == 14


def test_no_token_sees_a_later_one() -> None:
    model = decoder()
    ids = some_ids(1, 12)
    changed = ids.clone()
    changed[0, 8] = (changed[0, 8] + 1) % VOCAB_SIZE
    before, after = model(ids)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert (before[:, 8:] - after[:, 8:]).abs().amax(-1).min() > 1e-4


def test_padding_is_routed_nowhere() -> None:
    valid = torch.tensor([[True] * 5 + [False] * 2, [False] * 7])
    model = decoder()
    logits, auxes = model(some_ids(2, 7), valid)
    assert [int(a.load.sum()) for a in auxes] == [10, 10] and [int(a.num_tokens) for a in auxes] == [5, 5]
    torch.testing.assert_close(logits[:1, :5], model(some_ids(2, 7)[:1, :5])[0])


def test_every_parameter_gets_a_gradient() -> None:
    # two choices of many, so that every expert is met
    model = decoder(num_experts=4, moe={"aux_loss_coef": 0.01})
    logits, auxes = model(some_ids(4, 32))
    (loss_sum(logits, some_ids(4, 32, seed=1)) + sum(a.loss for a in auxes)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_tied_embeddings_share_one_table() -> None:
    tied, untied = decoder(tie_embeddings=True), decoder()
    assert {n for n, _ in untied.named_parameters()} - {n for n, _ in tied.named_parameters()} == {"lm_head.weight"}
    untied.lm_head.weight.data.copy_(untied.embed.weight.data)
    assert torch.equal(tied(some_ids(1, 6))[0], untied(some_ids(1, 6))[0])


def test_pieces_give_what_forward_gives() -> None:
    model = decoder(num_shared_experts=1, shared_intermediate_size=24)
    x = model.embed(some_ids(2, 6))
    for layer in model.layers:
        h, n = layer.attention(x)
        y = h + layer.shared(n)
        if layer.moe is not None:
            flight = layer.moe.launch_dispatch(n)
            layer.moe.launch_combine(flight)
            y = y + layer.moe.resolve(flight)
        x, expected = y, layer(x)[0]
        assert torch.equal(x, expected)
    without = decoder()
    assert without.layers[1].shared(torch.zeros(1, 1, 32)) is None


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    one, same, other = decoder(3).state_dict(), decoder(3, num_layers=4).state_dict(), decoder(4).state_dict()
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    matrices = {name: value for name, value in one.items() if value.is_floating_point() and "norm" not in name}
    assert len(matrices) > 15
    for name, value in matrices.items():
        assert not torch.equal(value, other[name]), name
        assert value.std().item() == pytest.approx(0.02, rel=0.15), name
    assert not torch.equal(one["layers.1.attn.q_proj.weight"], one["layers.2.attn.q_proj.weight"])
    assert torch.equal(named_normal(1, "a", (4,), 1.0), 2 * named_normal(1, "a", (4,), 0.5))


def test_bfloat16_is_the_rounded_float32_model_and_keeps_the_router() -> None:
    wide, narrow = decoder().state_dict(), decoder(dtype="bfloat16").state_dict()
    assert wide.keys() == narrow.keys()
    for name, value in narrow.items():
        assert value.dtype == (torch.float32 if ".router." in name else torch.bfloat16), name
        assert torch.equal(value, wide[name].to(value.dtype)), name


def test_loss_is_a_sum_over_the_targets_that_count() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[0, IGNORE, 4], [IGNORE, 2, IGNORE]])
    chosen = [(0, 0, 0), (0, 2, 4), (1, 1, 2)]
    expected = sum(-F.log_softmax(logits[b, t], -1)[v] for b, t, v in chosen)
    torch.testing.assert_close(loss_sum(logits, targets), expected)
    assert loss_sum(logits, torch.full((2, 3), IGNORE)) == 0


def test_a_short_training_run_learns_its_text_and_says_it() -> None:
    model = decoder(init_std=0.1, num_layers=2, first_dense_layers=0, intermediate_size=0)
    text = torch.tensor([[256, *b"the cat sat on the mat", 256]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = loss_sum(model(text[:, :-1])[0], text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() / 23 < 0.05
    model.train()
    assert generate(model, b"the cat", 30, 0.0, seed=0) == b" sat on the mat"
    assert model.training


def test_sampled_text_depends_on_seed_and_temperature() -> None:
    model = decoder(init_std=0.2)
    texts = [generate(model, b"", 24, 1.0, seed, context=8) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    with pytest.raises(RecipeError, match="temperature must not be negative"):
        generate(model, b"", 4, -1.0, 0)


def test_text_stays_within_the_tokens_that_a_dispatcher_was_built_for() -> None:
    config = ModelConfig(**{**SIZES, "init_std": 0.2})
    bounded = Decoder(config, config.moe(dispatcher="agrs", experts="loop", max_tokens=8))
    bounded.reset_parameters(0)
    assert generate(bounded, b"", 24, 1.0, 0) == generate(decoder(init_std=0.2), b"", 24, 1.0, 0, context=8)

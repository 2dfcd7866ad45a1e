"""Weights and logits against `transformers`' Qwen3MoeForCausalLM, in both directions; strictness; refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_ep.errors import CheckpointError, RecipeError
from recipes import hf, hf_layout
from recipes.hf import export_hf, import_hf
from recipes.hf_config import INDEX, SINGLE, read_hf_config
from recipes.model import Decoder
from recipes.model_config import ModelConfig

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install moe_ep[dev])")

SIZES: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 32,
    "num_layers": 3,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 12,
    "num_experts": 6,
    "top_k": 3,
    "expert_intermediate_size": 20,
    "intermediate_size": 48,
    "first_dense_layers": 1,
    "rope_theta": 5e4,
    "rms_norm_eps": 1e-5,
    "init_std": 0.3,
}
IDS = torch.randint(70, (3, 17), generator=torch.Generator().manual_seed(0))
LIMIT = 1e-5


def decoder(seed: int = 1, moe: dict[str, Any] | None = None, **changes: Any) -> Decoder:
    config = ModelConfig(**{**SIZES, **changes})
    model = Decoder(config, config.moe(dispatcher="local", experts="loop", **(moe or {})))
    model.reset_parameters(seed)
    with torch.no_grad():  # norms of one would hide a norm that is left out or swapped
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(hf_noise(name, parameter.shape))
    return model


def hf_noise(name: str, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) * 0.2


def theirs(tie: bool = False, normalize: bool = True, dense: int = 1) -> Any:
    torch.manual_seed(5)
    config = transformers.Qwen3MoeConfig(
        vocab_size=70,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        moe_intermediate_size=20,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=normalize,
        mlp_only_layers=list(range(dense)),
        rms_norm_eps=1e-5,
        tie_word_embeddings=tie,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4},
    )
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(hf_noise(name, parameter.shape))
    return model


def ours_for(model: Any, **changes: Any) -> Decoder:
    config = model.config
    return decoder(
        moe={"normalize_weights": config.norm_topk_prob},
        tie_embeddings=config.tie_word_embeddings,
        first_dense_layers=len(config.mlp_only_layers),
        intermediate_size=48 if config.mlp_only_layers else 0,
        **changes,
    )


def assert_equal_logits(ours: Decoder, other: Any) -> None:
    with torch.no_grad():
        mine, expected = ours(IDS)[0], other(IDS).logits
    assert expected.std() > 0.3, "logits too small for the comparison to mean anything"
    assert (mine - expected).abs().max() <= LIMIT


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("tie", "normalize", "dense"), [(False, True, 1), (True, False, 0), (False, True, 3)])
def test_import_of_save_pretrained_gives_equal_logits(
    tmp_path: Path, fused: bool, tie: bool, normalize: bool, dense: int
) -> None:
    other = theirs(tie, normalize, dense)
    other.save_pretrained(tmp_path, save_original_format=not fused)
    names = load_file(tmp_path / SINGLE).keys()
    assert any(n.endswith("experts.gate_up_proj") for n in names) == (fused and dense < 3)
    model = ours_for(other)
    import_hf(model, tmp_path)
    assert_equal_logits(model, other)


def test_import_of_several_files(tmp_path: Path) -> None:
    other = theirs()
    other.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    model = ours_for(other)
    import_hf(model, tmp_path)
    assert_equal_logits(model, other)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_embeddings": True}, {"first_dense_layers": 0, "intermediate_size": 0}, {"first_dense_layers": 3}],
)
@pytest.mark.parametrize("normalize", [True, False])
def test_export_is_read_by_from_pretrained_with_equal_logits(
    tmp_path: Path, changes: dict[str, Any], normalize: bool
) -> None:
    model = decoder(moe={"normalize_weights": normalize}, **changes)
    export_hf(model, tmp_path, max_positions=64)
    other, report = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert other.config.max_position_embeddings == 64 and other.dtype == torch.float32
    assert_equal_logits(model, other.eval())


def test_export_and_import_are_each_others_inverse(tmp_path: Path) -> None:
    model, copy = decoder(1), decoder(2)
    export_hf(model, tmp_path, max_positions=64)
    import_hf(copy, tmp_path)
    state = copy.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    config, normalize = read_hf_config(tmp_path)
    assert normalize and {n: getattr(config, n) for n in SIZES if n != "init_std"} == {
        n: v for n, v in SIZES.items() if n != "init_std"
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", SINGLE]


def test_router_stays_float32_in_a_bfloat16_export(tmp_path: Path) -> None:
    model = decoder(1)
    export_hf(model, tmp_path / "kept", max_positions=64, dtype=torch.bfloat16)
    export_hf(model, tmp_path / "asked", max_positions=64, dtype=torch.bfloat16, router_dtype=torch.bfloat16)
    for folder, dtype in (("kept", torch.float32), ("asked", torch.bfloat16)):
        weights = load_file(tmp_path / folder / SINGLE)
        router = {n: w.dtype for n, w in weights.items() if n.endswith("mlp.gate.weight")}
        assert len(router) == 2 and set(router.values()) == {dtype}
        assert {w.dtype for n, w in weights.items() if n not in router} == {torch.bfloat16}
    copy = decoder(2, dtype="bfloat16")
    import_hf(copy, tmp_path / "kept")
    for mine, loaded in zip(model.layers[1:], copy.layers[1:], strict=True):
        assert loaded.moe.router.weight.dtype == torch.float32
        assert torch.equal(mine.moe.router.weight, loaded.moe.router.weight)


def test_ranks_write_their_experts_and_read_them_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks played one after the other; what is fixed by hand is only who says to be which rank."""
    whole = decoder(1)
    halves = [decoder(2), decoder(3)]
    for rank, half in enumerate(halves):
        keep_experts(half, whole, slice(3 * rank, 3 * rank + 3))
        play_rank(monkeypatch, rank)
        export_hf(half, tmp_path, max_positions=64)
    files = {p.name: load_file(p) for p in tmp_path.glob("*.safetensors")}
    assert sorted(files) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in files.values() for t in tensors.values())
    other = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path).eval()
    assert_equal_logits(whole, other)
    for rank in range(2):
        reader = decoder(4)
        keep_experts(reader, reader, slice(0, 3))
        play_rank(monkeypatch, rank)
        import_hf(reader, tmp_path)
        for mine, expected in zip(reader.layers[1:], whole.layers[1:], strict=True):
            assert torch.equal(mine.moe.experts.w_down, expected.moe.experts.w_down[3 * rank : 3 * rank + 3])
            assert torch.equal(mine.moe.experts.w_gate_up, expected.moe.experts.w_gate_up[3 * rank : 3 * rank + 3])


def play_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    for module in (hf, hf_layout):
        monkeypatch.setattr(module, "expert_place", lambda model: (rank, 2))


def keep_experts(model: Decoder, source: Decoder, which: slice) -> None:
    """Give `model` the values of `source`, but only some of its experts."""
    model.load_state_dict(source.state_dict())
    for layer in model.layers[1:]:
        for name in ("w_gate_up", "w_down"):
            whole = getattr(layer.moe.experts, name)
            setattr(layer.moe.experts, name, torch.nn.Parameter(whole.detach()[which].clone()))


def test_ranks_that_hold_copies_write_nothing(tmp_path: Path) -> None:
    export_hf(decoder(), tmp_path / "new", max_positions=64, writer=False)
    assert not (tmp_path / "new").exists()


GATE = "model.layers.2.mlp.experts.4.gate_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.pop(GATE), f"missing: {GATE}"),
        (lambda w: w.update({GATE + "s": w.pop(GATE)}), f"missing: {GATE}; surplus: {GATE}s"),
        (lambda w: w.update(extra=torch.ones(2)), "surplus: extra"),
        (lambda w: w.pop("lm_head.weight"), "missing: lm_head.weight"),
        (lambda w: w.update({GATE: w[GATE].T.contiguous()}), r"is \[32, 20\] in the file, \[20, 32\] in the model"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, edit: Any, message: str) -> None:
    export_hf(decoder(), tmp_path, max_positions=64)
    weights = load_file(tmp_path / SINGLE)
    edit(weights)
    save_file(weights, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=message):
        import_hf(decoder(), tmp_path)


def test_a_missing_expert_is_named_also_when_another_rank_would_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_hf(decoder(), tmp_path, max_positions=64)
    weights = load_file(tmp_path / SINGLE)
    weights.pop(GATE)
    save_file(weights, tmp_path / SINGLE)
    reader = decoder()
    keep_experts(reader, reader, slice(0, 3))
    play_rank(monkeypatch, 0)
    with pytest.raises(CheckpointError, match=f"missing: {GATE}"):
        import_hf(reader, tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"num_experts_per_tok": 2}, r"top_k = 2 \(recipe: 3\)"),
        ({"norm_topk_prob": False}, r"normalize_weights = False \(recipe: True\)"),
        ({"rope_theta": 1e4}, r"rope_theta = 10000.0 \(recipe: 50000.0\)"),
        ({"mlp_only_layers": [2]}, r"layers \[2\] are dense"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4}}, "rope_type = 'yarn'"),
        ({"model_type": "qwen2_moe"}, "only 'qwen3_moe' can be imported"),
        ({"num_key_value_heads": 3}, "num_kv_heads = 3 must divide"),
    ],
)
def test_another_models_config_is_named(tmp_path: Path, edit: dict[str, Any], message: str) -> None:
    export_hf(decoder(), tmp_path, max_positions=64)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
    with pytest.raises(CheckpointError, match=message):
        import_hf(decoder(), tmp_path)


def test_config_keys_of_transformers_5_are_read(tmp_path: Path) -> None:
    theirs().config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert "num_local_experts" in values and "rope_theta" not in values, "transformers writes other keys than it did"
    config, normalize = read_hf_config(tmp_path)
    assert (config.num_experts, config.rope_theta, config.first_dense_layers, normalize) == (6, 5e4, 1, True)


def test_missing_truncated_and_ambiguous_files_are_named(tmp_path: Path) -> None:
    model = decoder()
    with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
        import_hf(model, tmp_path)
    export_hf(model, tmp_path, max_positions=64)
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        import_hf(model, tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match="holds both"):
        import_hf(model, tmp_path)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=r"gone.safetensors cannot be read"):
        import_hf(model, tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        import_hf(model, tmp_path)


def test_a_tied_head_that_differs_from_the_embedding_is_named(tmp_path: Path) -> None:
    model = decoder(tie_embeddings=True)
    export_hf(model, tmp_path, max_positions=64)
    weights = load_file(tmp_path / SINGLE)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / SINGLE)
    import_hf(decoder(2, tie_embeddings=True), tmp_path)
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match="differs from the embedding"):
        import_hf(decoder(2, tie_embeddings=True), tmp_path)


@pytest.mark.parametrize(
    ("moe", "model", "message"),
    [
        ({"router": "sigmoid", "bias_update_rate": 0.01}, {}, "router = 'sigmoid'"),
        ({"router": "grouped", "num_groups": 3}, {}, "router = 'grouped'"),
        ({"routed_scale": 2.5}, {}, "routed_scale = 2.5"),
        ({"force_balance": True}, {}, "force_balance"),
        ({}, {"num_shared_experts": 1, "shared_intermediate_size": 16}, "num_shared_experts = 1"),
    ],
)
def test_export_of_what_the_architecture_cannot_hold_is_refused(
    tmp_path: Path, moe: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=f"export with {message}.*Qwen3MoeForCausalLM cannot hold it"):
        export_hf(decoder(moe=moe, **model), tmp_path / "new", max_positions=64)
    assert not (tmp_path / "new").exists()


def test_export_never_mixes_with_other_weights(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00004.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds other weights \(model-00001-of-00004.safetensors\)"):
        export_hf(decoder(), tmp_path, max_positions=64)


def test_a_write_that_fails_leaves_the_previous_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_hf(decoder(1), tmp_path, max_positions=64)
    before = (tmp_path / SINGLE).read_bytes()

    def full(tensors: Any, path: str, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        export_hf(decoder(2), tmp_path, max_positions=64)
    assert (tmp_path / SINGLE).read_bytes() == before
    assert not list(tmp_path.glob("*.partial"))

"""A run to and from transformers' folders, as a user does it: `recipes/convert.py` and `recipes/pretrain.py`."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipes import convert, program

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install moe_ep[dev])")

RECIPE = """
[run]
name = "run"
dir = "{folder}/runs"
[model]
vocab_size = 257
hidden_size = 32
num_layers = 2
num_attention_heads = 4
num_kv_heads = 2
head_dim = 8
num_experts = 4
top_k = 2
expert_intermediate_size = 16
rope_theta = 1e4
[moe]
dispatcher = "local"
[parallel]
backend = "gloo"
[train]
steps = 2
micro_batch_size = 2
sequence_length = 16
lr = 1e-3
[data]
path = "{folder}/text"
valid_fraction = 0.1
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Iterator[str]:
    before = signal.getsignal(signal.SIGTERM)  # a run sets its own
    (tmp_path / "text").write_text("the cat sat on the mat. " * 40)
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(folder=tmp_path))
    yield str(path)
    signal.signal(signal.SIGTERM, before)


def pretrained(folder: Path, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=257,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        **changes,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)


def test_imported_weights_are_trained_on_and_exported(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrained(tmp_path / "in")
    assert convert.main(["import", recipe, str(tmp_path / "in")]) == 0
    assert convert.main(["export", recipe, str(tmp_path / "same")]) == 0
    given, same = load_file(tmp_path / "in/model.safetensors"), load_file(tmp_path / "same/model.safetensors")
    assert given.keys() == same.keys() and all(torch.equal(given[name], same[name]) for name in given)
    assert program.main([recipe]) == 0
    assert "resumes at step 0" in capsys.readouterr().out
    assert convert.main(["export", recipe, str(tmp_path / "out"), "train.gradient_accumulation=8"]) == 0
    assert "other text follows" not in capsys.readouterr().out, "nothing follows an export"
    trained = load_file(tmp_path / "out/model.safetensors")
    moved = [(trained[name] - given[name]).abs().max().item() for name in given]
    assert min(moved) > 0 and max(moved) < 0.01
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["max_position_embeddings"] == 16


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    return convert.main(list(arguments)), capsys.readouterr().err


def test_what_cannot_be_converted_is_refused(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "in")
    code, text = refusal(capsys, "exprt", recipe, folder)
    assert code == 2 and "refused: command 'exprt' is unknown; did you mean 'export'? known: export, import" in text
    assert refusal(capsys, "export", recipe) == refusal(capsys, "--help") == (2, convert.USAGE + "\n")
    code, text = refusal(capsys, "export", recipe, folder, "moe.router=sigmoid")
    assert code == 2 and "router = 'sigmoid' is refused" in text
    code, text = refusal(capsys, "export", recipe, folder)
    assert code == 1 and "has no checkpoint to export" in text
    code, text = refusal(capsys, "import", recipe, folder)
    assert code == 1 and "config.json cannot be read" in text
    pretrained(tmp_path / "in", tie_word_embeddings=True)
    code, text = refusal(capsys, "import", recipe, folder)
    assert code == 1 and "tie_embeddings = True (recipe: False)" in text
    assert convert.main(["import", recipe, folder, "model.tie_embeddings=true"]) == 0
    code, text = refusal(capsys, "import", recipe, folder, "model.tie_embeddings=true")
    assert code == 1 and "import would hide" in text

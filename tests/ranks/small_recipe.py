"""A recipe and a text so small that a step takes milliseconds."""

from __future__ import annotations

import random
from pathlib import Path

RECIPE = """
[run]
name = "small"
[model]
vocab_size = 257
hidden_size = 16
num_layers = 2
num_attention_heads = 2
num_kv_heads = 1
head_dim = 8
num_experts = 4
top_k = 2
expert_intermediate_size = 16
num_shared_experts = 1
shared_intermediate_size = 16
rope_theta = 10000.0
[moe]
aux_loss_coef = 0.01
z_loss_coef = 0.001
[parallel]
ep_size = 4
backend = "gloo"
[train]
steps = 6
micro_batch_size = 1
sequence_length = 16
gradient_accumulation = 2
lr = 1e-2
warmup_steps = 2
seed = 3
timeout_s = 30
[data]
path = "text"
valid_fraction = 0.2
[checkpoint]
every = 2
keep = 3
[metrics]
every = 1
"""


def write(folder: Path) -> Path:
    """The recipe's file in `folder`, with its text beside."""
    text = folder / "text"
    text.mkdir(exist_ok=True)
    chance = random.Random(5)
    for number in range(6):
        words = (chance.choice(("def", "return", "x", "y = 1", "if", "else:", "\n    ")) for _ in range(300))
        (text / f"{number}.py").write_text(" ".join(words))
    path = folder / "small.toml"
    path.write_text(RECIPE)
    return path

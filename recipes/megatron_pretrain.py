"""Pretrain Megatron-Core's GPT with experts from a recipe, on our dispatchers or on Megatron's own.

    torchrun --standalone --nproc-per-node 2 recipes/megatron_pretrain.py recipes/megatron_2gpu.toml
    torchrun --standalone --nproc-per-node 2 recipes/megatron_pretrain.py RECIPE moe.dispatcher=deepep
    torchrun --standalone --nproc-per-node 2 recipes/megatron_pretrain.py RECIPE moe.dispatcher=direct

`megatron.dispatcher=native train.intra_layer_micro_batch=1` behind it runs Megatron's own dispatcher instead.

Exit codes of a rank are those of `recipes/pretrain.py`. There are no checkpoints here: in a training script of your own
(such as megatron.training's), `use_moe_ep` on its spec leaves Megatron's as they are.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipes.megatron_program import main  # noqa: E402
from recipes.one_rank import leave  # noqa: E402

if __name__ == "__main__":
    leave(main(sys.argv[1:]))

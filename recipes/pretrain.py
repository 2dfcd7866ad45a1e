"""Pretrain a Mixture-of-Experts decoder from a recipe; the same program for one rank and many.

    python recipes/pretrain.py recipes/tiny.toml parallel.ep_size=1
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 recipes/pretrain.py recipes/tiny.toml moe.dispatcher=agrs
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 recipes/pretrain.py RECIPE

Exit codes of a rank: 0 done, or saved on SIGTERM; 1 failed; 2 recipe refused; 3 another rank failed or was lost.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Runs from a clone, installed or not; and `recipes/` itself is no place to import `data` or `build` from.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipes.one_rank import leave  # noqa: E402
from recipes.program import main  # noqa: E402

if __name__ == "__main__":
    leave(main(sys.argv[1:]))

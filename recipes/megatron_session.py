"""One run of Megatron's GPT on one rank: banner, steps, held-out loss, metrics."""

from __future__ import annotations

import dataclasses
import functools

import torch

from moe_ep.integrations.megatron import moe_layers
from moe_ep.integrations.megatron_limits import megatron_version
from recipes.megatron_recipe import MegatronRecipe
from recipes.megatron_train import Row, Trainer, build, train_step, validate, write_row
from recipes.ranks import Ranks


def run(loaded: MegatronRecipe, ranks: Ranks) -> None:
    """Train to the last step, print and write the metrics."""
    recipe = loaded.recipe
    trainer, corpus = build(loaded, ranks)
    path = recipe.folder / "metrics.jsonl"
    _say(ranks, _banner(loaded, ranks, trainer))
    if ranks.rank == 0:
        path.unlink(missing_ok=True)
    for step in range(1, recipe.train.steps + 1):
        row, last = train_step(trainer, step), step == recipe.train.steps
        if last or (recipe.metrics.valid_every and step % recipe.metrics.valid_every == 0):
            row = dataclasses.replace(row, valid_loss=validate(trainer))
        if step == 1 or last or step % recipe.metrics.every == 0 or row.valid_loss is not None:
            _say(ranks, _line(row, recipe.train.steps))
            ranks.together(functools.partial(write_row, path if ranks.rank == 0 else None, row))
    _say(
        ranks,
        f"done: held-out loss {row.valid_loss:.4f} nats/byte (unigram entropy "
        f"{corpus.info.valid_unigram_entropy:.3f}, gzip {corpus.info.valid_gzip:.3f}); metrics {path}",
    )


def _say(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        print(text, flush=True)


def _banner(loaded: MegatronRecipe, ranks: Ranks, trainer: Trainer) -> str:
    version, layers = megatron_version(), moe_layers(trainer.model)
    runs = "Megatron's alltoall" if loaded.native else layers[0].runs()
    experts = type(next(m for n, m in trainer.model.named_modules() if n.endswith(".experts"))).__name__
    return (
        f"Megatron-Core {version}, torch {torch.__version__}; {ranks.world_size} rank(s) on {ranks.device.type}, "
        f"{ranks.dp_size} data parallel x {ranks.ep_size} expert parallel; dispatcher {runs}; experts {experts}; "
        f"intra_layer_micro_batch {loaded.recipe.train.intra_layer_micro_batch}"
    )


def _line(row: Row, steps: int) -> str:
    rate = row.tokens / row.step_s
    valid = "" if row.valid_loss is None else f"  held-out {row.valid_loss:.4f}"
    return (
        f"step {row.step}/{steps}  loss {row.loss:.4f}{valid}  grad norm {row.grad_norm:.3f}  lr {row.lr:.2e}  "
        f"{rate:.0f} tokens/s  {row.peak_memory / 2**30:.2f} GiB"
    )

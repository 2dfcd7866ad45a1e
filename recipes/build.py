"""From a recipe and the running ranks to a `Trainer`: text, model, sharding, optimizer, resume. All is collective."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from moe_ep.errors import MoEError, RecipeError, Unavailable
from moe_ep.recompute import recompute_context_fn
from moe_ep.step import moe_layers
from recipes import checkpoint
from recipes.corpus import Corpus, CorpusError, load_corpus
from recipes.data import TrainData, ValidData, encode
from recipes.entries import Entries
from recipes.files import writing
from recipes.identity import identity
from recipes.model import Decoder
from recipes.optim import ShardedAdamW, owned_parameters
from recipes.parallel import expert_names, recompute, shard
from recipes.ranks import Ranks, same_everywhere
from recipes.recipe import Recipe
from recipes.routing_trace import TraceHeader, TraceRecorder, git_commit
from recipes.train_loop import Trainer, samples_per_step


def build(recipe: Recipe, ranks: Ranks) -> Trainer:
    """Build everything; errors of one rank are raised on all of them.

    Raises:
        MoEError: a corpus, a dispatcher or a sharding that cannot be, or ranks that disagree.
    """
    corpus: Corpus = ranks.together(lambda: read_text(recipe))
    same_everywhere(ranks, {"digest of the training text": corpus.info.sha256}, recipe.source)
    length = recipe.train.sequence_length
    train_data = ranks.together(lambda: TrainData(encode(corpus.train), length, recipe.train.seed))
    valid_data = ranks.together(lambda: ValidData(encode(corpus.valid), length))
    if recipe.train.deterministic:
        torch.use_deterministic_algorithms(True)
    model: Decoder = ranks.together(lambda: build_model(recipe, ranks))
    optimizer: ShardedAdamW = ranks.together(lambda: build_optimizer(recipe, model, ranks))
    entries = Entries(model, optimizer, ranks, recipe.model.num_experts)
    recorder: TraceRecorder | None = ranks.together(lambda: build_recorder(recipe, model, ranks))
    return Trainer(recipe, ranks, model, optimizer, train_data, valid_data, corpus.info, entries, recorder)


def read_text(recipe: Recipe) -> Corpus:
    """The recipe's text.

    Raises:
        CorpusError: missing, empty or unreadable; names the recipe.
    """
    try:
        return load_corpus(recipe.data.path, recipe.data.valid_fraction)
    except CorpusError as err:
        raise CorpusError(f"{recipe.source} {err}") from err


def build_model(recipe: Recipe, ranks: Ranks) -> Decoder:
    """The model on this rank's device, with its initial weights, sharded; the same for every number of ranks."""
    with allocating(recipe, ranks):
        try:
            model = Decoder(recipe.model, recipe.moe_config(), ranks.ep_group)
        except (RecipeError, Unavailable) as err:
            raise type(err)(f"{recipe.source} [moe]: {err}") from err
        assert bool(moe_layers(model)) == recipe.has_moe, "the model has no MoE layer although the recipe asks for one"
        model.reset_parameters(recipe.train.seed)
        model.to(ranks.device)
        recompute(model, recipe.train.recompute, recompute_context_fn)
        shard(model, ranks, recipe.model.torch_dtype)
    return model


def build_optimizer(recipe: Recipe, model: Decoder, ranks: Ranks) -> ShardedAdamW:
    """The optimizer over this rank's shards."""
    with allocating(recipe, ranks):
        owned = owned_parameters(model.named_parameters(), expert_names(model), ranks.rank)
        return ShardedAdamW(owned, recipe.train.weight_decay)


def build_recorder(recipe: Recipe, model: Decoder, ranks: Ranks) -> TraceRecorder | None:
    """What writes the routing trace, where the recipe wants one.

    Raises:
        Unavailable: safetensors is missing.
    """
    if recipe.metrics.routing_trace is None:
        return None
    layers, sizes, element = moe_layers(model), recipe.model, recipe.model.torch_dtype.itemsize
    header = TraceHeader(
        step=0,
        rank=ranks.ep_rank,
        replica=ranks.rank // ranks.ep_size,
        ranks=ranks.ep_size,
        num_experts=sizes.num_experts,
        top_k=sizes.top_k,
        layers=len(layers),
        micro_batches=recipe.train.gradient_accumulation,
        expert_bytes=3 * sizes.hidden_size * sizes.expert_intermediate_size * element,
        row_bytes=sizes.hidden_size * element,
        seed=recipe.train.seed,
        commit=git_commit(),
    )
    return TraceRecorder(layers, Path(recipe.metrics.routing_trace), header)


@contextlib.contextmanager
def allocating(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    """Say of a model that does not fit into memory that it is the model.

    Raises:
        MoEError: in place of what the allocators raise.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as err:  # the GPU's allocator has a class of its own, the CPU's has none
        if not isinstance(err, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(err):
            raise
        reason = str(err).strip().splitlines()[0] if str(err).strip() else "no memory"
        raise MoEError(
            f"{recipe.source} [model]: the model does not fit into the memory of rank {ranks.rank} ({reason}); make it "
            "smaller, or raise parallel.ep_size with more ranks"
        ) from err


def resume(trainer: Trainer, *, train: bool = True) -> str:
    """Take up a checkpoint if the recipe means one; returns a sentence for the log. A collective that only reads.

    Args:
        trainer: as built; gets the checkpoint's values.
        train: whether training goes on, so that the data must be the same too.

    Raises:
        CheckpointError: on every rank.
    """
    recipe, ranks = trainer.recipe, trainer.ranks
    folder = recipe.folder / "checkpoints"
    path = ranks.together(lambda: checkpoint.find(recipe.checkpoint.resume, folder))
    same_everywhere(ranks, {"checkpoint": path and path.name}, recipe.source)
    if path is None:
        return "starts at step 0"
    parts = (trainer.model, trainer.optimizer, trainer.entries)
    ours = identity(recipe, trainer.corpus)
    progress = checkpoint.restore(path, ours if train else dataclasses.replace(ours, data=None), *parts, ranks)
    trainer.step, trainer.resumed_from = progress.step, path
    trainer.saved_step = progress.step if checkpoint.is_step(path, folder, progress.step) else -1
    before, now = progress.samples_per_step, samples_per_step(recipe, ranks)
    shift = (
        ""
        if before == now or not train
        else f" (a step has {now} sequences, not {before} as before: other text follows)"
    )
    return f"resumes at step {progress.step} from {path}{shift}"


def make_way(trainer: Trainer) -> str | None:
    """Put aside, before training goes on, what a later "auto" would otherwise take for newer than this run; collective.

    Returns:
        A sentence for the log; None where nothing stood in the way.
    """
    folder, path, step = trainer.recipe.folder, trainer.resumed_from, trainer.step

    def act() -> str | None:
        if trainer.ranks.rank != 0:
            return None
        if path is None:
            aside = set_aside(folder)
            return None if aside is None else f"the run of this name before is now {aside}"
        with writing(folder):
            left = checkpoint.put_aside(folder / "checkpoints", path, step)
            for rows in (folder / "metrics.jsonl", folder / "load.jsonl"):  # they lose their later rows
                if left and rows.exists():
                    left.append(Path(shutil.copy2(rows, checkpoint.aside_name(rows))))
        names = ", ".join(old.name for old in left)
        return f"put aside, as this run goes on from step {step} without them: {names}" if left else None

    return trainer.ranks.gather(trainer.ranks.together(act))[0]


def set_aside(folder: Path) -> Path | None:
    """Rename the folder of an earlier run that has checkpoints, so that a later "auto" cannot take those up."""
    if checkpoint.newest(folder / "checkpoints") is None:
        return None
    aside = next(path for n in itertools.count(1) if not (path := folder.with_name(f"{folder.name}.old{n}")).exists())
    with writing(folder):
        return folder.rename(aside)

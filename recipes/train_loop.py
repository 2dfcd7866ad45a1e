"""The training loop: what one optimizer step does, in which order, and what happens around it.

A step: fetch all micro-batches; sum their tokens over ranks; forward and backward of each group, with losses that are
sums divided by that *global* count; sum the step's figures over ranks; global norm; refuse what is not finite; clip;
AdamW; selection bias. Every rank makes the same collectives in the same order whatever its data hold, and reads one
decision (stop or not) from the same sum.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from moe_ep.consistency import copies, differing_copies, listed
from moe_ep.errors import CheckpointError, NonFiniteError
from moe_ep.gradients import clip_, global_norm
from moe_ep.layer import MoELayer
from moe_ep.step import check_ended, moe_layers, total_aux_loss, update_biases
from moe_ep.step_end import raise_on_all_ranks
from recipes import checkpoint
from recipes.corpus import CorpusInfo
from recipes.data import Batch, TrainData, ValidData
from recipes.entries import Entries
from recipes.identity import identity
from recipes.metrics import StepSums, Tally, flops_per_token, load_fields, peak_mib, peak_tflops
from recipes.metrics_file import Row
from recipes.model import Decoder, loss_sum
from recipes.optim import ShardedAdamW, learning_rate
from recipes.parallel import set_last_micro_batch
from recipes.ranks import Ranks, mark_agreed
from recipes.recipe import Recipe
from recipes.routing_trace import TraceRecorder


@dataclass(slots=True)
class Trainer:
    """Everything that a run holds; built by `recipes.build.build`."""

    recipe: Recipe
    ranks: Ranks
    model: Decoder
    optimizer: ShardedAdamW
    train_data: TrainData
    valid_data: ValidData
    corpus: CorpusInfo
    entries: Entries
    recorder: TraceRecorder | None = None
    step: int = 0
    saved_step: int = -1
    resumed_from: Path | None = None
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    @property
    def moe(self) -> list[MoELayer]:
        """The MoE layers, first one first."""
        return moe_layers(self.model)


def train_step(trainer: Trainer, stop: bool = False) -> tuple[Row, StepSums]:
    """One optimizer step on the next global batch.

    Args:
        trainer: its step count rises by one.
        stop: this rank was told to stop; every rank learns it from the sums.

    Raises:
        NonFiniteError: on every rank, before the optimizer moves anything.
    """
    started = time.perf_counter()
    batches = fetch(trainer)
    data_s = time.perf_counter() - started
    with raise_on_all_ranks(trainer.ranks.ep_group):
        sums = forward_backward(trainer, batches, stop)
    if trainer.recorder is not None:
        ranks, recorder, number = trainer.ranks, trainer.recorder, trainer.step + 1
        ranks.together(lambda: recorder.write(number))  # a full disk ends all alike
    lr = rate(trainer)
    norm = update(trainer, sums, lr)
    trainer.step += 1
    return _row(trainer, sums, norm, lr, data_s, started), sums


def fetch(trainer: Trainer) -> list[Batch]:
    """This rank's micro-batches of the next step, on its device."""
    train, ranks = trainer.recipe.train, trainer.ranks
    return [
        trainer.train_data.piece(
            trainer.step,
            micro,
            micro_batch_size=train.micro_batch_size,
            accumulation=train.gradient_accumulation,
            rank=ranks.rank,
            world=ranks.world_size,
        ).to(ranks.device)
        for micro in range(train.gradient_accumulation)
    ]


def forward_backward(trainer: Trainer, batches: list[Batch], stop: bool = False) -> StepSums:
    """Gradients of (sum of cross-entropies + token-weighted balancing losses) / global tokens, and the step's sums.

    The balancing losses of the layers are added up; a piece counts by its share of the global tokens. Groups of
    `intra_layer_micro_batch` pieces run interleaved, and none of these figures depends on that.
    """
    model, ranks = trainer.model, trainer.ranks
    model.train()
    tally = Tally(len(trainer.moe), trainer.recipe.model.num_experts, ranks.device, ranks.ep_size)
    counts = torch.tensor(sum(batch.num_tokens for batch in batches), dtype=torch.float64, device=ranks.device)
    global_tokens = ranks.all_sum(counts).float()
    size = trainer.recipe.train.intra_layer_micro_batch
    for first in range(0, len(batches), size):
        group = batches[first : first + size]
        set_last_micro_batch(model, last=first + size == len(batches))
        losses = []
        with contextlib.nullcontext() if trainer.recorder is None else trainer.recorder.listening():
            all_logits, all_auxes = model([batch.ids for batch in group], [batch.valid for batch in group])
        for batch, logits, auxes in zip(group, all_logits, all_auxes, strict=True):
            entropies = loss_sum(logits, batch.targets)
            total: Tensor = entropies + total_aux_loss(auxes).to(entropies.device) * batch.num_tokens
            losses.append(total / global_tokens)
            tally.add(batch.num_tokens, entropies, auxes)
        torch.stack(losses).sum().backward()  # one backward for the group, or it would not interleave
    return tally.unpack(ranks.all_sum(tally.pack(stop)))


def rate(trainer: Trainer) -> float:
    """Learning rate of the step in progress."""
    t = trainer.recipe.train
    return learning_rate(trainer.step + 1, peak=t.lr, floor=t.min_lr, warmup=t.warmup_steps, total=t.steps)


def update(trainer: Trainer, sums: StepSums, lr: float) -> float:
    """Check, clip, AdamW, selection bias; returns the norm before clipping."""
    optimizer, ranks, clip = trainer.optimizer, trainer.ranks, trainer.recipe.train.clip_norm
    check_ended(trainer.moe)
    gradients = optimizer.gradients()
    norm = global_norm(optimizer.counted(gradients), 2.0, ranks.group, ranks.device)
    _check_finite(trainer.step + 1, sums.loss, norm.item())
    clip_(gradients, norm, clip)
    optimizer.step(lr)
    update_biases(trainer.moe, sums.load.to(ranks.device))
    for layer in trainer.moe:
        layer.router.take_load()
    return norm.item()


def _check_finite(step: int, loss: float, norm: float) -> None:
    if not all(value == value and abs(value) != float("inf") for value in (loss, norm)):
        text = f"step {step}: loss {loss}, gradient norm {norm}: not finite; lower train.lr or look at the data"
        raise mark_agreed(NonFiniteError(text))


def _row(trainer: Trainer, sums: StepSums, norm: float, lr: float, data_s: float, started: float) -> Row:
    recipe, ranks = trainer.recipe, trainer.ranks
    step_s = time.perf_counter() - started
    trainer.recent_s.append(step_s)
    flops = flops_per_token(recipe.model, recipe.train.sequence_length) * sums.tokens / ranks.world_size
    tflops, peak = flops / step_s / 1e12, peak_tflops(ranks.device, recipe.model.dtype)
    return Row(
        step=trainer.step,
        loss=sums.loss,
        aux_loss=sums.aux_loss,
        z_loss=sums.z_loss,
        grad_norm=norm,
        lr=lr,
        tokens_per_s=sums.tokens / step_s,
        tflops_per_rank=tflops,
        mfu=None if peak is None else tflops / peak,
        step_s=step_s,
        data_s=data_s,
        peak_mib=peak_mib(ranks.device),
        host_syncs=declared_host_syncs(trainer) if ranks.device.type == "cuda" else None,
        eta_s=(recipe.train.steps - trainer.step) * sum(trainer.recent_s) / len(trainer.recent_s),
        **load_fields(sums, ranks.ep_size),
    )


def declared_host_syncs(trainer: Trainer) -> int:
    """How often a step's dispatchers and replicas wait for the device, as the ones that were built say."""
    each = [(layer.dispatcher, layer.replicas) for layer in trainer.moe]
    syncs = sum(one.host_syncs + (0 if copies is None else copies.host_syncs) for one, copies in each)
    return syncs * trainer.recipe.train.gradient_accumulation


@torch.no_grad()
def validate(trainer: Trainer) -> float:
    """Mean cross-entropy of the held-out tokens, nats per token. Counters, bias and parameters stay as they are.

    Every rank runs equally many batches, the missing ones as padding: a layer is a collective in evaluation too.
    """
    trainer.model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=trainer.ranks.device)
    for batch in trainer.valid_data.batches(
        micro_batch_size=trainer.recipe.train.micro_batch_size,
        rank=trainer.ranks.rank,
        world=trainer.ranks.world_size,
    ):
        moved = batch.to(trainer.ranks.device)
        logits, _ = trainer.model(moved.ids, moved.valid)
        sums += torch.stack([loss_sum(logits, moved.targets).double(), sums.new_tensor(float(batch.num_tokens))])
    loss, tokens = trainer.ranks.all_sum(sums).tolist()
    trainer.model.train()
    return loss / tokens


def with_validation(trainer: Trainer, row: Row) -> Row:
    """The row with the validation fields filled in; a collective."""
    return dataclasses.replace(
        row, valid_loss=validate(trainer), valid_unigram_entropy=trainer.corpus.valid_unigram_entropy
    )


def save(trainer: Trainer) -> None:
    """Write a checkpoint of the present step, unless that was done already; a collective.

    Raises:
        CheckpointError: on every rank; see `checkpoint.save`, and nothing is written where copies of a value differ
            from rank to rank, of which only one would be saved.
    """
    if trainer.saved_step == trainer.step:
        return
    recipe = trainer.recipe
    found = differing_copies(copies(trainer.model), trainer.ranks.group)
    if found:
        text = f"step {trainer.step} is not saved: copies differ from rank 0's: {listed(found)}; resume from before it"
        raise mark_agreed(CheckpointError(text))
    checkpoint.save(
        recipe.folder / "checkpoints",
        checkpoint.Progress(trainer.step, samples_per_step(recipe, trainer.ranks)),
        identity(recipe, trainer.corpus),
        trainer.entries,
        trainer.ranks,
        recipe.checkpoint.keep,
    )
    trainer.saved_step = trainer.step


def samples_per_step(recipe: Recipe, ranks: Ranks) -> int:
    """Sequences of one global batch."""
    return ranks.world_size * recipe.train.gradient_accumulation * recipe.train.micro_batch_size

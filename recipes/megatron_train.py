"""Train Megatron-Core's GPT from a recipe: model, gradient buffers, optimizer, steps, held-out loss."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moe_ep.errors import NonFiniteError
from moe_ep.integrations.megatron import moe_layers, use_domino, use_moe_ep
from recipes.build import read_text
from recipes.corpus import Corpus
from recipes.data import Batch, TrainData, ValidData, encode
from recipes.files import writing
from recipes.megatron_optim import Optimizer, build_optimizer
from recipes.megatron_recipe import MegatronRecipe, config_fields
from recipes.optim import learning_rate
from recipes.ranks import Ranks, same_everywhere


@dataclass(slots=True)
class Trainer:
    """Everything that a step needs. `model` is wrapped in Megatron's gradient buffers."""

    loaded: MegatronRecipe
    ranks: Ranks
    model: DistributedDataParallel
    optimizer: Optimizer
    train_data: TrainData
    valid_data: ValidData
    mask: Tensor | None

    @property
    def group_size(self) -> int:
        """Micro-batches that go through each layer together."""
        return self.loaded.recipe.train.intra_layer_micro_batch


@dataclass(frozen=True, slots=True)
class Row:
    """One line of metrics.jsonl: losses in nats per token, seconds, this rank's peak of GPU memory in bytes."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_s: float
    peak_memory: int
    valid_loss: float | None = None


def build(loaded: MegatronRecipe, ranks: Ranks) -> tuple[Trainer, Corpus]:
    """Everything, collectively; errors of one rank are raised on all.

    Raises:
        MoEError: a flag that is not served, a dispatcher that cannot run, a text that is missing.
    """
    recipe, train = loaded.recipe, loaded.recipe.train
    corpus: Corpus = ranks.together(lambda: read_text(recipe))
    same_everywhere(ranks, {"digest of the training text": corpus.info.sha256}, recipe.source)
    length = train.sequence_length
    train_data = ranks.together(lambda: TrainData(encode(corpus.train), length, train.seed))
    valid_data = ranks.together(lambda: ValidData(encode(corpus.valid), length))
    torch.use_deterministic_algorithms(train.deterministic)
    model = ranks.together(lambda: build_model(loaded, ranks))
    optimizer = ranks.together(lambda: build_optimizer(loaded, model, ranks))
    mask = None if loaded.megatron.transformer_engine else _causal_mask(length, ranks.device)
    return Trainer(loaded, ranks, model, optimizer, train_data, valid_data, mask), corpus


def build_model(loaded: MegatronRecipe, ranks: Ranks) -> DistributedDataParallel:
    """Megatron's GPT with our MoE layers, in its gradient buffers (float32 sums)."""
    recipe, model, train = loaded.recipe, loaded.recipe.model, loaded.recipe.train
    config = TransformerConfig(**config_fields(loaded, ranks.device))
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=loaded.megatron.transformer_engine, normalization=config.normalization
    )
    if not loaded.native:
        spec = use_moe_ep(spec, **_options(loaded))
    torch.manual_seed(train.seed + (parallel_state.get_expert_model_parallel_rank() << 20))
    if ranks.device.type == "cuda":
        model_parallel_cuda_manual_seed(train.seed)
    gpt = GPTModel(
        config,
        spec,
        vocab_size=model.vocab_size,
        max_sequence_length=train.sequence_length,
        position_embedding_type="rope",
        rotary_base=model.rope_theta,
        share_embeddings_and_output_weights=model.tie_embeddings,
    ).to(ranks.device)
    if train.intra_layer_micro_batch > 1:
        use_domino(gpt, train.intra_layer_micro_batch)
    inner = Float16Module(config, gpt) if config.bf16 else gpt
    sharded = loaded.megatron.optimizer == "distributed"
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
    wrapped = DistributedDataParallel(config, settings, inner)
    wrapped.broadcast_params()  # experts differ between expert-parallel ranks, all else is rank 0's
    assert recipe.has_moe and (loaded.native or moe_layers(wrapped)), "no MoE layer of ours in the model"
    return wrapped


def _options(loaded: MegatronRecipe) -> dict[str, Any]:
    recipe, moe = loaded.recipe, loaded.recipe.moe
    return {
        "dispatcher": moe.dispatcher,
        "max_tokens": recipe.train.micro_batch_size * recipe.train.sequence_length,
        "capacity_factor": moe.capacity_factor,
        "num_sms": moe.num_sms,
        "kernels": moe.kernels,
        "options": dict(recipe.options.get(moe.dispatcher, ())),
        "replica": dataclasses.asdict(recipe.replica),
    }


def _causal_mask(length: int, device: torch.device) -> Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)  # True: hidden


def train_step(trainer: Trainer, step: int) -> Row:
    """Step `step` (from 1): all its micro-batches, one update.

    Raises:
        NonFiniteError: on every rank, before the optimizer moves anything.
    """
    started, train = time.perf_counter(), trainer.loaded.recipe.train
    trainer.model.train()
    trainer.model.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    sums = torch.zeros(2, dtype=torch.float64, device=trainer.ranks.device)
    batches = list(_batches(trainer, step - 1))
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        if last:  # buckets are reduced as soon as their last gradient is there
            sums += _backward(trainer, batch)
        else:
            with trainer.model.no_sync():
                sums += _backward(trainer, batch)
    finalize_model_grads([trainer.model], sums[1:].clone().to(torch.int))
    trainer.ranks.all_sum(sums)
    loss, tokens = (sums[0] / sums[1]).item(), int(sums[1].item())
    lr = learning_rate(step, peak=train.lr, floor=train.min_lr, warmup=train.warmup_steps, total=train.steps)
    norm = trainer.optimizer.step(lr)
    if not torch.isfinite(torch.tensor([loss, norm])).all():
        raise NonFiniteError(f"step {step}: loss {loss}, gradient norm {norm}; lower train.lr")
    peak = torch.cuda.max_memory_allocated() if trainer.ranks.device.type == "cuda" else 0
    return Row(step, loss, norm, lr, tokens, time.perf_counter() - started, peak)


def _batches(trainer: Trainer, step: int) -> Iterator[Batch]:
    """This rank's micro-batches of a step, `intra_layer_micro_batch` of them as one."""
    train, ranks, grouped = trainer.loaded.recipe.train, trainer.ranks, trainer.group_size
    pieces = [
        trainer.train_data.piece(
            step,
            micro,
            micro_batch_size=train.micro_batch_size,
            accumulation=train.gradient_accumulation,
            rank=ranks.rank,
            world=ranks.world_size,
        )
        for micro in range(train.gradient_accumulation)
    ]
    for first in range(0, len(pieces), grouped):
        group = pieces[first : first + grouped]
        yield Batch(
            ids=torch.cat([piece.ids for piece in group]),
            targets=torch.cat([piece.targets for piece in group]),
            valid=torch.cat([piece.valid for piece in group]),
            num_tokens=sum(piece.num_tokens for piece in group),
        ).to(ranks.device)


def _losses(trainer: Trainer, batch: Batch) -> Tensor:
    """Sum of the cross-entropies, float32 []."""
    positions = torch.arange(batch.ids.shape[1], device=batch.ids.device).expand_as(batch.ids)
    losses = trainer.model(batch.ids, positions, trainer.mask, labels=batch.targets.clamp_min(0))
    total: Tensor = losses.float().masked_fill(~batch.valid, 0).sum()
    return total


def _backward(trainer: Trainer, batch: Batch) -> Tensor:
    loss = _losses(trainer, batch)
    loss.backward()
    return torch.stack([loss.detach().double(), torch.tensor(batch.num_tokens).to(loss.device).double()])


@torch.no_grad()
def validate(trainer: Trainer) -> float:
    """Held-out loss, nats per token."""
    trainer.model.eval()
    size, ranks = trainer.loaded.recipe.train.micro_batch_size * trainer.group_size, trainer.ranks
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for batch in trainer.valid_data.batches(micro_batch_size=size, rank=ranks.rank, world=ranks.world_size):
        sums[0] += _losses(trainer, batch.to(ranks.device))
        sums[1] += batch.num_tokens
    ranks.all_sum(sums)
    return (sums[0] / sums[1]).item()


def write_row(path: Path | None, row: Row) -> None:
    """One more line of metrics.jsonl; None: another rank writes it."""
    if path is None:
        return
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")

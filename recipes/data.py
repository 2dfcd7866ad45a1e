"""Batches of byte tokens, keyed by the global index of a sample.

Sample i of a run is a pure function of (corpus, seed, i), and a step's samples are cut into *pieces* of one micro-batch
each. A rank takes every world-size-th piece: any number of ranks sees the same global batch in the same pieces, and
resuming needs nothing but the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .corpus import CorpusError

END_OF_DOCUMENT = 256  # tokens below are bytes
VOCAB_SIZE = 257
IGNORE = -1  # a target that counts in no loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One piece: B sequences of T tokens.

    Attributes:
        ids: int64 [B, T]. Padding holds END_OF_DOCUMENT.
        targets: int64 [B, T], the next token, IGNORE at padding.
        valid: bool [B, T], False at padding.
        num_tokens: how many are valid.
    """

    ids: Tensor
    targets: Tensor
    valid: Tensor
    num_tokens: int

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        ids, targets, valid = (t.to(device, non_blocking=True) for t in (self.ids, self.targets, self.valid))
        return Batch(ids=ids, targets=targets, valid=valid, num_tokens=self.num_tokens)


def encode(documents: list[bytes]) -> Tensor:
    """Tokens int16 [N]: END_OF_DOCUMENT, then each document with END_OF_DOCUMENT behind it."""
    size = 1 + sum(len(d) + 1 for d in documents)
    tokens, place = torch.full((size,), END_OF_DOCUMENT, dtype=torch.int16), 1
    for document in documents:
        if document:
            tokens[place : place + len(document)] = torch.frombuffer(bytearray(document), dtype=torch.uint8)
        place += len(document) + 1
    return tokens


def decode(tokens: list[int]) -> bytes:
    """Bytes of the tokens; document ends are left out."""
    return bytes(t for t in tokens if t < END_OF_DOCUMENT)


class TrainData:
    """Windows of the training tokens in an order that is shuffled anew each epoch.

    An epoch cuts the tokens into windows of T from a random first place, so that borders differ between epochs.

    Args:
        tokens: int16 [N] of `encode`.
        sequence_length: T.
        seed: of the order.

    Raises:
        CorpusError: fewer than T + 1 tokens.
    """

    def __init__(self, tokens: Tensor, sequence_length: int, seed: int) -> None:
        if tokens.numel() < sequence_length + 1:
            raise CorpusError(
                f"the training text has {tokens.numel()} tokens, one sequence needs sequence_length + 1 = "
                f"{sequence_length + 1}; shorten train.sequence_length or name more text in [data] path"
            )
        self.tokens, self.sequence_length, self.seed = tokens, sequence_length, seed
        self.samples_per_epoch = max(1, (tokens.numel() - sequence_length) // sequence_length)
        self._epoch: tuple[int, int, Tensor] | None = None

    def sample(self, index: int) -> Tensor:
        """int64 [T + 1], sample `index` (>= 0) of the run."""
        epoch, place = divmod(index, self.samples_per_epoch)
        first, order = self._plan(epoch)
        start = first + int(order[place]) * self.sequence_length
        return self.tokens[start : start + self.sequence_length + 1].long()

    def _plan(self, epoch: int) -> tuple[int, Tensor]:
        if self._epoch is None or self._epoch[0] != epoch:
            digest = hashlib.sha256(f"{self.seed}/{epoch}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            slack = self.tokens.numel() - 1 - self.samples_per_epoch * self.sequence_length
            bound = min(slack, self.sequence_length - 1) + 1
            first = int(torch.randint(bound, (), generator=generator))
            self._epoch = (epoch, first, torch.randperm(self.samples_per_epoch, generator=generator))
        return self._epoch[1], self._epoch[2]

    def piece(self, step: int, micro: int, *, micro_batch_size: int, accumulation: int, rank: int, world: int) -> Batch:
        """What `rank` of `world` ranks reads as micro-batch `micro` of `accumulation` in `step` (all from 0).

        The step's global batch has accumulation * world pieces; this is piece micro * world + rank.
        """
        number = (step * accumulation + micro) * world + rank
        first = number * micro_batch_size
        rows = torch.stack([self.sample(first + b) for b in range(micro_batch_size)])
        valid = torch.ones_like(rows[:, 1:], dtype=torch.bool)
        return Batch(ids=rows[:, :-1], targets=rows[:, 1:], valid=valid, num_tokens=valid.numel())


class ValidData:
    """The held-out tokens, each predicted once, in windows of T that follow each other.

    Args:
        tokens: int16 [N] of `encode`.
        sequence_length: T.

    Raises:
        CorpusError: fewer than two tokens.
    """

    def __init__(self, tokens: Tensor, sequence_length: int) -> None:
        if tokens.numel() < 2:
            raise CorpusError("the held-out text is empty; raise [data] valid_fraction")
        self.tokens, self.sequence_length = tokens, sequence_length
        self.num_sequences = -(-(tokens.numel() - 1) // sequence_length)

    def batches(self, *, micro_batch_size: int, rank: int, world: int) -> Iterator[Batch]:
        """This rank's pieces. Every rank gets equally many: what is missing at the end is padding."""
        for round_ in range(-(-self.num_sequences // (micro_batch_size * world))):
            first = (round_ * world + rank) * micro_batch_size
            yield self._piece(first, micro_batch_size)

    def _piece(self, first: int, size: int) -> Batch:
        length = self.sequence_length
        ids = torch.full((size * length,), END_OF_DOCUMENT, dtype=torch.int64)
        targets = torch.full((size * length,), IGNORE, dtype=torch.int64)
        start = min(first * length, self.tokens.numel() - 1)
        taken = self.tokens[start : start + size * length + 1].long()
        count = taken.numel() - 1
        ids[:count], targets[:count] = taken[:-1], taken[1:]
        targets = targets.view(size, length)
        return Batch(ids=ids.view(size, length), targets=targets, valid=targets != IGNORE, num_tokens=count)

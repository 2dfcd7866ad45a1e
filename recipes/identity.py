"""What a run and the checkpoint that it takes up must share.

What the weights mean: the model, and how its router weighs experts. Which data come next: text, split, order, length of
a sequence. All else may change: rate, losses, number of steps, dispatcher, ranks, precision of measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from recipes.corpus import CorpusInfo
from recipes.recipe import Recipe

_ROUTING = ("router", "normalize_weights", "routed_scale", "num_groups", "force_balance")


@dataclass(frozen=True, slots=True)
class Identity:
    """Two flat tables of plain values, keyed as a recipe spells them; `data` is None where no training follows."""

    model: dict[str, Any]
    data: dict[str, Any] | None

    def differences(self, model: Mapping[str, Any], data: Mapping[str, Any], step: int) -> list[str]:
        """Sentences on what a checkpoint of `step` has otherwise; before the first step it has seen no data."""
        pairs = [(model, self.model)]
        if self.data is not None and step > 0:
            pairs.append((data, self.data))
        return [
            f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} in this run"
            for theirs, ours in pairs
            for key in sorted(theirs.keys() | ours.keys())
            if theirs.get(key) != ours.get(key)
        ]


def identity(recipe: Recipe, corpus: CorpusInfo) -> Identity:
    """Of a run that trains."""
    model = {f"model.{key}": value for key, value in asdict(recipe.model).items()}
    if recipe.has_moe:
        model |= {f"moe.{key}": getattr(recipe.moe, key) for key in _ROUTING}
    data = {
        "train.seed": recipe.train.seed,
        "train.sequence_length": recipe.train.sequence_length,
        "data.valid_fraction": recipe.data.valid_fraction,
        "SHA-256 of the text of data.path": corpus.sha256,
    }
    return Identity(model, data)

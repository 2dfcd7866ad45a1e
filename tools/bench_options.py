"""What a benchmark is asked to measure, from the command line's strings to checked values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from moe_ep.bounds import POSITIVE
from moe_ep.config import DTYPES, nearest, require
from moe_ep.errors import RecipeError

from .bench_case import BOTH, FWD
from .floors import Rates
from .shapes import Shape, parse_shape

BASELINE = "all2all"
LEVELS, PASSES = ("stage", "layer"), (FWD, BOTH)
NOT_YET = {"stack": "a stack of layers", "step": "a training step"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure; `Options.check` refuses what does not exist. All ranks have the same.

    Attributes:
        dispatchers: names; the baseline is put first where it is not among them.
        shapes, skews, levels, passes, micro_batches, replica_slots: every combination is measured.
        experts: of layers.
        dtype: of rows and weights.
        iterations, warmup: timed and untimed ones.
        seed: of routings and inputs.
        rates: for floors; None: no floors.
    """

    dispatchers: tuple[str, ...]
    shapes: tuple[Shape, ...]
    skews: tuple[float, ...] = (1.0,)
    levels: tuple[str, ...] = ("stage",)
    passes: tuple[str, ...] = (FWD,)
    micro_batches: tuple[int, ...] = (1,)
    replica_slots: tuple[int, ...] = (0,)
    experts: str = "torch"
    dtype: torch.dtype = torch.float32
    iterations: int = 20
    warmup: int = 5
    seed: int = 0
    rates: Rates | None = None

    def check(self) -> None:
        """Refuse values that are unknown or that nothing here measures.

        Raises:
            RecipeError: one sentence with the value and what would be valid.
        """
        for level in self.levels:
            known = ", ".join(LEVELS)
            require(level not in NOT_YET, f"level {level!r} is not measured here: {NOT_YET.get(level)}; take {known}")
            require(level in LEVELS, f"level {level!r} is unknown; {nearest(level, LEVELS)}")
        for pass_ in self.passes:
            require(pass_ in PASSES, f"pass {pass_!r} is unknown; {nearest(pass_, PASSES)}")
        for count in self.micro_batches:
            require(count == 1, f"micro-batches = {count} is not measured here: no level interleaves them; take 1")
        for slots in self.replica_slots:
            require(slots == 0, f"replica-slots = {slots} is not measured here: no level copies experts; take 0")
        require(self.iterations >= 1, f"iterations must be at least 1, got {self.iterations}")
        require(self.warmup >= 1, f"warmup must be at least 1 (the first call builds things), got {self.warmup}")

    @property
    def candidates(self) -> tuple[str, ...]:
        """The baseline, then the other dispatchers in the order given, each once."""
        return tuple(dict.fromkeys((BASELINE, *self.dispatchers)))


def parse_options(chosen: argparse.Namespace, device: torch.device) -> Options:
    """Options from the command line's strings.

    Raises:
        RecipeError: a value that cannot be read.
    """
    default = "float32" if device.type == "cpu" else "bfloat16"
    dtype = chosen.dtype or default
    require(dtype in DTYPES, f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return Options(
        dispatchers=split(chosen.dispatchers, str, "--dispatchers"),
        shapes=tuple(map(parse_shape, chosen.shape)),
        skews=split(chosen.skew, float, "--skew"),
        levels=split(chosen.level, str, "--level"),
        passes=split(chosen.passes, str, "--pass"),
        micro_batches=split(chosen.micro_batches, int, "--micro-batches"),
        replica_slots=split(chosen.replica_slots, int, "--replica-slots"),
        experts=chosen.experts,
        dtype=getattr(torch, dtype),
        iterations=chosen.iterations,
        warmup=chosen.warmup,
        seed=chosen.seed,
        rates=known_rates(device) if chosen.rates is None else parse_rates(chosen.rates),
    )


def parse_rates(text: str) -> Rates:
    """The two rates of `--rates`.

    Raises:
        RecipeError: not two numbers, or one that is no rate.
    """
    try:
        link, hbm = map(float, text.split(","))
    except ValueError as err:
        raise RecipeError(f"--rates {text!r} must be LINK_GBS,HBM_TBS, such as 380,4.2") from err
    require(all(map(POSITIVE.holds, (link, hbm))), f"--rates {text!r}: each must be {POSITIVE}")
    return Rates(link_gbs=link, hbm_tbs=hbm)


def known_rates(device: torch.device) -> Rates | None:
    """The rates that were measured on this kind of GPU; None where none were."""
    return Rates() if device.type == "cuda" and "H200" in torch.cuda.get_device_name(device) else None


def split(text: str, kind: Callable[[str], T], option: str) -> tuple[T, ...]:
    """The values of a comma-separated list, each once and in order.

    Raises:
        RecipeError: one that is not of the kind, or none at all.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    require(bool(parts), f"{option} is empty")
    try:
        return tuple(dict.fromkeys(map(kind, parts)))
    except ValueError as err:
        raise RecipeError(f"{option} {text!r}: {err}") from err

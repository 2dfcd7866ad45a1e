"""What a benchmark is asked to measure, from the command line's strings to checked values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from moe_ep.bounds import POSITIVE
from moe_ep.config import Kernels
from moe_ep.config_checks import DTYPES
from moe_ep.errors import RecipeError
from moe_ep.schema import nearest, require

from .bench_candidates import Candidate, parse_candidate
from .bench_case import BOTH, FWD
from .bench_stack import parse_attention
from .floors import Rates
from .shapes import Shape, parse_shape

BASELINE = "all2all"
STACKED = ("stack", "step")
LEVELS, PASSES = ("stage", "layer", *STACKED), (FWD, BOTH)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure; `Options.check` refuses what does not exist. All ranks have the same.

    Attributes:
        dispatchers: as `parse_candidate` reads them; the baseline is put first where it is not among them.
        shapes, skews, levels, passes, micro_batches, replica_slots: every combination is measured; stages and single
            layers with one micro-batch.
        hot_experts: how many experts make the skew; None: all of one rank.
        experts: of layers.
        attention: of stacks, as `parse_attention` reads it for each shape.
        layers: of stacks.
        reserve_sms: SMs that experts of several micro-batches leave free; None: as many as the dispatcher declares.
        trace: folder for a trace of each candidate; None: none is kept.
        kernels: what moves rows on a GPU, as in a recipe.
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
    hot_experts: int | None = None
    experts: str = "torch"
    attention: str = "none"
    layers: int = 4
    reserve_sms: tuple[int | None, ...] = (None,)
    trace: Path | None = None
    kernels: Kernels = "auto"
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
            require(level in LEVELS, f"level {level!r} is unknown; {nearest(level, LEVELS)}")
        for pass_ in self.passes:
            require(pass_ in PASSES, f"pass {pass_!r} is unknown; {nearest(pass_, PASSES)}")
        require(
            self.hot_experts is None or max(self.skews) > 1,
            f"hot-experts = {self.hot_experts} would have no effect without a skew above 1; add one to --skew",
        )
        self._check_stacks()
        _ = self.candidates
        for slots in self.replica_slots:
            require(slots >= 0, f"replica-slots must not be negative, got {slots}")
        require(self.iterations >= 1, f"iterations must be at least 1, got {self.iterations}")
        require(self.warmup >= 1, f"warmup must be at least 1 (the first call builds things), got {self.warmup}")

    def _check_stacks(self) -> None:
        for count in self.micro_batches:
            require(count >= 1, f"micro-batches must be at least 1, got {count}")
        several, stacked = max(self.micro_batches) > 1, bool(set(self.levels) & set(STACKED))
        which = " or ".join(STACKED)
        require(
            not several or stacked, f"micro-batches = {max(self.micro_batches)} needs level {which}: no other splits"
        )
        require(1 <= self.layers <= 1024, f"layers must lie between 1 and 1024, got {self.layers}")
        for reserve in self.reserve_sms:
            require(reserve is None or reserve >= 0, f"reserve-sms must be auto or at least 0, got {reserve}")
        asked = [reserve for reserve in self.reserve_sms if reserve]
        require(
            not asked or (several and stacked),
            f"reserve-sms = {asked[:1]} acts where micro-batches interleave: needs level {which} and micro-batches > 1",
        )
        for shape in self.shapes if stacked else ():
            parse_attention(self.attention, shape)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The baseline, then the other candidates in the order given, each once."""
        return tuple(dict.fromkeys(map(parse_candidate, (BASELINE, *self.dispatchers))))


def for_each_experts(options: Options, names: str) -> list[Options]:
    """The options once for each of the comma-separated experts; stages have none and are measured once."""
    each = [replace(options, experts=name) for name in split(names, str, "--experts")]
    with_experts = tuple(level for level in options.levels if level != "stage")
    rest = [replace(other, levels=with_experts) for other in each[1:] if with_experts]
    return [*each[:1], *rest]


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
        hot_experts=chosen.hot_experts,
        experts=split(chosen.experts, str, "--experts")[0],
        attention=chosen.attention,
        layers=chosen.layers,
        reserve_sms=split(chosen.reserve_sms, _int_or_auto, "--reserve-sms"),
        trace=Path(chosen.trace) if chosen.trace else None,
        kernels=chosen.kernels,
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


def _int_or_auto(text: str) -> int | None:
    return None if text == "auto" else int(text)


_KINDS: dict[Any, str] = {int: "integers", float: "numbers", _int_or_auto: "integers or 'auto'"}


def split(text: str, kind: Callable[[str], T], option: str) -> tuple[T, ...]:
    """The values of a comma-separated list, each once and in order.

    Raises:
        RecipeError: one that is not of the kind, or none at all.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wanted = f"comma-separated {_KINDS.get(kind, 'names')}"
    require(bool(parts), f"{option} is empty; it takes {wanted}")
    found = []
    for part in parts:
        try:
            found.append(kind(part))
        except ValueError as err:
            raise RecipeError(f"{option} {text!r}: {part!r} is not one of the {wanted} that it takes") from err
    return tuple(dict.fromkeys(found))

"""Routing traces made up from a popularity of experts: steady, drifting or in bursts, for any number of ranks.

A text such as `drifting:R=64,E=256,K=8,T=512,skew=2` names one; keys that are left out have the values of `Synthetic`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from moe_ep.load import expert_load, imbalance, rank_load
from moe_ep.schema import from_mapping, require
from recipes.routing_trace import Step, TraceHeader

Kind = Literal["zipf", "drifting", "bursty"]
_KINDS = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """What a synthetic trace is made from.

    Attributes:
        kind: "zipf": the n-th most popular expert has popularity n^-a all the time. "drifting": popularities turn into
            those of another order within 100 micro-batches. "bursty": every tenth micro-batch begins a burst of four,
            in which one expert is sixteen times as popular as the most popular one.
        R, E, K, T: ranks, experts, top-k, tokens of a rank's micro-batch.
        layers, steps, micro_batches: each layer has popularities of its own.
        skew: rank max/mean of the first micro-batch, which sets a.
        expert_bytes: weights of one expert. row_bytes: one row of x. Both only scale what is reported.
        seed: of everything drawn.
    """

    kind: Kind = "zipf"
    R: int = 8
    E: int = 64
    K: int = 4
    T: int = 512
    layers: int = 1
    steps: int = 4
    micro_batches: int = 4
    skew: float = 2.0
    expert_bytes: int = 3 * 2048 * 768 * 2
    row_bytes: int = 2048 * 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("R", "E", "K", "T", "layers", "steps", "micro_batches"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        require(self.E % self.R == 0, f"R = {self.R} must divide E = {self.E}")
        require(self.K <= self.E, f"K = {self.K} must be at most E = {self.E}")
        most = min(self.R, self.E / self.K)
        require(1 <= self.skew < most or self.R == 1, f"skew = {self.skew} must lie in [1, {most:g}) for these sizes")


def parse(text: str) -> Synthetic:
    """`KIND` or `KIND:KEY=VALUE,...` to its parameters.

    Raises:
        RecipeError: an unknown kind or key, or a value that cannot be.
    """
    kind, _, rest = text.partition(":")
    table: dict[str, object] = {"kind": kind}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        require(bool(equals), f"trace {text!r}: {part!r} must read KEY=VALUE")
        table[key] = _number(value, float if key == "skew" else int)
    return from_mapping(Synthetic, table, f"trace {text!r}")


def _number(text: str, kind: type[int] | type[float]) -> object:
    try:
        return kind(text)
    except ValueError:
        return text  # refused by its key's type


def is_synthetic(text: str) -> bool:
    """Whether this names a synthetic trace and not a file."""
    return text.partition(":")[0] in _KINDS


def steps_of(spec: Synthetic) -> Iterator[Step]:
    """The trace, step by step."""
    base = [torch.randperm(spec.E, generator=_generator(spec, 1, layer)).add(1).log() for layer in range(spec.layers)]
    power = [find_power(spec, ranks) for ranks in base]
    for step in range(spec.steps):
        header = TraceHeader(
            step=step + 1,
            rank=0,
            replica=0,
            ranks=spec.R,
            num_experts=spec.E,
            top_k=spec.K,
            layers=spec.layers,
            micro_batches=spec.micro_batches,
            expert_bytes=spec.expert_bytes,
            row_bytes=spec.row_bytes,
            seed=spec.seed,
            commit="",
        )
        ids = torch.empty((spec.R, spec.layers, spec.micro_batches, spec.T, spec.K), dtype=torch.int32)
        for layer in range(spec.layers):
            for micro in range(spec.micro_batches):
                number = step * spec.micro_batches + micro
                logits_E = popularity(spec, -power[layer] * base[layer], layer, number)
                for rank in range(spec.R):
                    ids[rank, layer, micro] = draw(spec, logits_E, layer, number, rank)
        yield Step(header, list(ids))


def popularity(spec: Synthetic, logits_E: Tensor, layer: int, number: int) -> Tensor:
    """Log-popularity of each expert in micro-batch `number`, from that of the first one."""
    if spec.kind == "drifting":
        steps = (
            torch.arange(number + 1) / 100 * torch.pi / 2
        )  # a quarter turn towards another order in 100 micro-batches
        other = logits_E[torch.randperm(spec.E, generator=_generator(spec, 2, layer))]
        return logits_E * steps[-1].cos() + other * steps[-1].sin()
    if spec.kind == "bursty" and number % 10 < 4 and number >= 10:
        expert = int(torch.randint(spec.E, (), generator=_generator(spec, 3, layer, number // 10)))
        logits_E = logits_E.clone()
        logits_E[expert] = logits_E.amax() + math.log(16)
    return logits_E


def draw(spec: Synthetic, logits_E: Tensor, layer: int, number: int, rank: int) -> Tensor:
    """K different experts for each of T tokens: the top K of log-popularity plus Gumbel noise, int64 [T, K]."""
    noise = torch.empty((spec.T, spec.E)).exponential_(generator=_generator(spec, 4, layer, number, rank)).log()
    return (logits_E - noise).topk(spec.K).indices


def find_power(spec: Synthetic, log_rank_E: Tensor) -> float:
    """The Zipf exponent whose first micro-batch has the skew asked for, as far as one rank's tokens tell."""
    sample = dataclasses.replace(spec, T=max(spec.T, 2048))
    low, high = 0.0, 8.0
    for _ in range(16):
        power = (low + high) / 2
        load_E = expert_load(draw(sample, -power * log_rank_E, 0, 0, 0), spec.E)
        low, high = (power, high) if float(imbalance(rank_load(load_E, spec.R))) < spec.skew else (low, power)
    return high


def _generator(spec: Synthetic, *numbers: int) -> torch.Generator:
    seed = spec.seed
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % 2**61
    return torch.Generator().manual_seed(seed)

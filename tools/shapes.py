"""Sizes and routings that benchmarks run on: presets, balanced and skewed expert ids.

Every draw is a function of (seed, rank, iteration) and is made on the CPU, so that all ranks, machines and dispatchers
see the same routing and any rank can say what another one drew.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ep.load import expert_load, imbalance, rank_load
from moe_ep.routing import Routing
from moe_ep.schema import nearest, require

HOT_RANK = 0
_REST = 0.03  # popularity of the other experts of a rank with a few hot ones: far below theirs
_MAX_SOURCES = 4  # ranks whose tokens the bisection looks at; the realised skew is counted over all of them


class Shape(NamedTuple):
    """Tokens of one rank's micro-batch, hidden size, expert inner size, experts, top-k."""

    T: int
    H: int
    I: int  # noqa: E741
    E: int
    K: int


PRESETS = {
    "dsv3": Shape(4096, 7168, 2048, 64, 8),
    "qwen3": Shape(8192, 2048, 768, 128, 8),
    "mixtral": Shape(4096, 4096, 14336, 8, 2),
    "dsv3_full": Shape(4096, 7168, 2048, 256, 8),
}


def parse_shape(text: str) -> Shape:
    """A preset's name, or "T,H,I,E,K".

    Raises:
        RecipeError: neither; the message has the nearest preset.
    """
    if text in PRESETS:
        return PRESETS[text]
    parts = text.split(",")
    require(
        len(parts) == 5 and all(part.strip().isdecimal() and int(part) > 0 for part in parts),
        f"shape {text!r} is neither five positive numbers T,H,I,E,K nor a preset; {nearest(text, PRESETS)}",
    )
    shape = Shape(*map(int, parts))
    require(shape.K <= shape.E, f"shape {text!r} has K = {shape.K} > E = {shape.E}; a token visits an expert once")
    return shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The routings of one benchmark, one for each (rank, iteration).

    Attributes:
        shape: sizes; every rank has T tokens.
        num_ranks: R.
        skew: target of max/mean over ranks.
        seed: of all draws.
        strength: of the popularity that reaches the target; 0: balanced exactly.
        hot: how many experts of one rank hold what it has beyond the mean, or more, so that as many copies elsewhere
            even it out; None: all of its experts do, one more than the other.
    """

    shape: Shape
    num_ranks: int
    skew: float
    seed: int
    strength: float
    hot: int | None = None

    def ids(self, rank: int, iteration: int) -> Tensor:
        """Expert ids int64 [T, K] of one rank, without repeats in a token."""
        generator = _generator("ids", self.seed, rank, iteration)
        if self.strength == 0:
            return balanced_ids(self.shape, self.num_ranks, rank, generator)
        noise_TE = _gumbel(self.shape, generator)
        return (noise_TE + self.strength * _direction(self.shape, self.num_ranks, self.hot)).topk(self.shape.K).indices

    def routing(self, rank: int, iteration: int) -> Routing:
        """The ids with weights that sum to 1 for each token."""
        generator = _generator("weights", self.seed, rank, iteration)
        # away from 0: a lost route must show in the result
        weights = 0.1 + torch.rand(self.shape.T, self.shape.K, generator=generator)
        weights = weights / weights.sum(1, keepdim=True)
        return Routing(expert_ids=self.ids(rank, iteration), weights=weights, num_experts=self.shape.E)

    def check_load(self, load_R: Tensor) -> float:
        """Hold the load of one iteration, summed over the sources, against the target; returns max/mean.

        Balanced: ranks differ by at most one route. Skewed: five standard deviations of the draw.

        Raises:
            AssertionError: the routing is not the one that was asked for; nothing timed on it would mean anything.
        """
        realised = float(imbalance(load_R))
        if self.strength == 0:
            spread = int(load_R.max() - load_R.min())
            if spread > 1:
                raise AssertionError(f"balanced routing gives the ranks {load_R.tolist()} routes, {spread} apart")
        else:
            allowed = 2.5 * math.sqrt(self.num_ranks / (self.shape.T * self.shape.K))
            if abs(realised - self.skew) > allowed:
                raise AssertionError(f"the routing has skew {realised:.3f} instead of {self.skew} +- {allowed:.3f}")
        return realised


def make_workload(shape: Shape, num_ranks: int, skew: float, seed: int, hot: int | None = None) -> Workload:
    """A workload whose rank max/mean is `skew`; `hot`: see Workload.

    Raises:
        RecipeError: E is not divisible by R, or a skew that no routing of this shape can have.
    """
    require(
        shape.E % num_ranks == 0,
        f"E = {shape.E} is not divisible by the {num_ranks} ranks; start a number of ranks that divides {shape.E}",
    )
    # a token has at most E/R routes to one rank, since it visits an expert once
    most = min(num_ranks, shape.E / shape.K)
    require(
        1 <= skew <= most,
        f"skew {skew:g} lies outside [1, {most:g}], what {num_ranks} ranks can have with E = {shape.E}, K = {shape.K}",
    )
    _check_hot(shape, num_ranks, skew, hot)
    strength = 0.0 if skew == 1 else find_strength(shape, num_ranks, skew, seed, hot)
    return Workload(shape=shape, num_ranks=num_ranks, skew=skew, seed=seed, strength=strength, hot=hot)


def _check_hot(shape: Shape, num_ranks: int, skew: float, hot: int | None) -> None:
    if hot is None:
        return
    num_local, excess = shape.E // num_ranks, (skew - 1) / num_ranks
    require(1 <= hot <= num_local, f"hot-experts = {hot} must lie between 1 and the {num_local} experts of a rank")
    require(
        excess <= hot / shape.K,
        f"hot-experts = {hot} hold {hot / shape.K:.3f} of the routes at most (a token visits an expert once, K = "
        f"{shape.K}), and a skew of {skew:g} on {num_ranks} ranks is {excess:.3f} of them more than the mean; take "
        "more experts or a smaller skew",
    )


def balanced_ids(shape: Shape, num_ranks: int, rank: int, generator: torch.Generator) -> Tensor:
    """Random ids with equal loads: int64 [T, K], no repeats in a token.

    Slots are filled with random permutations of the E experts, one after the other, so a token's experts are a random
    K-subset (as uniform top-k draws them) while expert loads of one source differ by at most 1. The rest of less than E
    slots goes round the ranks, and the next source's rest goes on where this one's ended: with equal T on all ranks
    the *rank* loads, of each source and of all together, differ by at most 1 for every E, K and R. An even spacing of
    E // K does not do that: with more ranks than K it leaves ranks without any token (sgl-project/sglang#37741).
    """
    num_slots = shape.T * shape.K
    full, rest = divmod(num_slots, shape.E)
    blocks = torch.rand(full, shape.E, generator=generator).argsort(1).reshape(-1)
    num_local = shape.E // num_ranks
    place = torch.arange(rest)
    dest = (rank * rest + place) % num_ranks
    shuffled = torch.rand(num_ranks, num_local, generator=generator).argsort(1)
    tail = dest * num_local + shuffled[dest, place // num_ranks]
    ids_TK = torch.cat([blocks, tail]).view(shape.T, shape.K)
    return ids_TK if shape.E % shape.K == 0 else _without_repeats(ids_TK)


def _without_repeats(ids_TK: Tensor) -> Tensor:
    """Swap repeats (of tokens whose slots lie in two permutations) with other tokens; no expert's load changes."""
    ordered = ids_TK.sort(1).values
    for token in (ordered[:, 1:] == ordered[:, :-1]).any(1).nonzero().flatten().tolist():
        for k in range(1, ids_TK.shape[1]):
            if (ids_TK[token, :k] == ids_TK[token, k]).any():
                _swap(ids_TK, token, k)
    return ids_TK


def _swap(ids_TK: Tensor, token: int, k: int) -> None:
    repeat = ids_TK[token, k].clone()
    for other in (ids_TK != repeat).all(1).nonzero().flatten().tolist():
        fitting = ~torch.isin(ids_TK[other], ids_TK[token])
        if fitting.any():
            slot = int(fitting.nonzero()[0])
            ids_TK[token, k], ids_TK[other, slot] = ids_TK[other, slot].clone(), repeat
            return
    raise AssertionError(f"no token can take expert {int(repeat)} from token {token}")


def find_strength(shape: Shape, num_ranks: int, skew: float, seed: int, hot: int | None = None) -> float:
    """Bisect the popularity's strength until the hot rank's load is `skew` times the mean.

    Ids are the top K of Gumbel noise plus strength * direction, with a positive direction for the hot rank's experts
    and a negative one for all others: with the noise held, every token's routes to the hot
    rank can only grow with the strength, so bisection is valid, and every skew up to the maximum is reached.
    """
    sources = range(min(num_ranks, _MAX_SOURCES))
    noise = torch.cat([_gumbel(shape, _generator("ids", seed, rank, 0)) for rank in sources])
    direction_E = _direction(shape, num_ranks, hot)

    def hot_load(strength: float) -> float:
        ids = (noise + strength * direction_E).topk(shape.K).indices
        load_R = rank_load(expert_load(ids, shape.E), num_ranks).double()
        return float(load_R[HOT_RANK] / load_R.mean())

    low, high = 0.0, 1.0
    while hot_load(high) < skew:
        low, high = high, 2 * high
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if hot_load(middle) < skew else (low, middle)
    return high


def _direction(shape: Shape, num_ranks: int, hot: int | None) -> Tensor:
    """Popularity of the experts, float32 [E], before its strength; without `hot`, experts of one rank differ too."""
    num_local = shape.E // num_ranks
    if hot is not None:  # they fill up first; what they cannot hold goes to the rank's others
        place = (torch.arange(shape.E) - HOT_RANK * num_local).remainder(shape.E)
        return torch.where(place < hot, 1.0, torch.where(place < num_local, _REST, -_REST))
    size_E = torch.randn(shape.E, generator=_generator("direction", 0, 0, 0)).abs()
    on_hot_rank = torch.arange(shape.E) // num_local == HOT_RANK
    # not below a tenth: the least popular expert of the hot rank must gain as well
    return torch.where(on_hot_rank, 1.0, -1.0) * size_E.clamp_min(0.1)


def _gumbel(shape: Shape, generator: torch.Generator) -> Tensor:
    uniform = torch.rand(shape.T, shape.E, generator=generator).clamp_min(torch.finfo(torch.float32).tiny)
    return -(-uniform.log()).log()


def _generator(what: str, seed: int, rank: int, iteration: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{what} {seed} {rank} {iteration}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))

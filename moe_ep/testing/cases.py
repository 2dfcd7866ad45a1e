"""The cases of the dispatch contract: sizes, inputs and what is done with them, all by name.

Inputs are functions of (case, micro-batch, rank) alone, so every process can make every rank's inputs again and no
result of a dispatcher is needed to judge it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..config import DispatchConfig
from .oracle import ConstantExperts, OracleExperts, RankInput, SwiGLUExperts

INNER = 3
LAYER = 3
ABOUT_ROWS = frozenset({"float16", "float64", "odd-hidden", "odd-hidden-bfloat16", "hidden-1"})

Layout = Literal["plain", "transposed", "slice"]
Grads = Literal["all", "weights", "x", "none", "first_rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case on one number of ranks.

    Attributes:
        name: such as "uniform/R2".
        num_ranks, num_experts, top_k, hidden: R, E, K, H.
        tokens: T of each rank in micro-batch 0; other micro-batches rotate and vary them.
        routing: a key of ROUTINGS.
        experts: "swiglu", or "constant": small whole numbers and closed forms, judged with a bound of zero.
        dtype, ids_dtype: of x and of the ids.
        x_layout: how x, weights, ids and the experts' output lie in memory.
        dy_layout: "expanded" is the gradient of y.sum(), with stride 0.
        grads: what asks for a gradient; "none": forward under no_grad; "first_rank": x and weights on rank 0 only.
        driver: a key of drivers.DRIVERS.
        argument: what the driver is told.
        weights: "random" in (0, 1]; "tiny": down to 1e-4 and of many digits; for constant experts "eighths", or
            "powers" of two down to 1/64, with which rows are exact in bfloat16 while sums of them need float32.
        group: False: no process group at all (one rank).
        config: further fields of DispatchConfig, as pairs.
        exact: whether constant experts are judged with a bound of zero.
    """

    name: str
    num_ranks: int
    num_experts: int
    top_k: int
    tokens: tuple[int, ...]
    hidden: int = 8
    routing: str = "uniform"
    experts: Literal["swiglu", "constant"] = "swiglu"
    dtype: str = "float32"
    ids_dtype: str = "int64"
    x_layout: Layout = "plain"
    dy_layout: Literal["plain", "transposed", "expanded"] = "plain"
    grads: Grads = "all"
    driver: str = "repeat"
    argument: str = ""
    weights: Literal["random", "tiny", "eighths", "powers"] = "random"
    group: bool = True
    config: tuple[tuple[str, object], ...] = ()
    exact: bool = True

    @property
    def max_tokens(self) -> int:
        """Most tokens of a rank over all micro-batches, at least 1."""
        return max(*self.tokens, 1) + (0 if self.driver == "repeat" else 4)

    @property
    def num_tickets(self) -> int:
        """Most tickets in flight at once."""
        if self.driver == "schedule":
            return len({step[1] for step in self.argument.partition(" | ")[0].split()})
        return 2 if self.driver in ("source", "abandoned") else 1

    def dispatch_config(self, dispatcher: str) -> DispatchConfig:
        """The configuration of a dispatcher for this case."""
        fields: dict[str, object] = {
            "name": dispatcher,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "hidden_size": self.hidden,
            "dtype": self.dtype,
            "max_tokens": self.max_tokens,
            "num_micro_batches": self.num_tickets,
        }
        return DispatchConfig(**(fields | dict(self.config)))  # type: ignore[arg-type]

    def num_tokens(self, micro_batch: int, rank: int) -> int:
        """T of one rank: micro-batches rotate the ranks' counts and vary them by up to 4 (never where all are 0)."""
        base = self.tokens[(rank + micro_batch) % self.num_ranks]
        if micro_batch == 0 or not any(self.tokens):
            return base
        return (base + 3 * micro_batch) % (max(self.tokens) + 5)


def fitted(case: Case, dtype: str, hidden: int, options: tuple[tuple[str, object], ...] = ()) -> Case:
    """The case for a back end of one dtype and few hidden sizes: the same routing, order and misuse, other rows.

    Cases that are about a dtype or a hidden size stay as they are, so that the back end's refusal is seen. Small whole
    numbers that were exact in float32 are judged with the derived bound, since sums of them round in `dtype`.

    Args:
        case: one of CASES.
        dtype: takes the place of float32.
        hidden: takes the place of the suite's common hidden size.
        options: back-end keys, put before the case's own.
    """
    given = dict(case.config)
    own: Any = given.get("options", ())
    config = tuple(given.items()) if not options else (*(given | {"options": tuple(sorted((*options, *own)))}).items(),)
    if case.name.split("/")[0] in ABOUT_ROWS:
        return replace(case, config=config)
    wide = case.dtype == "float32"
    return replace(
        case, dtype=dtype if wide else case.dtype, hidden=hidden, config=config, exact=case.exact and not wide
    )


def make_experts(case: Case) -> OracleExperts:
    """All E experts, float64; a function of the case's sizes only."""
    if case.experts == "constant":
        return ConstantExperts()
    gen = torch.Generator().manual_seed(case.num_experts)
    shapes = (case.num_experts, 2 * INNER, case.hidden), (case.num_experts, case.hidden, INNER)
    gate_up, down = (torch.randn(s, generator=gen, dtype=torch.float64) / math.sqrt(s[2]) for s in shapes)
    return SwiGLUExperts(gate_up, down)


def make_input(case: Case, micro_batch: int, rank: int) -> RankInput:
    """One rank's x, ids, weights and the gradient at y, on the CPU."""
    gen = torch.Generator().manual_seed(1000 * micro_batch + rank)
    num_tokens, dtype = case.num_tokens(micro_batch, rank), getattr(torch, case.dtype)
    ids_TK = ROUTINGS[case.routing](case, num_tokens, rank, gen)
    shape = (num_tokens, case.hidden)
    if case.experts == "constant":
        low, high = (1, 3) if case.weights == "powers" else (-9, 10)
        x_TH, dy_TH = (torch.randint(low, high, shape, generator=gen).to(dtype) for _ in range(2))
    else:
        x_TH, dy_TH = (torch.randn(shape, generator=gen).to(dtype) for _ in range(2))
    weights_TK = _make_weights(case.weights, ids_TK.shape, gen)
    # the weight of a slot without a route is nobody's business
    weights_TK = weights_TK.masked_fill(ids_TK < 0, float("nan"))
    dy_TH = torch.ones(shape, dtype=dtype) if case.dy_layout == "expanded" else dy_TH
    return RankInput(x=x_TH, expert_ids=ids_TK.to(getattr(torch, case.ids_dtype)), weights=weights_TK, dy=dy_TH)


def _make_weights(kind: str, shape: torch.Size, gen: torch.Generator) -> Tensor:
    if kind == "eighths":
        return torch.randint(1, 9, shape, generator=gen).float() / 8
    if kind == "powers":
        return 2.0 ** -torch.randint(0, 7, shape, generator=gen).float()
    weights_TK = torch.rand(shape, generator=gen) + 0.01
    return 1e-4 + 0.1234567 * weights_TK**8 if kind == "tiny" else weights_TK


def make_inputs(case: Case, micro_batch: int) -> list[RankInput]:
    """Every rank's input of one micro-batch."""
    return [make_input(case, micro_batch, rank) for rank in range(case.num_ranks)]


def _pick(popularity_E: Tensor, num_tokens: int, top_k: int, gen: torch.Generator) -> Tensor:
    """Distinct experts per token, drawn by popularity (exponential races)."""
    race = -torch.rand(num_tokens, popularity_E.numel(), generator=gen).clamp_min(1e-7).log()
    return (race / popularity_E).argsort(dim=1)[:, :top_k]


def _uniform(case: Case, num_tokens: int, rank: int, gen: torch.Generator) -> Tensor:
    return _pick(torch.ones(case.num_experts), num_tokens, case.top_k, gen)


def _skewed(case: Case, num_tokens: int, rank: int, gen: torch.Generator) -> Tensor:
    return _pick(torch.arange(case.num_experts, 0, -1.0) ** 3, num_tokens, case.top_k, gen)


def _even_experts(case: Case, num_tokens: int, rank: int, gen: torch.Generator) -> Tensor:
    return _pick((torch.arange(case.num_experts) % 2 == 0).float(), num_tokens, case.top_k, gen)


def _last_rank(case: Case, num_tokens: int, rank: int, gen: torch.Generator) -> Tensor:
    num_local = case.num_experts // case.num_ranks
    return case.num_experts - num_local + _pick(torch.ones(num_local), num_tokens, case.top_k, gen)


def _one_expert(case: Case, num_tokens: int, rank: int, gen: torch.Generator) -> Tensor:
    return torch.full((num_tokens, case.top_k), case.num_experts - 2)


def _local_and_remote(case: Case, num_tokens: int, rank: int, gen: torch.Generator) -> Tensor:
    num_local = case.num_experts // case.num_ranks
    ranks = torch.tensor([rank, (rank + 1) % case.num_ranks])
    return ranks * num_local + torch.randint(0, num_local, (num_tokens, 2), generator=gen)


def _holes(case: Case, num_tokens: int, rank: int, gen: torch.Generator) -> Tensor:
    hole = torch.rand(num_tokens, case.top_k, generator=gen) < 0.4
    return _uniform(case, num_tokens, rank, gen).masked_fill(hole, -1)


def _padding(case: Case, num_tokens: int, rank: int, gen: torch.Generator) -> Tensor:
    """The last quarter of the tokens is padding: no route at all."""
    ids = _uniform(case, num_tokens, rank, gen)
    ids[num_tokens - num_tokens // 4 :] = -1
    return ids


def _no_routes(case: Case, num_tokens: int, rank: int, gen: torch.Generator) -> Tensor:
    return torch.full((num_tokens, case.top_k), -1)


def _no_routes_on_last_rank(case: Case, num_tokens: int, rank: int, gen: torch.Generator) -> Tensor:
    return (_no_routes if rank == case.num_ranks - 1 else _uniform)(case, num_tokens, rank, gen)


def _duplicates(case: Case, num_tokens: int, rank: int, gen: torch.Generator) -> Tensor:
    ids = torch.randint(0, min(3, case.num_experts), (num_tokens, case.top_k), generator=gen)
    ids[::3] = ids[::3, :1]  # every third token names one expert K times
    return ids


def _grouped(case: Case, num_tokens: int, rank: int, gen: torch.Generator) -> Tensor:
    """Column j names an expert of rank j, or none."""
    num_local = case.num_experts // case.num_ranks
    ids = torch.arange(case.num_ranks) * num_local + torch.randint(
        0, num_local, (num_tokens, case.num_ranks), generator=gen
    )
    return ids.masked_fill(torch.rand(ids.shape, generator=gen) < 0.2, -1)


ROUTINGS: dict[str, Callable[[Case, int, int, torch.Generator], Tensor]] = {
    "uniform": _uniform,
    "skewed": _skewed,
    "even_experts": _even_experts,
    "last_rank": _last_rank,
    "one_expert": _one_expert,
    "local_and_remote": _local_and_remote,
    "holes": _holes,
    "padding": _padding,
    "no_routes": _no_routes,
    "no_routes_on_last_rank": _no_routes_on_last_rank,
    "duplicates": _duplicates,
    "grouped": _grouped,
}

"""A dispatcher over a library against the bare library plus our permutation: what bench_deepep and bench_nccl_ep share.

Both ways run in turn on one dispatcher and its buffers, with a new routing in every iteration. Times are the slowest
rank's, median.
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import build_dispatcher
from moe_ep.routing import Routing
from recipes.ranks import Launch
from tools.bench_dispatch import join, leave
from tools.bench_setting import Place
from tools.shapes import Shape, make_workload
from tools.timing import Body, Stopwatch, percentiles, slowest_rank

WARMUP = 3
TOLERANCE = 1e-2  # relative, of y = sum_k w x with weights that sum to 1, after two roundings to bfloat16
HEADER = ("shape", *("library", "+permute", "ours", "ratio") * 2)
Row = tuple[tuple[str, ...], bool]  # cells, and whether the result was right


class Pair(ABC):
    """One dispatcher and its buffers, called both ways."""

    def __init__(self, dispatcher: Any, x_TH: Tensor, routings: list[Routing]) -> None:
        self.dispatcher, self.x, self.routings = dispatcher, x_TH, routings
        self.y = x_TH

    @abstractmethod
    def bare(self, iteration: int, watch: Stopwatch) -> None:
        """The library's calls, and the movement to expert rows and back.

        Marks "library dispatch", "bare dispatch" (with the movement), "permute combine" and "library combine".
        """

    def bodies(self) -> Sequence[Body]:
        """What is measured in turn."""
        return self.bare, self.ours

    def ours(self, iteration: int, watch: Stopwatch) -> None:
        """The six stages, with weights applied in between."""
        d, routing = self.dispatcher, self.routings[iteration]
        watch.begin()
        ticket = d.dispatch_preprocess(self.x, routing)
        d.dispatch(ticket)
        inp = d.dispatch_postprocess(ticket)
        rows = inp.rows()
        watch.mark("ours dispatch")
        y_NH = (rows * inp.row_weights[:, None]).to(rows.dtype)
        del rows
        watch.begin()
        d.combine_preprocess(ticket, y_NH)
        d.combine(ticket)
        self.y = d.combine_postprocess(ticket)
        watch.mark("ours combine")

    def error(self) -> float:
        """Relative error of the last result, whose weights sum to 1."""
        return float((self.y.float() - self.x.float()).norm() / self.x.float().norm())


MakePair = Callable[[Any, Tensor, list[Routing]], Pair]


def measure(
    config: DispatchConfig, shape: Shape, place: Place, iterations: int, make: MakePair
) -> tuple[dict[str, float], float]:
    """Median us by mark, and the relative error of the result."""
    dispatcher: Any = build_dispatcher(config, place.group)
    x_TH = torch.randn(shape.T, shape.H, device=place.device, dtype=torch.bfloat16)
    pair = make(dispatcher, x_TH, routings_of(shape, place, WARMUP + iterations))
    taken = in_turn(pair, Stopwatch(place.device, place.group), WARMUP + iterations)
    worst = slowest_rank({name: us[WARMUP:] for name, us in taken.items()}, place.group, place.device)
    error = pair.error()
    del pair  # what it has of the library goes before the library's group
    dispatcher.close()
    return {name: percentiles(us)[1] for name, us in worst.items()}, error


def in_turn(pair: Pair, watch: Stopwatch, iterations: int) -> dict[str, list[float]]:
    """Us of this rank by mark, one an iteration."""
    taken: dict[str, list[float]] = {}
    with torch.no_grad():
        for iteration in range(iterations):
            for body in pair.bodies():
                body(iteration, watch)
                for name, us in watch.take().items():
                    taken.setdefault(name, []).append(us)
    return taken


def routings_of(shape: Shape, place: Place, count: int) -> list[Routing]:
    """This rank's, on its device."""
    workload = make_workload(shape, place.num_ranks, 1.0, 0)
    made = [workload.routing(place.rank, i) for i in range(count)]
    return [
        Routing(expert_ids=r.expert_ids.to(place.device), weights=r.weights.to(place.device), num_experts=shape.E)
        for r in made
    ]


def cells(shape: Shape, times: dict[str, float]) -> tuple[str, ...]:
    """The columns of `HEADER`: dispatch, then combine."""
    dispatch = times["library dispatch"], times["bare dispatch"], times["ours dispatch"]
    bare_combine = times["library combine"] + times["permute combine"]
    combine = times["library combine"], bare_combine, times["ours combine"]
    shown = [[*(f"{us:.0f}" for us in way), f"{way[2] / way[1]:.2f}"] for way in (dispatch, combine)]
    return (f"{shape.T},{shape.H},{shape.E},{shape.K}", *shown[0], *shown[1])


def parser_of(description: str, forms: Iterable[str]) -> argparse.ArgumentParser:
    """With the options that both have."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--shape", nargs="+", default=["dsv3", "qwen3", "mixtral"], help="T,H,I,E,K or a preset")
    parser.add_argument("--forms", default=",".join(forms), help=", ".join(forms))
    parser.add_argument("--iterations", type=int, default=20)
    return parser


def run(rows_of: Callable[[Place], Iterable[Row]], header: tuple[str, ...], title: Callable[[], str]) -> int:
    """Measure on the GPUs of a torchrun and print; returns the exit status."""
    place = join(Launch.from_env())
    if place.group is None or place.device.type != "cuda":
        raise SystemExit("error: start it with torchrun, two GPUs or more")
    found = list(rows_of(place))
    leave(place)
    if place.rank == 0:
        table = [header, *(row for row, _ in found)]
        widths = [max(len(line[i]) for line in table) for i in range(len(header))]
        print(title())
        for line in table:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    return int(not all(right for _, right in found))

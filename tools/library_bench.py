"""A dispatcher over a library against the bare library plus our permutation: what bench_deepep and bench_nccl_ep share.

Both ways run in turn on one dispatcher and its buffers, with a new routing in every iteration. Times are the slowest
rank's, median. In a file of rows the bare way is a dispatcher of its own, `bare NAME`, which `bench_report.py` takes
ratios to.
"""

from __future__ import annotations

import argparse
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import build_dispatcher
from moe_ep.errors import RecipeError
from moe_ep.routing import Routing
from recipes.ranks import Launch
from tools.bench_dispatch import join, leave
from tools.bench_setting import Place
from tools.rows import Row, RowFile, machine_header, make_row
from tools.shapes import Shape, make_workload
from tools.timing import Body, Stopwatch, percentiles, slowest_rank

WARMUP = 3
TOLERANCE = 1e-2  # relative, of y = sum_k w x with weights that sum to 1, after two roundings to bfloat16
HEADER = ("shape", *("library", "+permute", "ours", "ratio") * 2)
Times = dict[str, tuple[float, float, float]]  # p10, p50, p90 by mark, us


class Line(NamedTuple):
    """One measurement: as cells of the table, whether its result was right, and as rows of a file."""

    cells: tuple[str, ...]
    right: bool
    rows: list[Row]


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


def measure(config: DispatchConfig, shape: Shape, place: Place, iterations: int, make: MakePair) -> tuple[Times, float]:
    """Percentiles by mark, "bare combine" among them, and the relative error of the result."""
    dispatcher: Any = build_dispatcher(config, place.group)
    x_TH = torch.randn(shape.T, shape.H, device=place.device, dtype=torch.bfloat16)
    pair = make(dispatcher, x_TH, routings_of(shape, place, WARMUP + iterations))
    taken = in_turn(pair, Stopwatch(place.device, place.group), WARMUP + iterations)
    taken["bare combine"] = list(map(sum, zip(taken["permute combine"], taken["library combine"], strict=True)))
    worst = slowest_rank({name: us[WARMUP:] for name, us in taken.items()}, place.group, place.device)
    error = pair.error()
    del pair  # what it has of the library goes before the library's group
    dispatcher.close()
    return {name: percentiles(us) for name, us in worst.items()}, error


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


def cells(shape: Shape, times: Times) -> tuple[str, ...]:
    """The columns of `HEADER`: dispatch, then combine."""
    ways = [[times[f"{who} {stage}"][1] for who in ("library", "bare", "ours")] for stage in ("dispatch", "combine")]
    shown = [[*(f"{us:.0f}" for us in way), f"{way[2] / way[1]:.2f}"] for way in ways]
    return (f"{shape.T},{shape.H},{shape.E},{shape.K}", *shown[0], *shown[1])


def rows_of(config: DispatchConfig, api: str, shape: Shape, num_ranks: int, times: Times, error: float) -> list[Row]:
    """Dispatch and combine, bare and ours; and a training step where one was measured."""
    task: dict[str, Any] = {
        "level": "stage", "api": api, "shape": shape._asdict(), "R": num_ranks, "skew": 1.0, "M": 1, "S": 0,
        "dtype": config.dtype, "form": "expanded", "sms": config.num_sms, "err": error,
    }  # fmt: skip
    marks = [(stage, "fwd", who, f"{who} {stage}") for stage in ("dispatch", "combine") for who in ("bare", "ours")]
    marks += [("dispatch+combine", "fwd+bwd", "ours", "train")] if "train" in times else []
    found = []
    for stage, pass_, who, mark in marks:
        name = f"bare {config.name}" if who == "bare" else config.name
        result: dict[str, Any] = {"status": "failed", "reason": f"y is off by {error:.1e} of its norm"}
        if error < TOLERANCE:
            p10, p50, p90 = (round(us, 2) for us in times[mark])
            result = {"status": "ok", "us_p10": p10, "us_p50": p50, "us_p90": p90}
        found.append(make_row(**task, stage=stage, pass_=pass_, dispatcher=name, **result))
    return found


def parser_of(description: str, forms: Iterable[str]) -> argparse.ArgumentParser:
    """With the options that both have."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--shape", nargs="+", default=["dsv3", "qwen3", "mixtral"], help="T,H,I,E,K or a preset")
    parser.add_argument("--forms", default=",".join(forms), help=", ".join(forms))
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--out", help="JSON lines: a machine header, then one object a row")
    parser.add_argument("--commit", help="of sources that were copied here without git, with -dirty where they differ")
    return parser


def run(
    lines_of: Callable[[Place], Iterable[Line]],
    header: tuple[str, ...],
    title: Callable[[], str],
    program: str,
    chosen: argparse.Namespace,
) -> int:
    """Measure on the GPUs of a torchrun and print; returns the exit status. Rows are written as they come."""
    try:
        machine = machine_header([f"tools/{program}", *sys.argv[1:]], chosen.commit)
    except RecipeError as err:
        raise SystemExit(f"error: {err}") from None
    place = join(Launch.from_env())
    if place.group is None or place.device.type != "cuda":
        raise SystemExit("error: start it with torchrun, two GPUs or more")
    out = Path(chosen.out) if chosen.out and place.rank == 0 else None
    file, found = RowFile(out, machine), list[Line]()
    for line in lines_of(place):
        found.append(line)
        file.append(line.rows)
    leave(place)
    if place.rank == 0:
        table = [header, *(line.cells for line in found)]
        widths = [max(len(shown[i]) for shown in table) for i in range(len(header))]
        print(title())
        for shown in table:
            print("  ".join(cell.rjust(width) for cell, width in zip(shown, widths, strict=True)))
    return int(not all(line.right for line in found))

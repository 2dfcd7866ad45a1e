#!/usr/bin/env python3
"""What the `nccl_ep` dispatcher costs on top of the library: its stages against the bare calls plus our permutation.

    torchrun --nproc-per-node 2 tools/bench_nccl_ep.py [--shape dsv3 qwen3 mixtral] [--forms flat] [--iterations 20]
    torchrun --nproc-per-node 2 tools/bench_nccl_ep.py --out rows.jsonl && python tools/bench_report.py rows.jsonl

Each form is measured on one group of the library, the two ways in turn, with a new routing in every iteration: bare =
the library's update, dispatch and combine, counts read on the host and buffers made where ours does, and, where flat,
the index and row movement that expert rows need; ours = the stages of the dispatcher, from x and ids to expert rows and
back. `train` is ours again with gradients: forward and backward of both. Times are the slowest rank's, median. Exit
status: 0, or 1 where a result was wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no installed package

from moe_ep.config import DispatchConfig
from moe_ep.dispatch.nccl_ep import NcclEp
from moe_ep.permute import gather_rows, sum_rows
from moe_ep.routing import Routing
from moe_ep.sorted_routes import sort_routes
from tools import library_bench
from tools.bench_options import split
from tools.bench_setting import Place
from tools.library_bench import TOLERANCE, Line
from tools.shapes import Shape, parse_shape
from tools.timing import Body, Stopwatch

FORMS: dict[str, dict[str, Any]] = {
    "expert_major": {},
    "budget": {"capacity_factor": 1.5},
    "flat": {"options": (("layout", "flat"),)},
}


class Pair(library_bench.Pair):
    """The dispatcher and its group of the library."""

    def __init__(self, dispatcher: Any, x_TH: Tensor, routings: list[Routing]) -> None:
        super().__init__(dispatcher, x_TH, routings)
        self.lease = dispatcher.engine.lease()
        self.counts = dispatcher.engine.update(self.lease, routings[0].expert_ids, "warm-up")

    def bodies(self) -> Sequence[Body]:
        """A training step, too."""
        return self.train, self.bare, self.ours

    def train(self, iteration: int, watch: Stopwatch) -> None:
        """The six stages and their backward; the experts' place is taken by the rows themselves."""
        d, given = self.dispatcher, self.routings[iteration]
        x_TH, weights = self.x.detach().requires_grad_(), given.weights.detach().requires_grad_()
        watch.begin()
        with torch.enable_grad():
            ticket = d.dispatch_preprocess(
                x_TH, Routing(expert_ids=given.expert_ids, weights=weights, num_experts=given.num_experts)
            )
            d.dispatch(ticket)
            rows = d.dispatch_postprocess(ticket).rows()
            d.combine_preprocess(ticket, rows)
            d.combine(ticket)
            y_TH = d.combine_postprocess(ticket)
        y_TH.backward(self.x)
        watch.mark("train")

    def bare(self, iteration: int, watch: Stopwatch) -> None:
        """The library's calls on a handle of the same group, and the movement to expert rows and back."""
        lib, sizes, kernels = self.dispatcher.engine.library, self.dispatcher.sizes, self.dispatcher.kernels
        routing, tensor, stream = self.routings[iteration], lib.Tensor, torch.cuda.current_stream()
        handle = self.lease.box[0]
        watch.begin()
        info = lib.LayoutInfo(expert_counters=tensor(self.counts[:-1]), recv_total_counter=tensor(self.counts[-1:]))
        handle.update(tensor(routing.expert_ids), layout_info=info, stream=stream)
        counts = self.counts.tolist() if sizes.budget is None else []
        num_rows: int = counts[-1] if counts else sizes.budget or 0
        rows = self.x.new_empty(num_rows, sizes.row)
        weights = self.x.new_empty((num_rows, sizes.top_k) if sizes.flat else (num_rows,), dtype=torch.float32)
        ids = torch.full((num_rows, sizes.top_k), -1, device=rows.device) if sizes.flat else None
        handle.dispatch(
            lib.DispatchInputs(tokens=tensor(self.x), topk_weights=tensor(routing.weights)),
            lib.DispatchOutputs(
                tokens=tensor(rows), topk_weights=tensor(weights), topk_idx=None if ids is None else tensor(ids)
            ),
            config=lib.DispatchConfig(), stream=stream,
        )  # fmt: skip
        watch.mark("library dispatch")
        moved = rows
        if ids is not None:
            routes = sort_routes(ids, sizes.num_local, kernels=kernels)
            index = routes.row_token[: sum(counts[:-1])]
            moved = gather_rows(rows, index, routes.positions, bound=routes.bound, kernels=kernels)
        watch.mark("bare dispatch")
        watch.begin()
        if ids is not None:
            rows = sum_rows(moved, index, routes.positions, bound=routes.bound, kernels=kernels)
        watch.mark("permute combine")
        watch.begin()
        y_TH = torch.empty_like(self.x)
        inputs, outputs = lib.CombineInputs(tokens=tensor(rows)), lib.CombineOutputs(tokens=tensor(y_TH))
        handle.combine(inputs, outputs, config=lib.CombineConfig(), stream=stream)
        watch.mark("library combine")


def measure(form: str, shape: Shape, place: Place, iterations: int) -> Line:
    """Both ways of one form."""
    config = DispatchConfig(
        name="nccl_ep", num_experts=shape.E, top_k=shape.K, hidden_size=shape.H, dtype="bfloat16", max_tokens=shape.T,
        **FORMS[form],
    )  # fmt: skip
    times, error = library_bench.measure(config, shape, place, iterations, Pair)
    shown = (form, *library_bench.cells(shape, times), f"{times['train'][1]:.0f}", f"{error:.1e}")
    return Line(shown, error < TOLERANCE, library_bench.rows_of(config, form, shape, place.num_ranks, times, error))


def lines_of(chosen: argparse.Namespace, place: Place) -> Iterator[Line]:
    """Every combination that was asked for."""
    for shape in map(parse_shape, chosen.shape):
        for form in split(chosen.forms, str, "--forms"):
            yield measure(form, shape, place, chosen.iterations)


def title() -> str:
    """Above the table."""
    versions = ", ".join(f"{name} {version}" for name, version in NcclEp.versions().items())
    return f"us; {versions}; dispatch in columns 3-6, combine in 7-10, train = forward and backward of both"


def main() -> int:
    """Measure and print; returns the exit status."""
    chosen = library_bench.parser_of("The nccl_ep dispatcher against the bare library.", FORMS).parse_args()
    header = ("form", *library_bench.HEADER, "train", "err")
    return library_bench.run(lambda place: lines_of(chosen, place), header, title, "bench_nccl_ep.py", chosen)


if __name__ == "__main__":
    sys.exit(main())

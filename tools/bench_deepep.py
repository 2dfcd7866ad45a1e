#!/usr/bin/env python3
"""What the `deepep` dispatcher costs on top of the library: its stages against the bare calls plus our permutation.

    torchrun --nproc-per-node 2 tools/bench_deepep.py [--shape dsv3 qwen3 mixtral] [--sms 24,48] [--iterations 20]
    torchrun --nproc-per-node 2 tools/bench_deepep.py --out rows.jsonl && python tools/bench_report.py rows.jsonl

Each form that the installed library offers is measured on one buffer, the two ways in turn, with a new routing in every
iteration: bare = layout, the library's call, and the index and row movement that expert rows need at the least, by the
same kernels as ours; ours = the stages of the dispatcher, from x and ids to expert rows and back. Times are the slowest
rank's, median. Exit status: 0, or 1 where a result was wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no installed package

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import deepep_library
from moe_ep.dispatch.deepep_rows import inverse, slot_order
from moe_ep.permute import gather_rows, sum_rows
from moe_ep.routing import Routing
from moe_ep.sorted_routes import sort_routes
from moe_ep.testing.table_deepep import FORMS
from tools import library_bench
from tools.bench_options import split
from tools.bench_setting import Place
from tools.library_bench import TOLERANCE, Line
from tools.shapes import Shape, parse_shape
from tools.timing import Stopwatch

Received = tuple[Tensor, Tensor | None, list[int], Any]  # rows, ids, counts, handle


class Pair(library_bench.Pair):
    """The dispatcher and its buffer."""

    def bare(self, iteration: int, watch: Stopwatch) -> None:
        """See the base class."""
        routing, kernels = self.routings[iteration], self.dispatcher.kernels
        link, is_first = self.dispatcher.link, self.dispatcher.api == "v1"
        watch.begin()
        source, ids, counts, handle = (bare_v1 if is_first else bare_v2)(link, self.x, routing)
        watch.mark("library dispatch")
        movement = index_v1(ids, counts, kernels) if is_first else index_v2(ids, counts, handle, kernels)
        rows = gather_rows(source, *movement, kernels=kernels)
        watch.mark("bare dispatch")
        watch.begin()
        back = sum_rows(rows, *movement, kernels=kernels)
        watch.mark("permute combine")
        watch.begin()
        if is_first:
            link.combine(back, None, handle)
        else:
            link._buffer.combine(back, handle, num_sms=handle.num_sms)
        watch.mark("library combine")


def bare_v1(link: Any, x_TH: Tensor, routing: Routing) -> Received:
    """Layout and dispatch of V1."""
    received = link.dispatch(x_TH, routing.expert_ids, routing.weights)
    return received.source, received.ids, list(received.host_counts), received.handle


def bare_v2(link: Any, x_TH: Tensor, routing: Routing) -> Received:
    """Dispatch of V2, rows left in order of arrival."""
    source, ids, _, handle, _ = link._buffer.dispatch(
        x_TH, topk_idx=routing.expert_ids, topk_weights=routing.weights, num_experts=link._num_experts,
        num_max_tokens_per_rank=link._max_tokens, num_sms=link._num_sms, do_expand=link._expand, do_handle_copy=False,
    )  # fmt: skip
    return source, ids, handle.num_recv_tokens_per_expert_list, handle


def index_v1(ids: Tensor | None, counts: list[int], kernels: bool) -> tuple[Tensor, Tensor]:
    """Received row of each expert row in order, and its transpose, without moving any row."""
    assert ids is not None, "no ids"
    routes = sort_routes(ids, len(counts), kernels=kernels)
    return routes.row_token[: sum(counts)], routes.positions


def index_v2(ids: Tensor | None, counts: list[int], handle: Any, kernels: bool) -> tuple[Tensor, Tensor]:
    """The same of rows in order of arrival."""
    metadata = handle.recv_src_metadata
    if ids is None:
        per_expert = handle.num_unaligned_recv_tokens_per_expert
        order = slot_order(metadata[:, 2:], metadata[:, 0], per_expert, sum(counts))
        return order, inverse(order).view(-1, 1)
    order = metadata[:, 0].argsort()
    row_index, in_order = index_v1(ids[order], counts, kernels)
    positions = torch.empty_like(in_order)
    positions[order] = in_order
    return order[row_index.long()].int(), positions


def measure(form: str, sms: int, shape: Shape, place: Place, iterations: int) -> Line:
    """Both ways of one form."""
    config = DispatchConfig(
        name="deepep", num_experts=shape.E, top_k=shape.K, hidden_size=shape.H, dtype="bfloat16", max_tokens=shape.T,
        num_sms=sms, options=FORMS[form],
    )  # fmt: skip
    times, error = library_bench.measure(config, shape, place, iterations, Pair)
    shown = (form, str(sms), *library_bench.cells(shape, times), f"{error:.1e}")
    api = f"{form} num_sms={sms}"
    rows = library_bench.rows_of(config, api, shape, place.num_ranks, times, error)
    return Line(shown, error < TOLERANCE, rows)


def lines_of(chosen: argparse.Namespace, place: Place) -> Iterator[Line]:
    """Every combination that the installed library offers."""
    library, why = deepep_library.load()
    if library is None:
        raise SystemExit(f"error: {why}")
    offered = deepep_library.offers(library)
    for form in FORMS:
        if dict(FORMS[form])["api"] in offered and form in split(chosen.forms, str, "--forms"):
            for sms in split(chosen.sms, int, "--sms"):
                for shape in map(parse_shape, chosen.shape):
                    yield measure(form, sms, shape, place, chosen.iterations)


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = library_bench.parser_of("The deepep dispatcher against the bare library.", FORMS)
    parser.add_argument("--sms", default="24,48", help="numbers of SMs")
    chosen = parser.parse_args()
    return library_bench.run(
        lambda place: lines_of(chosen, place),
        ("form", "SMs", *library_bench.HEADER, "err"),
        lambda: f"us; {deepep_library.distribution()}; dispatch in columns 4-7, combine in 8-11",
        "bench_deepep.py",
        chosen,
    )


if __name__ == "__main__":
    sys.exit(main())

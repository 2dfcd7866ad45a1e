#!/usr/bin/env python3
"""What the `deepep` dispatcher costs on top of the library: its stages against the bare calls plus our permutation.

    torchrun --nproc-per-node 2 tools/bench_deepep.py [--shape dsv3 qwen3 mixtral] [--sms 24,48] [--iterations 20]

Each form that the installed library offers is measured on one buffer, the two ways in turn, with a new routing in every
iteration: bare = layout, the library's call, and the index and row movement that expert rows need at the least; ours =
the stages of the dispatcher, from x and ids to expert rows and back. Times are the slowest rank's, median. Exit status:
0, or 1 where a result was wrong.
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
from moe_ep.dispatch import build_dispatcher, deepep_library
from moe_ep.dispatch.deepep import DeepEP
from moe_ep.dispatch.deepep_rows import rows_in_order, slot_order
from moe_ep.permute import gather_rows, sum_rows
from moe_ep.routing import Routing
from moe_ep.testing.table_deepep import FORMS
from recipes.ranks import Launch
from tools.bench_dispatch import join, leave
from tools.bench_options import split
from tools.bench_setting import Place
from tools.shapes import Shape, make_workload, parse_shape
from tools.timing import Stopwatch, percentiles, slowest_rank

WARMUP = 3
TOLERANCE = 1e-2  # relative, of y = sum_k w x with weights that sum to 1, after two roundings to bfloat16
HEADER = ("form", "SMs", "shape", "library", "+permute", "ours", "ratio", "library", "+permute", "ours", "ratio", "err")


class Pair:
    """One dispatcher and its buffer, called both ways."""

    def __init__(self, dispatcher: DeepEP, x_TH: Tensor, routings: list[Routing]) -> None:
        self.dispatcher, self.x, self.routings = dispatcher, x_TH, routings
        self.y = x_TH

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

    def bare(self, iteration: int, watch: Stopwatch) -> None:
        """The library's calls on the same buffer, and the movement to expert rows and back."""
        routing, link = self.routings[iteration], self.dispatcher.link
        call: Any = self.dispatcher.link
        watch.begin()
        if self.dispatcher.api == "v1":
            source, ids, counts, handle = bare_v1(call, self.x, routing)
        else:
            source, ids, counts, handle = bare_v2(call, self.x, routing)
        watch.mark("library dispatch")
        row_index, positions = index(ids, counts, handle, self.dispatcher)
        rows = gather_rows(source, row_index, positions)
        watch.mark("bare dispatch")
        watch.begin()
        back = sum_rows(rows, row_index, positions)
        watch.mark("permute combine")
        watch.begin()
        if self.dispatcher.api == "v1":
            link.combine(back, None, handle)
        else:
            call._buffer.combine(back, handle, num_sms=handle.num_sms)
        watch.mark("library combine")

    def error(self) -> float:
        """Relative error of the last result, whose weights sum to 1."""
        return float((self.y.float() - self.x.float()).norm() / self.x.float().norm())


def bare_v1(link: Any, x_TH: Tensor, routing: Routing) -> tuple[Tensor, Tensor | None, list[int], Any]:
    """Layout and dispatch of V1."""
    received = link.dispatch(x_TH, routing.expert_ids, routing.weights)
    return received.source, received.ids, list(received.host_counts), received.handle


def bare_v2(link: Any, x_TH: Tensor, routing: Routing) -> tuple[Tensor, Tensor | None, list[int], Any]:
    """Dispatch of V2, rows left in order of arrival."""
    source, ids, _, handle, _ = link._buffer.dispatch(
        x_TH, topk_idx=routing.expert_ids, topk_weights=routing.weights, num_experts=link._num_experts,
        num_max_tokens_per_rank=link._max_tokens, num_sms=link._num_sms, do_expand=link._expand, do_handle_copy=False,
    )  # fmt: skip
    return source, ids, handle.num_recv_tokens_per_expert_list, handle


def index(ids: Tensor | None, counts: list[int], handle: Any, dispatcher: DeepEP) -> tuple[Tensor, Tensor]:
    """Received row of each expert row in order, and its transpose, without moving any row."""
    num_rows = sum(counts)
    if dispatcher.api == "v1":
        assert ids is not None, "no ids"
        rows = rows_in_order(ids, len(counts), num_rows)
        return rows.row_index, rows.positions
    metadata = handle.recv_src_metadata
    if ids is None:
        per_expert = handle.num_unaligned_recv_tokens_per_expert
        order = slot_order(metadata[:, 2:], metadata[:, 0], per_expert, num_rows)
        places = torch.empty_like(order)
        places[order] = torch.arange(num_rows, device=order.device)
        return order.int(), places.int().view(-1, 1)
    order = metadata[:, 0].argsort()
    rows = rows_in_order(ids[order], len(counts), num_rows)
    positions = torch.empty_like(rows.positions)
    positions[order] = rows.positions
    return order[rows.row_index.long()].int(), positions


def measure(form: str, sms: int, shape: Shape, place: Place, iterations: int) -> tuple[tuple[str, ...], bool]:
    """A row of the table, and whether the result was right."""
    config = DispatchConfig(
        name="deepep", num_experts=shape.E, top_k=shape.K, hidden_size=shape.H, dtype="bfloat16", max_tokens=shape.T,
        num_sms=sms, options=FORMS[form],
    )  # fmt: skip
    dispatcher: Any = build_dispatcher(config, place.group)
    workload = make_workload(shape, place.num_ranks, 1.0, 0)
    routings = [workload.routing(place.rank, i) for i in range(WARMUP + iterations)]
    moved = [
        Routing(expert_ids=r.expert_ids.to(place.device), weights=r.weights.to(place.device), num_experts=shape.E)
        for r in routings
    ]
    x_TH = torch.randn(shape.T, shape.H, device=place.device, dtype=torch.bfloat16)
    pair, watch = Pair(dispatcher, x_TH, moved), Stopwatch(place.device, place.group)
    taken: dict[str, list[float]] = {}
    with torch.no_grad():
        for iteration in range(WARMUP + iterations):
            for body in (pair.bare, pair.ours):
                body(iteration, watch)
                for name, us in watch.take().items():
                    taken.setdefault(name, []).append(us)
    worst = slowest_rank({name: us[WARMUP:] for name, us in taken.items()}, place.group, place.device)
    times = {name: percentiles(us)[1] for name, us in worst.items()}
    error = pair.error()
    dispatcher.close()
    combine = times["library combine"] + times["permute combine"]
    cells = (
        *(times["library dispatch"], times["bare dispatch"], times["ours dispatch"]),
        *(times["library combine"], combine, times["ours combine"]),
    )
    d, c = cells[2] / cells[1], cells[5] / cells[4]
    shown = [f"{us:.0f}" for us in cells]
    row = (form, str(sms), f"{shape.T},{shape.H},{shape.E},{shape.K}", *shown[:3], f"{d:.2f}", *shown[3:], f"{c:.2f}")
    return (*row, f"{error:.1e}"), error < TOLERANCE


def rows_of(chosen: argparse.Namespace, place: Place) -> Iterator[tuple[tuple[str, ...], bool]]:
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
    parser = argparse.ArgumentParser(description="The deepep dispatcher against the bare library.", allow_abbrev=False)
    parser.add_argument("--shape", nargs="+", default=["dsv3", "qwen3", "mixtral"], help="T,H,I,E,K or a preset")
    parser.add_argument("--sms", default="24,48", help="numbers of SMs")
    parser.add_argument("--forms", default=",".join(FORMS), help=", ".join(FORMS))
    parser.add_argument("--iterations", type=int, default=20)
    chosen = parser.parse_args()
    place = join(Launch.from_env())
    if place.group is None:
        raise SystemExit("error: start it with torchrun, two GPUs or more")
    found = list(rows_of(chosen, place))
    leave(place)
    if place.rank == 0:
        print(f"us; {deepep_library.distribution()}; dispatch in columns 4-7, combine in 8-11")
        table = [HEADER, *(cells for cells, _ in found)]
        widths = [max(len(line[i]) for line in table) for i in range(len(HEADER))]
        for line in table:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    return int(not all(right for _, right in found))


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Time every kernel on one GPU beside the same work in plain torch and a copy of as many bytes; check it first.

    python tools/bench_kernels.py --shape dsv3 qwen3 mixtral --out tools/results/kernels-H200.jsonl
    compute-sanitizer --tool memcheck python tools/bench_kernels.py --shape 33,100,48,8,2 --iterations 1

A shape's T tokens with K routes each are what one rank sends; it receives as many rows as it sends, for E/2 experts
(two ranks). The floor is the bytes that must move (each input read once, each output written once) over the rate of
device memory. Exit status: 0 done, 1 a result was wrong, 2 arguments or a machine that cannot be measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no installed package

from moe_ep.errors import RecipeError
from moe_ep.permute import gather_rows, regroup, sort_routes, sum_rows
from tools.bench_options import known_rates, parse_rates
from tools.rows import Row, RowFile, machine_header, make_row
from tools.shapes import Shape, balanced_ids, parse_shape
from tools.timing import percentiles

KERNELS, TORCH = "kernels", "torch"
FILL_BYTES, WARMUP = 2 << 30, 3
Run = Callable[[bool], Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Work:
    """One op on one shape.

    Attributes:
        name: of the op and its place, such as "gather: dispatch".
        run: does it, with the kernels or in plain torch; both give the same bits.
        num_bytes: that must move.
        exact: what float64 says of the last output, None where there is no rounding.
    """

    name: str
    run: Run
    num_bytes: int
    exact: Callable[[], Tensor] | None = None
    wrong: list[str] = field(default_factory=list)


def works(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Work]:
    """The ops of a dispatch, a combine and their backward, on random rows."""
    T, H, _, E, K = shape
    N, generator = T * K, torch.Generator().manual_seed(T)
    ids = balanced_ids(shape, 2, 0, generator).to(device)
    x, rows = (torch.randn(n, H, generator=generator).to(device, dtype) for n in (T, N))
    weights = torch.rand(N, generator=generator).to(device)
    routes = sort_routes(ids, E)
    counts_RL = routes.counts.view(2, -1)
    order, places, _, _ = regroup(counts_RL, N)
    moved = (routes.row_token, routes.positions)
    slots = (routes.row_slot, routes.positions.view(-1, 1))
    row = H * dtype.itemsize

    def sort(kernels: bool) -> Sequence[Tensor]:
        found = sort_routes(ids, E, kernels=kernels)
        return found.row_token, found.row_slot, found.positions, found.counts, found.offsets

    def group(kernels: bool) -> Sequence[Tensor]:
        return [tensor for tensor in regroup(counts_RL, N, kernels=kernels) if tensor is not None]

    def exact_sum() -> Tensor:
        return sum_rows(rows.double(), *moved)

    found = [
        Work(name="sort_routes", run=sort, num_bytes=N * (8 + 3 * 4)),
        Work(name="regroup_rows", run=group, num_bytes=N * 2 * 4),
        Work(name="gather_rows: expand", run=lambda k: [gather_rows(x, *moved, kernels=k)], num_bytes=(T + N) * row),
        Work(
            name="sum_rows: reduce",
            run=lambda k: [sum_rows(rows, *moved, kernels=k)],
            num_bytes=(T + N) * row,
            exact=exact_sum,
        ),
        Work(
            name="gather_rows: weights",
            run=lambda k: [gather_rows(weights, *slots, kernels=k)],
            num_bytes=N * (4 + 4 + 4),
        ),
    ]
    if order is not None and places is not None:
        there = (order, places.view(-1, 1))
        found += [
            Work(
                name="gather_rows: regroup", run=lambda k: [gather_rows(rows, *there, kernels=k)], num_bytes=2 * N * row
            ),
            Work(name="sum_rows: regroup", run=lambda k: [sum_rows(rows, *there, kernels=k)], num_bytes=2 * N * row),
        ]
    return found


def check(work: Work) -> float:
    """Relative error against float64 (0 for movement); notes what differs from plain torch in a single bit."""
    ours, torchs = work.run(True), work.run(False)
    for number, (one, other) in enumerate(zip(ours, torchs, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype or not torch.equal(one, other):
            work.wrong.append(f"output {number} of {work.name} differs from plain torch")
    if work.exact is None:
        return 0.0
    exact = work.exact()
    return float((ours[-1].double() - exact).norm() / exact.norm())


def measure(work: Work, iterations: int, device: torch.device) -> dict[str, list[float]]:
    """Device microseconds of each iteration of kernels, torch and a copy of as many bytes, in turn.

    Filling memory in front of each empties the L2 cache and takes longer than the host needs to issue the work behind
    it, so that the two events have no waiting for the host between them.
    """
    copied = torch.randint(255, (max(work.num_bytes // 2, 1),), device=device, dtype=torch.uint8)
    target, filled = torch.empty_like(copied), torch.empty(FILL_BYTES, device=device, dtype=torch.uint8)
    candidates: dict[str, Callable[[], object]] = {
        KERNELS: lambda: work.run(True), TORCH: lambda: work.run(False), "copy": lambda: target.copy_(copied)
    }  # fmt: skip
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in candidates}
    for _ in range(WARMUP + iterations):
        for name, run in candidates.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            filled.fill_(1)
            start.record()
            run()
            end.record()
            events[name].append((start, end))
        torch.cuda.synchronize(device)
    return {name: [a.elapsed_time(b) * 1e3 for a, b in pairs[WARMUP:]] for name, pairs in events.items()}


def rows_of(
    work: Work, shape: Shape, dtype: str, error: float, us: dict[str, list[float]], hbm_tbs: float
) -> list[Row]:
    """One row for each candidate; the copy's says what rate plain traffic of that size has."""
    floor_us = work.num_bytes / (hbm_tbs * 1e6)
    made = []
    for name, times in us.items():
        p10, p50, p90 = percentiles(times)
        measured = {"us_p10": p10, "us_p50": p50, "us_p90": p90, "floor_us": floor_us, "ratio": p50 / floor_us}
        task = {"level": "kernel", "pass_": "fwd", "shape": shape._asdict(), "R": 2, "M": 1, "S": 0, "dtype": dtype}
        rate = work.num_bytes / p50 / 1e3
        even = {"skew": 1.0, "skew_realised": 1.0}
        made.append(
            make_row(**task, **even, **measured, dispatcher=name, api=work.name, algbw=rate, err=error, status="ok")
        )
    return made


def print_rows(shape: Shape, rows: Sequence[Row]) -> None:
    """Times, ratios to the floor and rates of one op."""
    for row in rows:
        print(
            f"{','.join(map(str, shape)):<24}{row['api']:<24}{row['dispatcher']:<9}{row['us_p50']:>9.1f} us "
            f"(p10 {row['us_p10']:.1f}, p90 {row['us_p90']:.1f})  x floor {row['ratio']:.2f}  {row['algbw']:.0f} GB/s",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Check, measure, write, print; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = _parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: torch finds no CUDA GPU here, and there is nothing to time on a CPU", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        shapes = [parse_shape(text) for text in chosen.shape]
        rates = known_rates(device) if chosen.rates is None else parse_rates(chosen.rates)
        header = machine_header(["tools/bench_kernels.py", *arguments], chosen.commit)
    except RecipeError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    if rates is None:
        print("error: the memory rate of this GPU is not known here; give --rates LINK_GBS,HBM_TBS", file=sys.stderr)
        return 2
    file = RowFile(Path(chosen.out) if chosen.out else None, header)
    wrong: list[str] = []
    for shape in shapes:
        for work in works(shape, getattr(torch, chosen.dtype), device):
            error = check(work)
            wrong += work.wrong
            us = measure(work, chosen.iterations, device)
            rows = rows_of(work, shape, chosen.dtype, error, us, rates.hbm_tbs)
            file.append(rows)
            print_rows(shape, rows)
    for sentence in wrong:
        print(f"WRONG: {sentence}", file=sys.stderr)
    return int(bool(wrong))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time the CUDA kernels beside plain torch.", allow_abbrev=False)
    add = parser.add_argument
    add("--shape", nargs="+", default=["dsv3", "qwen3", "mixtral"], help="T,H,I,E,K or a preset; several in a row")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--iterations", type=int, default=20)
    add("--rates", help="LINK_GBS,HBM_TBS of this machine; known for H200")
    add("--out", help="JSON lines: a machine header, then one object a row")
    add("--commit", help="of sources that were copied here without git, with -dirty behind it where they differ")
    return parser


if __name__ == "__main__":
    sys.exit(main())

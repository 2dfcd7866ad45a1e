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
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no installed package

from moe_ep.errors import RecipeError
from tools.bench_ops import Place, Work, works
from tools.bench_options import known_rates, parse_rates
from tools.rows import Row, RowFile, machine_header, make_row
from tools.shapes import Shape, parse_shape
from tools.timing import percentiles

KERNELS, TORCH = "kernels", "torch"
FILL_BYTES, WARMUP = 2 << 30, 3
HEAD_START_CYCLES = 4_000_000  # two milliseconds


def measure(work: Work, iterations: int, device: torch.device) -> dict[str, list[float]]:
    """Device microseconds of each iteration of kernels, torch and a copy of as many bytes, in turn.

    Filling memory in front of each empties the L2 cache; a pause behind it takes longer than a slow host needs to issue
    a backward of several ops, so that the two events have no waiting for the host between them.
    """
    filled = torch.empty(FILL_BYTES, device=device, dtype=torch.uint8)
    candidates: dict[str, Callable[[], object]] = {KERNELS: lambda: work.run(True), TORCH: lambda: work.run(False)}
    if work.num_bytes:
        copied = torch.randint(255, (max(work.num_bytes // 2, 1),), device=device, dtype=torch.uint8)
        target = torch.empty_like(copied)
        candidates["copy"] = lambda: target.copy_(copied)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in candidates}
    for _ in range(WARMUP + iterations):
        for name, run in candidates.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            filled.fill_(1)
            torch.cuda._sleep(HEAD_START_CYCLES)
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
    floor_us = work.floor_us(hbm_tbs)
    made = []
    for name, times in us.items():
        p10, p50, p90 = percentiles(times)
        measured = {"us_p10": p10, "us_p50": p50, "us_p90": p90, "floor_us": floor_us, "ratio": p50 / floor_us}
        task = {"level": "kernel", "pass_": "fwd", "shape": shape._asdict(), "R": 2, "M": 1, "S": 0, "dtype": dtype}
        rate = work.num_bytes / p50 / 1e3 if work.num_bytes else None
        even = {"skew": 1.0, "skew_realised": 1.0}
        made.append(
            make_row(**task, **even, **measured, dispatcher=name, api=work.name, algbw=rate, err=error, status="ok")
        )
    return made


def print_rows(shape: Shape, rows: Sequence[Row]) -> None:
    """Times, ratios to the floor and rates of one op."""
    for row in rows:
        rate = "" if row["algbw"] is None else f"{row['algbw']:.0f} GB/s"
        print(
            f"{','.join(map(str, shape)):<24}{row['api']:<24}{row['dispatcher']:<9}{row['us_p50']:>9.1f} us "
            f"(p10 {row['us_p10']:.1f}, p90 {row['us_p90']:.1f})  x floor {row['ratio']:.2f}  {rate}",
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
        for work in works(Place(shape, getattr(torch, chosen.dtype), device)):
            if not any(part in work.name for part in chosen.ops):
                continue
            error = work.check()
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
    add("--ops", nargs="+", default=[""], help="only those whose name holds one of these words")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--iterations", type=int, default=20)
    add("--rates", help="LINK_GBS,HBM_TBS of this machine; known for H200")
    add("--out", help="JSON lines: a machine header, then one object a row")
    add("--commit", help="of sources that were copied here without git, with -dirty behind it where they differ")
    return parser


if __name__ == "__main__":
    sys.exit(main())

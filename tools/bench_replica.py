#!/usr/bin/env python3
"""Time planning and rerouting of replicas on one GPU, and check both against the torch planner first.

    python tools/bench_replica.py --out tools/results/replica-plan-H200.jsonl

Prints the median and the spread of device time with a cold L2, the targets (70 us to plan 64 ranks and 256 experts, 40
us to reroute 8192 tokens with K = 8) and what the plan came to. Exit status: 0 done, 1 a result was wrong, 2 no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no installed package

import torch
from torch import Tensor

from moe_ep.errors import RecipeError
from moe_ep.load import expert_load
from moe_ep.replica import plan, reroute
from moe_ep.replica.device import plan_on_device, reroute_on_device
from moe_ep.routing import Routing
from tools.bench_options import known_rates, parse_rates
from tools.rows import RowFile, machine_header, make_row
from tools.synthetic_traces import Synthetic, steps_of
from tools.timing import percentiles

FLUSH_BYTES, WARMUP = 2 << 30, 3
TARGETS_US = {"plan": 70.0, "fixed_rows": 70.0, "reroute": 40.0}


def measure(run: Callable[[], object], iterations: int) -> list[float]:
    """Device microseconds of each iteration; filling memory in front empties the L2 and hides the host's calls."""
    filled = torch.empty(FLUSH_BYTES, device="cuda", dtype=torch.uint8)
    pairs = []
    for _ in range(WARMUP + iterations):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        filled.fill_(1)
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairs[WARMUP:]]


def moved_bytes(name: str, spec: Synthetic, slots: int) -> int:
    """Bytes that must move: each input read once, each output written once. The floor is these over memory's rate."""
    table, instances = spec.R * spec.E * 4, spec.R * slots * 4
    if name == "reroute":
        return 2 * spec.T * spec.K * 8 + 2 * table + instances  # ids in and out; load, quotas and instances in
    return 2 * table + instances + 2 * 8  # load in, quotas and instances out; the largest load and its bound


def case(spec: Synthetic) -> tuple[Tensor, Tensor]:
    """(load int32 [R, E], ids int64 [T, K] of rank 0) of one synthetic micro-batch."""
    (step,) = steps_of(spec)
    ids = [rank[0, 0].long() for rank in step.ids]
    return torch.stack([expert_load(rank, spec.E) for rank in ids]).int(), ids[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Check, time, print, write; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 8], help="R of the cases (default 64 8)")
    parser.add_argument("--experts", type=int, default=256, help="E of the cases (default 256)")
    parser.add_argument("--tokens", type=int, default=8192, help="T of each rank (default 8192)")
    parser.add_argument("--skews", type=float, nargs="+", default=[1.5, 2.0, 3.0], help="rank max/mean before")
    parser.add_argument("--slots", type=int, nargs="+", default=[2, 1], help="S (default 2 1)")
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--rates", help="LINK_GBS,HBM_TBS of this machine; known for H200")
    parser.add_argument("--out", help="JSON lines: a machine header, then one object a row")
    parser.add_argument("--commit", help="of sources that were copied here without git")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: torch finds no CUDA GPU here, and there is nothing to time on a CPU", file=sys.stderr)
        return 2
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        rates = known_rates(device) if chosen.rates is None else parse_rates(chosen.rates)
        header = machine_header(["tools/bench_replica.py", *arguments], chosen.commit)
    except RecipeError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    if rates is None:
        print("error: the memory rate of this GPU is not known here; give --rates LINK_GBS,HBM_TBS", file=sys.stderr)
        return 2
    file, wrong = RowFile(Path(chosen.out) if chosen.out else None, header), 0
    for ranks in chosen.ranks:
        for skew in chosen.skews:
            sizes = {"R": ranks, "E": chosen.experts, "T": chosen.tokens}
            spec = Synthetic(**sizes, K=8, steps=1, micro_batches=1, skew=skew)
            load, ids = case(spec)
            for slots in chosen.slots:
                wrong += run_case(spec, load, ids, slots, chosen.iterations, file, rates.hbm_tbs)
    return int(wrong > 0)


def run_case(
    spec: Synthetic, load: Tensor, ids: Tensor, slots: int, iterations: int, file: RowFile, hbm_tbs: float
) -> int:
    """One plan and its rerouting; returns how many results were wrong."""
    on_host, there = plan(load, slots), load.cuda()
    made = plan_on_device(there, slots)
    routing = Routing(expert_ids=ids.cuda(), weights=torch.ones(ids.shape).cuda(), num_experts=spec.E)
    moved, _ = reroute_on_device(routing, made, 0)
    here = Routing(expert_ids=ids, weights=torch.ones(ids.shape), num_experts=spec.E)
    num_local = spec.E // spec.R
    even = plan_on_device(there, num_local, 1, "fixed_rows")
    same = {
        "plan": torch.equal(made.quota.cpu(), on_host.quota),
        "fixed_rows": torch.equal(even.quota.cpu(), plan(load, num_local, 1, "fixed_rows").quota),
        "reroute": torch.equal(moved.expert_ids.cpu(), reroute(here, on_host, 0).expert_ids),
    }
    mean = float(load.sum()) / spec.R
    before = float(load.sum(0).view(spec.R, -1).sum(1).max()) / mean
    plans = {"plan": made, "fixed_rows": even, "reroute": made}
    runs = {
        "plan": lambda: plan_on_device(there, slots),
        "fixed_rows": lambda: plan_on_device(there, num_local, 1, "fixed_rows"),
        "reroute": lambda: reroute_on_device(routing, made, 0),
    }
    for name, run in runs.items():
        p10, p50, p90 = percentiles(measure(run, iterations))
        used, after = plans[name], float(plans[name].max_load) / mean
        floor_us = moved_bytes(name, spec, used.slots) / (hbm_tbs * 1e6)
        print(
            f"{name:<10} R={spec.R} E={spec.E} S={used.slots} max/mean {before:.2f} -> {after:.4f}, "
            f"{int(used.num_replicas())} replicas: {p50:.1f} us (p10 {p10:.1f}, p90 {p90:.1f}; target "
            f"{TARGETS_US[name]:g}, floor {floor_us:.2f}){'' if same[name] else '  WRONG'}",
            flush=True,
        )
        sizes = {"T": spec.T, "H": 0, "I": 0, "E": spec.E, "K": spec.K}
        times = {"us_p10": p10, "us_p50": p50, "us_p90": p90, "floor_us": floor_us, "ratio": p50 / floor_us}
        where = {"R": spec.R, "skew": spec.skew, "skew_realised": before, "M": 1, "S": used.slots, "dtype": "int32"}
        what = {"level": "kernel", "pass_": "fwd", "dispatcher": "kernels", "api": name, "shape": sizes}
        file.append([make_row(**what, **where, **times, wrong=int(not same[name]), status="ok")])
    return sum(not right for right in same.values())


if __name__ == "__main__":
    sys.exit(main())

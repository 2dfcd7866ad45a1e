#!/usr/bin/env python3
"""Time the experts of one rank on one GPU: every back end, forward and with backward, and torch's and quack's products.

    python tools/bench_experts.py --shape dsv3 qwen3 mixtral --out tools/results/experts-H200.jsonl

The rank is one of two: from 2T tokens routed evenly it computes T*K rows for E/2 experts, handed over as unique rows
with their index. Candidates take turns. The floor is the time of their matrix products at the rate of a large dense
one. Exit status: 0 done, 1 quack's results differ from torch's, 2 arguments or a machine that cannot be measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no installed package

from moe_ep import quack_gemms, quack_library
from moe_ep.config import MoEConfig
from moe_ep.errors import RecipeError
from moe_ep.expert_input import ExpertInput
from moe_ep.experts import GroupedExperts
from moe_ep.experts_registry import build_experts, find_experts
from moe_ep.grouped_mlp import grouped_swiglu
from moe_ep.permute import gather_rows, sum_rows
from moe_ep.quack_library import Library
from moe_ep.quack_mlp import quack_swiglu
from moe_ep.sms import leave_free
from moe_ep.sorted_routes import sort_routes
from tools.bench_ops import DENSE_TFLOPS
from tools.rows import RowFile, machine_header, make_row
from tools.shapes import Shape, balanced_ids, parse_shape
from tools.timing import percentiles

WARMUP = 3
BACK_ENDS = ("torch", "quack", "grouped_gemm", "te")
LIMITED = ("torch", "quack")  # whose GEMMs can leave SMs free
Runs = dict[tuple[str, str], tuple[float, Callable[[], Any]]]  # (experts, what): products of T*K*H*I, and how


class Rank:
    """Rows and weights of one rank, and the ways to compute on them."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device, num_local = shape, device, shape.E // 2
        generator = torch.Generator().manual_seed(0)
        ids = torch.cat([balanced_ids(shape, 2, rank, generator) for rank in range(2)]).to(device)
        routes = sort_routes(torch.where(ids < num_local, ids, -1), num_local)
        self.num_rows = int(routes.offsets[-1])
        self.inp = ExpertInput(
            source=self.randn(2 * shape.T, shape.H).requires_grad_(),
            row_weights=(0.1 + torch.rand(self.num_rows, device=device)).requires_grad_(),
            offsets=routes.offsets,
            tokens_per_expert=routes.counts.int(),
            capacity=self.num_rows,
            row_index=routes.row_token[: self.num_rows].clone(),
            positions=routes.positions,
            kernels=True,
        )
        self.w_gate_up = (0.02 * self.randn(num_local, 2 * shape.I, shape.H)).requires_grad_()
        self.w_down = (0.02 * self.randn(num_local, shape.H, shape.I)).requires_grad_()
        self.dy = self.randn(self.num_rows, shape.H)
        # grouped_gemm and te compute by counts on the host, which a dispatcher with messages has anyway
        self.counted = dataclasses.replace(self.inp, host_counts=tuple(routes.counts.tolist()))
        self.split: dict[str, GroupedExperts] = {}

    def randn(self, *size: int) -> Tensor:
        """bfloat16 normal numbers."""
        return torch.randn(*size, device=self.device, dtype=torch.bfloat16)

    def forward(self, experts: str) -> Tensor:
        """y of one kind of experts."""
        if experts == "torch":
            return grouped_swiglu(self.inp, self.w_gate_up, self.w_down, weight_activation=False)
        if experts == "quack":
            return quack_swiglu(self.inp, (self.w_gate_up, self.w_down), weight_activation=False)
        return self.split_experts(experts).compute_sets(self.counted, [(self.w_gate_up, self.w_down)])

    def split_experts(self, name: str) -> GroupedExperts:
        """Experts without weights of their own: drawing those on the CPU takes minutes."""
        if name not in self.split:
            shape, num_local = self.shape, self.w_down.shape[0]
            config = MoEConfig(
                hidden_size=shape.H, expert_intermediate_size=shape.I, num_experts=shape.E, top_k=shape.K,
                dtype="bfloat16", experts=name,
            )  # fmt: skip
            with torch.device("meta"):
                self.split[name] = build_experts(config, num_local, 0, 0)
        return self.split[name]

    def both(self, experts: str, reserve: int = 0) -> list[Tensor]:
        """y and every gradient."""
        leaves = [self.inp.source, self.inp.row_weights, self.w_gate_up, self.w_down]
        with leave_free(reserve):
            y = self.forward(experts)
        return [y.detach(), *torch.autograd.grad(y, leaves, self.dy)]

    def whole(self, names: Sequence[str]) -> Runs:
        """Experts as a layer calls them."""
        runs: Runs = {(name, "fwd"): (6, lambda name=name: self.forward(name)) for name in names}  # type: ignore[misc]
        for reserve in (0, 16):
            what = "fwd+bwd" + (f", {reserve} SMs left free" if reserve else "")
            able = [name for name in names if not reserve or name in LIMITED]
            runs |= {(name, what): (18, lambda name=name, r=reserve: self.both(name, r)) for name in able}  # type: ignore[misc]
        return runs

    def products(self) -> Runs:
        """Torch's grouped products alone, in the order of a forward and its backward, on rows that are there."""
        ends, inner = self.inp.offsets[1:], self.shape.I
        up, down = self.w_gate_up.detach(), self.w_down.detach()
        x, h, act, dy = (self.randn(self.num_rows, width) for width in (self.shape.H, 2 * inner, inner, self.shape.H))

        def product(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
            return lambda: F.grouped_mm(a, b, offs=ends)

        runs: dict[str, tuple[float, Callable[[], Any]]] = {
            "up, of rows": (4, product(x, up.mT)),
            "down": (2, product(act, down.mT)),
            "hidden_grad": (2, product(dy, down)),
            "row_grad": (4, product(h, up)),
            "down_grad": (2, product(dy.mT, act)),
            "gate_up_grad, of rows": (4, product(h.mT, x)),
        }
        return {("torch", name): run for name, run in runs.items()}

    def parts(self, library: Library) -> Runs:
        """Each launch of quack's experts, and what stands beside it."""
        inp, w_gate_up, w_down, dy = self.inp, self.w_gate_up.detach(), self.w_down.detach(), self.dy
        x, weights, starts, index = inp.source.detach(), inp.row_weights.detach(), inp.offsets, inp.row_index
        assert index is not None and inp.positions is not None, "unique rows"
        positions = inp.positions
        h, dh, act, y, dx = (self.randn(self.num_rows, width) for width in self._widths())
        d_gate_up, d_down = torch.empty_like(w_gate_up), torch.empty_like(w_down)

        def rows() -> Tensor:
            return gather_rows(x, index, positions, kernels=inp.kernels)

        runs: dict[str, tuple[float, Callable[[], Any]]] = {
            "up, gathering": (4, lambda: quack_gemms.up(library, x, index, w_gate_up, starts, h, act)),
            "up, of rows": (4, lambda: quack_gemms.up(library, y, None, w_gate_up, starts, h, act)),
            "down, weighted": (2, lambda: quack_gemms.down(library, act, w_down, weights, starts, y)),
            "down": (2, lambda: quack_gemms.down(library, act, w_down, None, starts, y)),
            "hidden_grad": (2, lambda: quack_gemms.hidden_grad(
                library, dy, w_down, h, weights, starts, dh=dh, act=act, need_weights=True)),
            "row_grad": (4, lambda: quack_gemms.row_grad(library, dh, w_gate_up, starts, dx)),
            "down_grad": (2, lambda: quack_gemms.down_grad(library, dy, act, starts, d_down)),
            "gate_up_grad, gathering": (4, lambda: quack_gemms.gate_up_grad(
                library, x, index, dh, starts, d_gate_up)),
            "gate_up_grad, of rows": (4, lambda: quack_gemms.gate_up_grad(library, y, None, dh, starts, d_gate_up)),
            "gather_rows": (0, rows),
            "sum_rows": (0, lambda: sum_rows(dx, index, positions, kernels=inp.kernels)),
        }  # fmt: skip
        return {("quack", name): run for name, run in runs.items()}

    def _widths(self) -> tuple[int, ...]:
        inner, hidden = self.shape.I, self.shape.H
        return 2 * inner, 2 * inner, inner, hidden, hidden


def measure(runs: Runs, iterations: int) -> dict[tuple[str, str], list[float]]:
    """Device microseconds of each iteration, in turn."""
    events: dict[tuple[str, str], list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {key: [] for key in runs}
    for _ in range(WARMUP + iterations):
        for key, (_, run) in runs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(2_000_000)  # a millisecond's head start for the host
            start.record()
            run()
            end.record()
            events[key].append((start, end))
        torch.cuda.synchronize()
    return {key: [a.elapsed_time(b) * 1e3 for a, b in pairs[WARMUP:]] for key, pairs in events.items()}


def compare(rank: Rank, names: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """Largest relative error of each one's results against torch's, and what is out of bounds."""
    what = ("y", "dx", "d_weights", "d_gate_up", "d_down")
    # both stay within 4 eps of the truth; what cancels in <dy, f> is not bounded by its own norm
    bounds = {n: (32 if n == "d_weights" else 8) * torch.finfo(torch.bfloat16).eps for n in what}
    worst, wrong = {"torch": 0.0}, []
    expected = rank.both("torch") if len(names) > 1 else []
    for name in names[1:]:
        errors = {
            n: float((a.float() - b.float()).norm() / b.float().norm())
            for n, a, b in zip(what, rank.both(name), expected, strict=True)
        }
        worst[name] = max(errors.values())
        wrong += [f"{name}: {n} differs by {e:.1e}" for n, e in errors.items() if not e <= bounds[n]]
    return worst, wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Check, measure, write, print; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = _parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: torch finds no CUDA GPU here, and there is nothing to time on a CPU", file=sys.stderr)
        return 2
    refused = {name: "; ".join(find_experts(name).machine_reasons()) for name in BACK_ENDS}
    names = [name for name, reasons in refused.items() if not reasons]
    library = quack_library.load()[0] if "quack" in names else None
    try:
        shapes = [parse_shape(text) for text in chosen.shape]
        file = RowFile(
            Path(chosen.out) if chosen.out else None,
            machine_header(["tools/bench_experts.py", *arguments], chosen.commit),
        )
    except RecipeError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    wrong = []
    for shape in shapes:
        rank = Rank(shape, torch.device("cuda", torch.cuda.current_device()))
        errors, found = compare(rank, names)
        wrong += [f"{','.join(map(str, shape))}: {sentence}" for sentence in found]
        runs = rank.whole(names) | rank.products() | ({} if library is None else rank.parts(library))
        file.append(_rows(rank, runs, measure(runs, chosen.iterations), errors))
        file.append(_refused(rank, refused))
    for sentence in wrong:
        print(f"WRONG: {sentence}", file=sys.stderr)
    return int(bool(wrong))


def _task(rank: Rank, experts: str, pass_: str) -> dict[str, Any]:
    task = {"level": "kernel", "form": "unique", "dispatcher": "none", "skew": 1.0, "skew_realised": 1.0, "R": 2}
    return task | {
        "pass_": pass_, "experts": experts, "shape": rank.shape._asdict(), "M": 1, "S": 0, "dtype": "bfloat16"
    }  # fmt: skip


def _rows(
    rank: Rank, runs: Runs, us: dict[tuple[str, str], list[float]], errors: dict[str, float]
) -> list[dict[str, Any]]:
    rows = []
    for (experts, what), times in us.items():
        p10, p50, p90 = percentiles(times)
        flops = runs[experts, what][0] * rank.num_rows * rank.shape.H * rank.shape.I
        floor = flops / (DENSE_TFLOPS * 1e6) or None
        ratio = None if floor is None else p50 / floor
        timed = {"us_p10": p10, "us_p50": p50, "us_p90": p90, "floor_us": floor, "ratio": ratio}
        task = _task(rank, experts, "fwd+bwd" if what.startswith("fwd+bwd") else "fwd")
        rows.append(make_row(**task, **timed, err=errors[experts], status="ok", api=what))
        rate = "" if floor is None else f"x floor {ratio:.2f}, {flops / p50 / 1e6:.0f} TFLOP/s"
        print(f"{','.join(map(str, rank.shape)):<24}{experts:<14}{what:<30}{p50:>9.1f} us {rate}", flush=True)
    return rows


def _refused(rank: Rank, refused: dict[str, str]) -> list[dict[str, Any]]:
    rows = []
    for name, reasons in refused.items():
        if reasons:
            rows.append(make_row(**_task(rank, name, "fwd+bwd"), status="refused", reason=reasons, api="fwd+bwd"))
            print(f"{','.join(map(str, rank.shape)):<24}{name:<14}is not measured: {reasons}", flush=True)
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time the experts of one rank.", allow_abbrev=False)
    add = parser.add_argument
    add("--shape", nargs="+", default=["dsv3", "qwen3", "mixtral"], help="T,H,I,E,K or a preset; several in a row")
    add("--iterations", type=int, default=15)
    add("--out", help="JSON lines: a machine header, then one object a row")
    add("--commit", help="of sources that were copied here without git, with -dirty behind it where they differ")
    return parser


if __name__ == "__main__":
    sys.exit(main())

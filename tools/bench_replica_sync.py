#!/usr/bin/env python3
"""Time the weight push and the gradient pull of replicas between GPUs: our kernels, and NCCL's messages beside them.

    torchrun --standalone --nproc-per-node 2 tools/bench_replica_sync.py --out tools/results/replica-sync-H200x2.jsonl

Each rank's slots hold experts of the next one, so every link carries S experts in one direction. The floor is those
bytes over the link's rate (gradients are float32). Every result is checked bit for bit first. Exit status: 0 done, 1 a
result was wrong, 2 arguments or a machine that cannot be measured, 3 a rank was lost.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no installed package

import torch
from torch import Tensor

from moe_ep.config import require
from moe_ep.errors import MoEError
from moe_ep.faults import FaultRecord
from moe_ep.replica import Plan
from moe_ep.replica.peer_transport import PeerTransport
from moe_ep.replica.transport import GroupTransport, Tensors, Transport
from recipes.ranks import ALONE, Launch
from recipes.report import report
from tools.bench_dispatch import join, leave
from tools.bench_options import known_rates, parse_rates
from tools.bench_setting import Place
from tools.rows import Row, RowFile, machine_header, make_row
from tools.timing import Stopwatch, alternate, largest, percentiles, slowest_rank

NUM_LOCAL, WARMUP = 4, 3
ELEMENT_BYTES = {"push": 2, "pull": 4}  # bfloat16 weights, float32 gradients


class Case:
    """One transport with its slots, masters and totals.

    Args:
        place: device and ranks.
        transport: to be timed.
        slots: weights [S, ...] and gradients [S, ...] that it fills and empties.
        sizes: elements of each parameter of an expert.
    """

    def __init__(
        self, place: Place, transport: Transport, slots: tuple[Tensors, Tensors], sizes: Sequence[int]
    ) -> None:
        self.place, self.transport, self.sizes = place, transport, sizes
        self.weights, self.grads = slots
        self.num_wrong = 0
        self.plan = next_rank_plan(place, len(self.weights[0]))
        self.masters = self.drawn(place.rank)
        self.totals = [torch.zeros(NUM_LOCAL, n, device=place.device) for n in sizes]

    def drawn(self, rank: int) -> list[Tensor]:
        """Masters of a rank, the same wherever they are drawn."""
        gen = torch.Generator(self.place.device).manual_seed(rank)
        return [
            torch.randn(NUM_LOCAL, n, device=self.place.device, generator=gen, dtype=torch.bfloat16) for n in self.sizes
        ]

    def run(self, _: int, watch: Stopwatch) -> None:
        """Both operations."""
        watch.begin()
        self.transport.weight_sync(self.plan, self.masters, self.weights).wait()
        watch.mark("push")
        watch.begin()
        self.transport.grad_reduce(self.plan, self.grads, self.totals).wait()
        watch.mark("pull")

    def wrong(self) -> int:
        """How many tensors one push and one pull leave wrong."""
        for slot, weight in zip(self.grads, self.drawn(self.place.rank + 100), strict=True):
            slot.copy_(weight[: len(slot)].float())
        for total in self.totals:
            total.fill_(1)
        self.transport.weight_sync(self.plan, self.masters, self.weights).wait()
        self.transport.grad_reduce(self.plan, self.grads, self.totals).wait()
        num, before = len(self.weights[0]), (self.place.rank - 1) % self.place.num_ranks
        theirs, given = self.drawn((self.place.rank + 1) % self.place.num_ranks), self.drawn(before + 100)
        wrong = sum(not torch.equal(slot, master[:num]) for slot, master in zip(self.weights, theirs, strict=True))
        wrong += sum(bool(slot.any()) for slot in self.grads)
        for total, grads in zip(self.totals, given, strict=True):
            want = torch.ones_like(total)
            want[:num] += grads[:num].float()
            wrong += not torch.equal(total, want)
        return wrong


def next_rank_plan(place: Place, slots: int) -> Plan:
    """Slot s of every rank holds expert s of the next one; rows do not matter here."""
    ranks, experts = place.num_ranks, place.num_ranks * NUM_LOCAL
    filled = [[(r + 1) % ranks * NUM_LOCAL + s for s in range(slots)] for r in range(ranks)]
    zeros = torch.zeros(ranks, experts, dtype=torch.int32, device=place.device)
    return Plan(
        load=zeros,
        quota=zeros.t().contiguous(),
        instances=torch.tensor(filled, dtype=torch.int32, device=place.device),
        max_load=zeros.sum(),
        exact=torch.tensor(False),
    )


def make_cases(place: Place, chosen: argparse.Namespace, slots: int) -> dict[str, Case]:
    """Our kernels with each number of thread blocks, and messages where asked for. Collective."""
    assert place.group is not None, "replicas need other ranks"
    sizes = (2 * chosen.intermediate * chosen.hidden, chosen.intermediate * chosen.hidden)
    like = [torch.empty(NUM_LOCAL, n, device=place.device, dtype=torch.bfloat16) for n in sizes]
    cases = {}
    for number in chosen.blocks:
        record = FaultRecord(place.device, place.num_ranks * NUM_LOCAL)
        transport = PeerTransport(place.group, slots, like, record, blocks=number)
        cases[f"kernels, {number} blocks"] = Case(
            place, transport, (transport.buffers.weights, transport.buffers.grads), sizes
        )
    if chosen.messages:
        own = (
            [torch.zeros(slots, n, device=place.device, dtype=torch.bfloat16) for n in sizes],
            [torch.zeros(slots, n, device=place.device) for n in sizes],
        )
        cases["messages"] = Case(place, GroupTransport(place.group), own, sizes)
    return cases


def measure(place: Place, cases: dict[str, Case], iterations: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds of the slowest rank, by case and operation."""
    series = alternate(
        {name: case.run for name, case in cases.items()},
        range(WARMUP + iterations),
        Stopwatch(place.device, place.group),
        before_each=lambda _: None,
        after_last=lambda _: None,
    )
    found = {name: slowest_rank(one.us, place.group, place.device) for name, one in series.items()}
    return {name: {op: times[WARMUP:] for op, times in us.items()} for name, us in found.items()}


def row_of(place: Place, chosen: argparse.Namespace, name: str, case: Case, operation: str, us: Sequence[float]) -> Row:
    """One result, its floor the bytes of a link over its rate."""
    slots, rates = len(case.weights[0]), chosen.rates
    num_bytes = slots * sum(case.sizes) * ELEMENT_BYTES[operation]
    p10, p50, p90 = percentiles(us)
    floor_us = num_bytes / (rates.link_gbs * 1e3)
    shape = {"T": 0, "H": chosen.hidden, "I": chosen.intermediate, "E": NUM_LOCAL * place.num_ranks, "K": 0}
    what = {"level": "kernel", "pass_": "fwd", "api": f"replica {operation}", "dispatcher": name, "shape": shape}
    where = {"R": place.num_ranks, "skew": 1.0, "M": 1, "S": slots, "dtype": "bfloat16", "algbw": num_bytes / p50 / 1e3}
    times = {"us_p10": p10, "us_p50": p50, "us_p90": p90, "floor_us": floor_us, "ratio": p50 / floor_us}
    return make_row(**what, **where, **times, wrong=case.num_wrong, status="ok")


def check(place: Place, cases: dict[str, Case]) -> int:
    """Count what is wrong on any rank, noted with each case; returns the sum."""
    for case in cases.values():
        case.num_wrong += int(largest(torch.tensor([case.wrong()]), place.group, place.device))
    return sum(case.num_wrong for case in cases.values())


def run(place: Place, chosen: argparse.Namespace, file: RowFile) -> int:
    """Check, time, check again, print, write; returns how many tensors were wrong on any rank."""
    wrong = 0
    for slots in chosen.slots:
        cases = make_cases(place, chosen, slots)
        before = check(place, cases)
        found = measure(place, cases, chosen.iterations)
        wrong += before + check(place, cases)
        for name, times in found.items():
            for operation in ELEMENT_BYTES:
                row = row_of(place, chosen, name, cases[name], operation, times[operation])
                file.append([row])
                if place.rank == 0:
                    print(
                        f"S={slots} {operation} {name:<20}{row['us_p50']:>9.1f} us (p10 {row['us_p10']:.1f}, p90 "
                        f"{row['us_p90']:.1f})  {row['algbw']:.0f} GB/s, {1 / row['ratio']:.0%} of the link"
                        f"{'  WRONG' if row['wrong'] else ''}",
                        flush=True,
                    )
        for case in cases.values():
            if isinstance(case.transport, PeerTransport):
                case.transport.close()
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096, help="H of an expert (default 4096)")
    parser.add_argument("--intermediate", type=int, default=1536, help="I of an expert (default 1536: 36 MiB)")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2], help="experts that each rank pushes, up to 4")
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 32, 64, 264], help="thread blocks of a launch")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--messages", action="store_true", help="NCCL's messages, too")
    parser.add_argument("--rates", help="LINK_GBS,HBM_TBS of this machine; known for H200")
    parser.add_argument("--out", help="JSON lines: a machine header, then one object a row")
    parser.add_argument("--commit", help="of sources that were copied here without git")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available() or not all(1 <= slots <= NUM_LOCAL for slots in chosen.slots):
        print(f"error: this needs GPUs, and 1 to {NUM_LOCAL} slots", file=sys.stderr)
        return 2
    launch = ALONE
    try:
        launch = Launch.from_env()
        place = join(launch)
        require(place.num_ranks > 1, "one rank has nobody to push to; start torchrun --nproc-per-node 2")
        chosen.rates = known_rates(place.device) if chosen.rates is None else parse_rates(chosen.rates)
        require(chosen.rates is not None, "the link of this GPU is not known here; give --rates LINK_GBS,HBM_TBS")
        header = machine_header(["tools/bench_replica_sync.py", *arguments], chosen.commit)
        status = int(
            run(place, chosen, RowFile(Path(chosen.out) if chosen.out and place.rank == 0 else None, header)) > 0
        )
    except MoEError as err:
        return report(err, launch)
    leave(place)
    return status


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Time the weight push and the gradient pull of replicas between GPUs: kernels, NCCL's messages, copies beside them.

    torchrun --standalone --nproc-per-node 2 tools/bench_replica_sync.py --out tools/results/replica-sync-H200x2.jsonl

Each rank's slots hold experts of the next one, so every link carries S experts in one direction. In turn with push and
pull the same bytes (gradients are float32) are copied the same way by cudaMemcpyAsync. That time is the floor, so the
share that is printed, 1 / ratio, is of the peer-to-peer copy's rate in this very run. Every result is checked bit for
bit first. Exit status: 0 done, 1 a result was wrong, 2 arguments or a machine that cannot be measured, 3 a rank was
lost.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no installed package

import torch

from moe_ep.errors import MoEError
from moe_ep.faults import FaultRecord
from moe_ep.replica.messages import GroupTransport
from moe_ep.replica.peer_transport import PeerTransport
from moe_ep.schema import require
from recipes.ranks import ALONE, Launch
from recipes.report import report
from tools.bench_dispatch import join, leave
from tools.bench_setting import Place
from tools.bench_sync_cases import ELEMENT_BYTES, NUM_LOCAL, SyncCase, TransportCase, copy_case
from tools.replica_lines import sync_lines
from tools.rows import Row, RowFile, machine_header, make_row
from tools.timing import Stopwatch, alternate, largest, percentiles, slowest_rank

WARMUP = 3
COPY = "copy"


def make_cases(place: Place, chosen: argparse.Namespace, slots: int) -> dict[str, SyncCase]:
    """Copies, our kernels with each number of thread blocks, and messages where asked for. Collective."""
    assert place.group is not None, "replicas need other ranks"
    sizes = (2 * chosen.intermediate * chosen.hidden, chosen.intermediate * chosen.hidden)
    like = [torch.empty(NUM_LOCAL, n, device=place.device, dtype=torch.bfloat16) for n in sizes]
    cases: dict[str, SyncCase] = {COPY: copy_case(place, slots, sizes)}
    for number in chosen.blocks:
        record = FaultRecord(place.device, place.num_ranks * NUM_LOCAL)
        transport = PeerTransport(place.group, slots, like, record, blocks=number)
        buffers = transport.buffers
        cases[f"kernels, {number} blocks"] = TransportCase(place, transport, (buffers.weights, buffers.grads), True)
    if chosen.messages:
        own = (
            [torch.zeros(slots, n, device=place.device, dtype=torch.bfloat16) for n in sizes],
            [torch.zeros(slots, n, device=place.device) for n in sizes],
        )
        cases["messages"] = TransportCase(place, GroupTransport(place.group), own)
    return cases


def measure(place: Place, cases: dict[str, SyncCase], iterations: int) -> dict[str, dict[str, list[float]]]:
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


def row_of(
    place: Place, chosen: argparse.Namespace, name: str, case: SyncCase, operation: str, us: dict[str, list[float]]
) -> Row:
    """One result. `us`: of the operation, by case; the copy's median is the floor of the others."""
    num_bytes = case.slots * sum(case.sizes) * ELEMENT_BYTES[operation]
    p10, p50, p90 = percentiles(us[name])
    floor_us = None if name == COPY else percentiles(us[COPY])[1]
    shape = {"T": 0, "H": chosen.hidden, "I": chosen.intermediate, "E": NUM_LOCAL * place.num_ranks, "K": 0}
    what = {"level": "kernel", "pass_": "fwd", "api": f"replica {operation}", "dispatcher": name, "shape": shape}
    where = {"R": place.num_ranks, "skew": 1.0, "M": 1, "S": case.slots, "dtype": "bfloat16"}
    times = {"us_p10": p10, "us_p50": p50, "us_p90": p90, "floor_us": floor_us, "algbw": num_bytes / p50 / 1e3}
    ratio = None if floor_us is None else p50 / floor_us
    return make_row(**what, **where, **times, ratio=ratio, wrong=case.num_wrong, status="ok")


def check(place: Place, cases: dict[str, SyncCase]) -> int:
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
        for operation in ELEMENT_BYTES:
            us = {name: times[operation] for name, times in found.items()}
            rows = [row_of(place, chosen, name, case, operation, us) for name, case in cases.items()]
            file.append(rows)
            for line in sync_lines(rows) if place.rank == 0 else ():
                print(line, flush=True)
        for case in cases.values():
            case.close()
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

#!/usr/bin/env python3
"""Compare dispatchers: their stages alone, or one whole MoE layer. Every run includes all2all, in turn with the others.

    python tools/bench_dispatch.py --shape 64,32,48,8,2                         one rank, no process group
    torchrun --nproc-per-node 4 tools/bench_dispatch.py --dispatchers agrs --shape 64,32,48,8,2 --pass fwd,fwd+bwd
    torchrun --nproc-per-node 2 tools/bench_dispatch.py --shape dsv3 qwen3 mixtral --skew 1,1.5 --level stage,layer \
        --out tools/results/dispatch-H200x2.jsonl
    torchrun --nproc-per-node 2 tools/bench_dispatch.py --level layer,stage --pass fwd+bwd --skew 1,1.7 \
        --replica-slots 0,2
    torchrun --nproc-per-node 2 tools/bench_dispatch.py --dispatchers direct:capacity_factor=1.2:expand=true,direct

With slots for copies of hot experts (S) layers, stacks and steps make them, for each micro-batch and, where several
interleave, for all of them together; as stages stand what makes them, alone and by how much a layer's time grows.
The ranks of the launch are the expert-parallel group. With GPUs each rank takes one and uses NCCL and bfloat16, without
them gloo and float32: those times say that everything works, not how fast it is. Exit status: 0 done, 1 a result was
wrong (with --strict: any row is not ok) or --out cannot be written, 2 arguments that cannot be measured, 3 another rank
was lost or never came.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no installed package

from moe_ep.config_checks import DTYPES
from moe_ep.dispatch import close_dispatchers
from moe_ep.errors import MoEError, RecipeError
from moe_ep.peers import is_lost_peer
from moe_ep.schema import require
from recipes.lost_peer import absent
from recipes.ranks import ALONE, Launch
from recipes.report import report, say_agreed, say_once
from tools.bench_options import BASELINE, LEVELS, for_each_experts, parse_options
from tools.bench_run import WrongWork, run
from tools.bench_setting import Place
from tools.bench_table import print_table
from tools.rows import Row, RowFile, machine_header
from tools.shapes import PRESETS

TIMEOUT_S = 120  # of one collective: a rank that is lost ends the run


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, print; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = _parser().parse_args(arguments)
    launch = ALONE
    try:
        launch = Launch.from_env()
        place = join(launch, chosen.nccl_ctas)
    except MoEError as err:
        return report(err, launch)
    try:
        status = _measure(chosen, arguments, place)
    except RecipeError as err:  # all ranks have the same arguments; any other error ends the process, group and all
        say_once(launch, f"error: {err}")
        status = 2
    except WrongWork as err:  # on every rank alike
        say_agreed(launch, f"error: {err}")
        status = 1
    except (OSError, RuntimeError) as err:
        if isinstance(err, OSError) and chosen.out and place.rank == 0:
            print(f"error: {chosen.out}: {err.strerror or err}; free space or choose another --out", file=sys.stderr)
            return 1
        if is_lost_peer(err):
            return report(err, launch)
        raise
    leave(place)
    return status


def _measure(chosen: argparse.Namespace, arguments: Sequence[str], place: Place) -> int:
    options = parse_options(chosen, place.device)
    options.check()
    first = place.rank == 0
    header = machine_header(["tools/bench_dispatch.py", *arguments], chosen.commit)  # may refuse, on every rank alike
    file = RowFile(Path(chosen.out) if chosen.out and first else None, header)
    rows: list[Row] = []

    def emit(new: Sequence[Row]) -> None:
        rows.extend(new)
        file.append(new)

    try:
        for each in for_each_experts(options, chosen.experts):
            run(each, place, emit)
    finally:
        if first:
            print_table(header, rows, on_cpu=place.device.type == "cpu")
    bad = {row["status"] for row in rows} - {"ok"}
    return int("failed" in bad or (chosen.strict and bool(bad)))


def join(launch: Launch, nccl_ctas: int | None = None) -> Place:
    """The group that torchrun announces in the environment, or one rank without any.

    Raises:
        RecipeError: a number of thread blocks where NCCL is not used, or that it cannot have.
        PeerError: not all ranks came in time.
        Unavailable: the launcher's port is taken.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if nccl_ctas is not None:
        require(cuda and "RANK" in os.environ, f"--nccl-ctas {nccl_ctas} limits NCCL, and this run has no use for NCCL")
        require(1 <= nccl_ctas <= 64, f"--nccl-ctas must lie between 1 and 64, got {nccl_ctas}")
    if "RANK" not in os.environ:
        return Place(device=device, group=None, rank=0, num_ranks=1)
    timeout = timedelta(seconds=TIMEOUT_S)
    try:
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            timeout=timeout,
            device_id=device if cuda else None,
            pg_options=_nccl_options(nccl_ctas),
        )
    except (dist.DistStoreError, dist.DistNetworkError) as err:
        raise absent(err, launch, TIMEOUT_S, "the benchmark's limit") from err
    return Place(device=device, group=dist.group.WORLD, rank=dist.get_rank(), num_ranks=dist.get_world_size())


def _nccl_options(ctas: int | None) -> Any:
    if ctas is None:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = ctas
    return options


def leave(place: Place) -> None:
    """Close the dispatchers, then the group."""
    close_dispatchers(place.group)
    if place.group is not None:
        dist.destroy_process_group()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compare dispatchers, by stages or in one layer. Lists are comma-separated.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--dispatchers", default=BASELINE, help=f"NAME or NAME:KEY=VALUE:KEY=VALUE; {BASELINE} is always measured too")
    add("--shape", nargs="+", default=["dsv3"], help=f"T,H,I,E,K or one of {', '.join(PRESETS)}; several in a row")
    add("--skew", default="1", help="rank max/mean, 1 (even) to the number of ranks")
    add("--hot-experts", type=int, help="how many experts of one rank make the skew; all, one more than another")
    add("--level", default="stage", help=", ".join(LEVELS))
    add("--pass", dest="passes", default="fwd", help="fwd, fwd+bwd")
    add("--experts", default="torch", help="experts of layers and stacks, one after the other")
    add("--micro-batches", default="1", help="M of stacks and steps, T tokens each: M of them interleaved, and in turn")
    add("--attention", default="none", help="of stacks and steps: none, gqa or gqa:HEADS,KV_HEADS,HEAD_DIM,LENGTH")
    add("--layers", type=int, default=4, help="of stacks and steps")
    add("--reserve-sms", default="auto", help="SMs that experts leave to communication beside them, where M > 1")
    add("--nccl-ctas", type=int, help="thread blocks of a collective of NCCL, which decides itself otherwise")
    add("--trace", metavar="DIR", help="keep a trace of one iteration of each candidate, one file a rank")
    add("--kernels", default="auto", choices=("auto", "cuda", "torch"), help="what moves rows on GPUs")
    add("--replica-slots", default="0", help="S copies of hot experts that a rank can hold; 0: none")
    add("--dtype", help=f"{', '.join(DTYPES)}; default bfloat16 on GPUs, float32 on CPU")
    add("--iterations", type=int, default=20, help="timed ones, each with a new routing")
    add("--warmup", type=int, default=5)
    add("--seed", type=int, default=0)
    add("--rates", help="LINK_GBS,HBM_TBS of this machine, for floors; known for H200 (380,4.2), else no floor")
    add("--out", help="JSON lines: a machine header, then one object a row")
    add("--commit", help="of sources that were copied here without git, with -dirty behind it where they differ")
    add("--strict", action="store_true", help="exit 1 when any row is not ok")
    return parser


if __name__ == "__main__":
    sys.exit(record(main)())  # so that torchrun shows the first failed rank's traceback, last of all it prints

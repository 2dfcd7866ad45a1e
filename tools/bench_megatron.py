#!/usr/bin/env python3
"""One Megatron-Core MoE layer, forward and backward: on its own dispatchers and on ours, in turns, in one run.

    torchrun --standalone --nproc-per-node 2 tools/bench_megatron.py --out tools/results/megatron-H200x2.jsonl
    torchrun --standalone --nproc-per-node 2 tools/bench_megatron.py --shape qwen3 --dispatchers direct:num_sms=8

Experts are Transformer Engine's grouped GEMMs in bfloat16. Routing is new in every iteration, the same for all and even
(--skew 1) or not; parameters are shared by all candidates. Results are held to those of Megatron's alltoall, whose rows
are `megatron dispatcher=alltoall`, and ratios are to its time; the slower rank of each iteration counts. A candidate
that cannot run has a row that says why. Exit status: 0 done, 1 a result was wrong, 2 arguments that cannot be measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no installed package

from moe_ep import close_dispatchers
from moe_ep.errors import MoEError, RecipeError
from moe_ep.integrations.megatron_limits import megatron_version
from moe_ep.schema import require
from recipes.ranks import ALONE, Launch
from recipes.report import report, say_once
from tools.bench_candidates import Candidate, parse_candidate
from tools.bench_dispatch import join, leave
from tools.bench_options import BASELINE, split
from tools.bench_setting import Place, Problem, Setting, make_setting
from tools.megatron_layers import FLEX, LAYER, NATIVE, MegatronCase, attempt, differing, layers_of
from tools.rows import Row, RowFile, dtype_name, machine_header, make_row
from tools.shapes import PRESETS, make_workload, parse_shape
from tools.timing import Series, Stopwatch, alternate, largest, percentiles, slowest_rank

OURS = "all2all,agrs,direct,deepep,nccl_ep"
Emit = Callable[[Sequence[Row]], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, print; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = _parser().parse_args(arguments)
    launch = ALONE
    try:
        launch = Launch.from_env()
        require(torch.cuda.is_available(), "Megatron-Core's MoE layer needs a CUDA GPU, and torch finds none here")
        version = megatron_version()
        place = join(launch)
        require(place.group is not None, "Megatron-Core needs a process group: launch with torchrun")
    except MoEError as err:
        return report(err, launch)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(expert_model_parallel_size=place.num_ranks)
    model_parallel_cuda_manual_seed(1)
    say_once(launch, f"Megatron-Core {version}")
    try:
        status = measure(chosen, arguments, place)
    except RecipeError as err:  # all ranks have the same arguments
        say_once(launch, f"error: {err}")
        status = 2
    parallel_state.destroy_model_parallel()
    leave(place)
    return status


def measure(chosen: argparse.Namespace, arguments: Sequence[str], place: Place) -> int:
    """Every shape and skew; rows go to the file as soon as they are there. Megatron's process groups are made already.

    Raises:
        RecipeError: arguments that cannot be measured.
    """
    names = tuple(map(parse_candidate, (BASELINE, *split(chosen.dispatchers, str, "--dispatchers"))))
    candidates = tuple(dict.fromkeys((NATIVE, FLEX, *names)))
    shapes, skews = tuple(map(parse_shape, chosen.shape)), split(chosen.skew, float, "--skew")
    require(chosen.iterations >= 1 and chosen.warmup >= 1, "iterations and warmup must be at least 1")
    header = machine_header(["tools/bench_megatron.py", *arguments], chosen.commit)
    first, rows = place.rank == 0, list[Row]()
    file = RowFile(Path(chosen.out) if chosen.out and first else None, header)
    dtype = torch.bfloat16 if place.device.type == "cuda" else torch.float32
    for shape in shapes:
        for skew in skews:
            workload = make_workload(shape, place.num_ranks, skew, chosen.seed)
            setting = make_setting(workload, place, dtype, chosen.warmup + chosen.iterations)
            new = compare(setting, candidates, chosen.warmup)
            rows += new
            file.append(new)
            if first:
                print("\n".join(table(new)), flush=True)
    return int(any(row["status"] == "failed" for row in rows))


def compare(setting: Setting, candidates: Sequence[Candidate], warmup: int) -> list[Row]:
    """One row for each candidate. Collective."""
    from megatron.core import parallel_state

    place = setting.place
    watch = Stopwatch(place.device, place.group)
    cases, lost = layers_of(setting, candidates)
    cases = [case for case in cases if _warmed_up(case, warmup, watch, lost)]
    by_name = {case.candidate: case for case in cases}
    kept: dict[Candidate, Any] = {}
    found: dict[Candidate, tuple[float, str]] = {}

    def look(name: Candidate) -> None:
        results = by_name[name].results()
        kept.setdefault(cases[0].candidate, results)  # Megatron's alltoall, where it runs
        found[name] = differing(results, kept[cases[0].candidate], setting)

    timed = range(warmup, len(setting.routings))
    runs = {name: case.run for name, case in by_name.items()}
    series = alternate(runs, timed, watch, before_each=lambda name: by_name[name].clear(), after_last=look)
    rows = [_row(setting, name, _problem(name, lost, found, setting), series, found) for name in candidates]
    for case in cases:
        case.clear()
    close_dispatchers(parallel_state.get_expert_model_parallel_group())
    close_dispatchers(None)
    if place.device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def _warmed_up(case: MegatronCase, warmup: int, watch: Stopwatch, lost: dict[Candidate, Problem]) -> bool:
    for iteration in range(warmup):
        case.clear()
        _, problem = attempt(lambda i=iteration: case.run(i, watch), case.setting)  # type: ignore[misc]
        watch.take()
        if problem is not None:
            lost[case.candidate] = problem
            return False
    case.clear()
    return True


def _problem(
    name: Candidate, lost: dict[Candidate, Problem], found: dict[Candidate, tuple[float, str]], setting: Setting
) -> Problem | None:
    """Why a candidate has no time; the same on every rank. Collective where it ran."""
    if name in lost:
        return lost[name]
    _, problem = attempt(lambda: require(not found[name][1], found[name][1]), setting)
    return None if problem is None else ("failed", problem[1])


def _row(
    setting: Setting,
    name: Candidate,
    problem: Problem | None,
    series: dict[Candidate, Series],
    found: dict[Candidate, tuple[float, str]],
) -> Row:
    """One row; the time and error of the rank with the most. Collective where the candidate ran."""
    place = setting.place
    experts = "megatron:te" if place.device.type == "cuda" else "megatron:sequential"
    task: dict[str, Any] = {
        "level": "layer", "pass_": "fwd+bwd", "dispatcher": name.name, "api": name.api, "experts": experts,
        "shape": setting.shape._asdict(), "R": place.num_ranks, "skew": setting.workload.skew,
        "skew_realised": round(setting.skew_realised, 4), "M": 1, "S": 0, "dtype": dtype_name(setting.dtype),
    }  # fmt: skip
    if problem is not None:
        return make_row(**task, status=problem[0], reason=problem[1])
    times = slowest_rank(series[name].us, place.group, place.device)[LAYER]
    peak = series[name].peak_bytes
    most = largest(torch.tensor([found[name][0], float(peak or 0)], dtype=torch.float64), place.group, place.device)
    p10, p50, p90 = (round(us, 2) for us in percentiles(times))
    return make_row(
        **task, status="ok", us_p10=p10, us_p50=p50, us_p90=p90, wrong=0, err=float(most[0]),
        peak_mib=None if peak is None else round(float(most[1]) / 2**20, 1),
    )  # fmt: skip


def table(rows: Sequence[Row]) -> list[str]:
    """Rows of one shape and skew in lines, with how many times faster than Megatron's alltoall each is."""
    first = rows[0]
    lines = [
        f"{','.join(map(str, first['shape'].values()))} R={first['R']} skew={first['skew_realised']:.2f} "
        f"{first['dtype']} {first['experts']}: forward + backward, us"
    ]
    base = next((row["us_p50"] for row in rows if (row["dispatcher"], row["api"]) == (NATIVE.name, NATIVE.api)), None)
    for row in rows:
        name = " ".join(filter(None, (row["dispatcher"], row["api"])))
        if row["status"] != "ok":
            lines.append(f"  {name:32s} {row['status']}: {row['reason']}")
            continue
        gain = "-" if base is None else f"{base / row['us_p50']:.2f} x"
        peak = "-" if row["peak_mib"] is None else f"{row['peak_mib']:.0f} MiB"
        lines.append(f"  {name:32s} {row['us_p50']:9.0f}  p90 {row['us_p90']:9.0f}  {gain:>8s}  {peak:>10s}")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Megatron-Core's MoE layer on dispatchers in turns.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--shape", nargs="+", default=["dsv3", "qwen3", "mixtral"], help=f"T,H,I,E,K or one of {', '.join(PRESETS)}")
    add("--skew", default="1", help="rank max/mean, 1 (even) to the number of ranks")
    add("--dispatchers", default=OURS, help=f"NAME or NAME:KEY=VALUE:KEY=VALUE; {BASELINE} and Megatron's own always")
    add("--iterations", type=int, default=20, help="timed ones, each with a new routing")
    add("--warmup", type=int, default=3)
    add("--seed", type=int, default=0)
    add("--out", help="JSON lines: a machine header, then one object a row")
    add("--commit", help="of sources that were copied here without git, with -dirty behind it where they differ")
    return parser


if __name__ == "__main__":
    sys.exit(main())

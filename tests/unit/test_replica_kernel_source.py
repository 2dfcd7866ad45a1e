"""The kernels of planner and rerouting as they stand, compiled for the host and run thread by thread.

What only a GPU shows (races between warps, timing) is for tests/gpu.
"""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep.load import expert_load
from moe_ep.replica import plan, reroute
from moe_ep.replica.checks import Planner
from moe_ep.routing import Routing
from moe_ep.sorted_routes import sort_routes
from tests.unit.test_replica_plan import ADVERSARIAL, COLDER, from_totals, random_case

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
MAIN = """
#include <utility>
#include "fixed_rows.cuh"
#include "plan_search.cuh"
#include "reroute.cuh"
using namespace moe_ep;
template <int kPerLane>
void run_plan(Plan p, int cluster) {
    launch(p.sources / p.ranks * cluster, kPlanThreads, [p] { plan_replicas<kPerLane>(p); }, cluster);
}
template <int kPerLane>
void run_fixed(Plan p) {
    launch(p.sources / p.ranks, kPlanThreads, [p] { plan_fixed_rows<kPerLane>(p); });
}
extern "C" void run_plan(Plan* p, int per_lane, int cluster) {
    per_lane == 2 ? run_plan<2>(*p, cluster) : per_lane == 8 ? run_plan<8>(*p, cluster) : run_plan<16>(*p, cluster);
}
extern "C" void run_fixed(Plan* p, int per_lane) {
    per_lane == 2 ? run_fixed<2>(*p) : per_lane == 8 ? run_fixed<8>(*p) : run_fixed<16>(*p);
}
extern "C" void run_reroute(Lines* t, Routing* r, int blocks) {
    launch((t->E + 7) / 8, 256, [t] { make_lines(*t); });
    launch(blocks, 256, [t, r] { place_rows(*t, *r); });
}
"""
_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


class PlanTask(ctypes.Structure):
    _fields_ = [
        ("load", _P),
        *((name, _I) for name in ("sources", "experts", "ranks", "slots", "min_quota", "tolerance")),
        *((name, _P) for name in ("quota", "instances", "peak", "bound")),
    ]


class Lines(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("load", "quota", "instances")),
        *((name, _I) for name in ("R", "E", "S", "rank")),
        *((name, _P) for name in ("kept", "start", "ends", "physical")),
    ]


class Routes(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("ids", "positions", "offsets", "counts")),
        ("num_routes", _L),
        *((name, _P) for name in ("out", "wrong")),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no host C++ compiler (g++ or clang++) is installed")
    folder = tmp_path_factory.mktemp("source")
    for source in (*KERNELS.glob("plan*.cuh"), KERNELS / "fixed_rows.cuh", KERNELS / "reroute.cuh"):
        shutil.copy(source, folder / source.name)
    shutil.copy(Path(__file__).with_name("host_block.cuh"), folder / "common.cuh")
    (folder / "cluster.cuh").write_text('#include "common.cuh"\n')
    (folder / "main.cpp").write_text(MAIN)
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE"]  # which forbids jumps between stacks
    subprocess.run([compiler, *flags, "main.cpp", "-o", "lib.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "lib.so"))


def check_plan(
    library: Any,
    load: Tensor,
    slots: int,
    min_quota: int,
    domain: int,
    tolerance: int = 0,
    planner: Planner = "quota",
    cluster: int = 1,
    per_lane: int = 2,
) -> None:
    num_ranks, num_experts = load.shape
    load = load.int().contiguous()
    quota = torch.full((num_experts, num_ranks), -7, dtype=torch.int32)
    instances = torch.full((num_ranks, slots), -7, dtype=torch.int32)
    peak, bound = (torch.zeros(num_ranks // domain, dtype=torch.int64) for _ in range(2))
    outputs = [t.data_ptr() for t in (quota, instances, peak, bound)]
    sizes = (num_ranks, num_experts, domain, slots, min_quota, tolerance)
    task = ctypes.byref(PlanTask(load.data_ptr(), *sizes, *outputs))
    if planner == "fixed_rows":
        library.run_fixed(task, per_lane)
    else:
        library.run_plan(task, per_lane, cluster)
    want = plan(load, slots, min_quota, planner, domain_size=domain, tolerance=tolerance)
    case = (load.sum(0).tolist(), num_ranks, slots, min_quota, domain, tolerance, planner, cluster)
    assert torch.equal(quota, want.quota), case
    assert torch.equal(instances, want.instances), case
    assert int(peak.max()) == int(want.max_load), case
    assert bool(peak.max() == bound.max()) == bool(want.exact), case


def test_no_float_is_near() -> None:
    for path in [*KERNELS.glob("plan*.cu*"), *KERNELS.glob("fixed_rows*"), *KERNELS.glob("reroute*")]:
        code = re.sub(r"//.*", "", path.read_text())
        assert re.findall(r"\b(?:float|double|half|__\w*2float\w*)\b|\d\.\d", code) == [], path.name


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_loads_have_the_planner_s_bits(library: Any, name: str) -> None:
    totals, num_ranks, slots, _ = ADVERSARIAL[name]
    for cluster in (1, 2):
        check_plan(library, from_totals(totals, num_ranks), slots, 1, num_ranks, cluster=cluster)


def test_random_loads_have_the_planner_s_bits(library: Any) -> None:
    rng = random.Random(2)
    for _ in range(20):
        totals, num_ranks, slots = random_case(rng)
        load, min_quota, tolerance = (
            from_totals(totals, num_ranks),
            rng.choice([1, 1, 3, 40]),
            rng.choice([0, 0, 10, 100]),
        )
        check_plan(library, load, slots, min_quota, num_ranks, tolerance, cluster=rng.choice([1, 3, 8]))
    for num_ranks, num_local, slots, domain, cluster, per_lane in (
        (33, 2, 1, 33, 1, 2),
        (64, 4, 2, 64, 8, 2),
        (6, 5, 0, 3, 2, 2),
        (1, 3, 2, 1, 1, 2),
        (12, 4, 1, 6, 1, 16),
        (4, 40, 3, 2, 2, 8),  # more experts of a rank than lanes
        (66, 1, 1, 66, 2, 8),
        (2, 300, 1, 2, 1, 2),  # more experts than threads that add up four each
    ):
        totals = [int(50 * rng.lognormvariate(0, 1.5)) for _ in range(num_ranks * num_local)]
        load, min_quota, tolerance = from_totals(totals, num_ranks), rng.choice([1, 30]), rng.choice([0, 10])
        check_plan(library, load, slots, min_quota, domain, tolerance, cluster=cluster, per_lane=per_lane)


def test_the_plan_is_that_of_the_best_run_whichever_block_has_it(library: Any) -> None:
    """Several rounds, so that the best run moves from block to block."""
    rng = random.Random(8)
    for cluster in (1, 2, 8):
        totals = [int(50 * rng.lognormvariate(0, 1.5)) for _ in range(48)]
        check_plan(library, from_totals(totals, 24), 1, 1, 24, cluster=cluster)


def test_dropped_replicas_have_the_planner_s_bits(library: Any) -> None:
    hot = [45, 23, 23, 145, 238, 232, 40, 0, 121, 107, 85, 0, 408, 0, 19, 198]
    check_plan(library, from_totals([14, 36, 0, 10, 97], 5), 3, 20, 5)
    check_plan(library, from_totals(hot + COLDER, 8), 1, 1, 8, cluster=2)


def test_equal_rows_have_the_planner_s_bits(library: Any) -> None:
    rng = random.Random(4)
    for num_ranks, num_local, domain in ((1, 3, 1), (2, 40, 2), (3, 1, 3), (12, 4, 6), (64, 4, 64), *[(4, 3, 4)] * 20):
        totals = [rng.choice([0, 1, int(50 * rng.lognormvariate(0, 2))]) for _ in range(num_ranks * num_local)]
        for load in (from_totals(totals, num_ranks), from_totals([0] * len(totals), num_ranks)):
            slots, per_lane = num_local + rng.randrange(2), rng.choice([2, 8, 16])
            check_plan(library, load, slots, 1, domain, planner="fixed_rows", per_lane=per_lane)
    for totals, num_ranks, *_ in ADVERSARIAL.values():
        check_plan(
            library, from_totals(totals, num_ranks), len(totals) // num_ranks, 1, num_ranks, planner="fixed_rows"
        )


@pytest.mark.parametrize("num_ranks", [1, 3, 8, 40])
def test_routes_go_where_reroute_sends_them(library: Any, num_ranks: int) -> None:
    generator = torch.Generator().manual_seed(num_ranks)
    num_experts = 2 * num_ranks
    all_ids = [
        (torch.rand(60, 3, generator=generator) ** 3 * (num_experts + 2)).long() - 1 for _ in range(min(num_ranks, 4))
    ] + [torch.zeros(0, 3, dtype=torch.int64)] * max(num_ranks - 4, 0)
    load = torch.stack([expert_load(ids, num_experts) for ids in all_ids]).int()
    made = plan(load, 2)
    for rank, ids in enumerate(all_ids[:6]):
        routes = sort_routes(torch.where(ids < num_experts, ids, -1), num_experts)
        want = reroute(Routing(expert_ids=ids, weights=torch.ones(ids.shape), num_experts=num_experts), made, rank)
        for planned, wrong in ((load, 0), (load + (torch.arange(num_experts) == 1), 1)):
            out, count = torch.full_like(ids, -9), torch.full((), -9)
            scratch = [torch.empty(size, dtype=torch.int32) for size in (num_experts, num_experts, *[load.numel()] * 2)]
            planned = planned.int()
            tensors = (planned, made.quota, made.instances)
            lines = Lines(
                *(t.data_ptr() for t in tensors), num_ranks, num_experts, 2, rank, *(t.data_ptr() for t in scratch)
            )
            inputs = (ids, routes.positions, routes.offsets, routes.counts)
            task = Routes(*(t.data_ptr() for t in inputs), ids.numel(), out.data_ptr(), count.data_ptr())
            library.run_reroute(ctypes.byref(lines), ctypes.byref(task), 2)
            assert int(count) == wrong
            if not wrong:
                assert torch.equal(out, want.expert_ids)

"""The kernels of `direct` as they stand, compiled for the host: all ranks' threads are fibers that run in turn.

Flags, waits between blocks and between ranks, and every index are real; bulk copies are played as late as they may be.
Memory order and timing are for tests/gpu.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_ep.kernels import direct
from moe_ep.kernels.direct_types import Domain, Exchange, Push, Ranked, Return
from torch import Tensor

from tests.direct_domain import CASES, LOST, OVERFLOW, Case, Group, check_case, check_overflow, make_ids, make_trips
from tests.unit.test_replica_sync_source import WORDS

HERE = {name: case for name, case in CASES.items() if case.dtype == torch.float32 and name not in ("long", "eight")}
HERE["eight"] = Case(tokens=(5, 4, 0, 3, 1, 2, 6, 34), num_experts=16, top_k=3, hidden=8)
HERE["long_rows"] = Case(tokens=(3, 9), hidden=8192, top_k=2)
KERNELS = Path(__file__).resolve().parents[2] / "kernels"
COMMON = """
#pragma once
#include <sched.h>
#include <time.h>
#include <cstring>
#include <map>
#include <utility>
#include "host_block.cuh"
static int blocks_of_rank;  // the blocks of all ranks are one launch here, rank by rank
#define blockIdx (Index{static_cast<int>(current / blockDim.x) % blocks_of_rank})
#define gridDim (Index{blocks_of_rank})
struct uint4 { unsigned x, y, z, w; };
inline float __int_as_float(int bits) { float value; memcpy(&value, &bits, 4); return value; }
template <typename T> T __ldcg(const T* at) { return *at; }
inline void __nanosleep(unsigned) { to_scheduler(); }  // lets the other threads get on
inline void __threadfence() { __sync_synchronize(); }
inline void __threadfence_system() { __sync_synchronize(); }
inline unsigned __match_any_sync(unsigned, int value) {
    return exchange(static_cast<unsigned>(value), [value](uint64_t* v) {
        uint64_t mask = 0;
        for (int i = 0; i < moe_ep::kWarp; ++i)
            mask |= static_cast<uint64_t>(v[i] == static_cast<unsigned>(value)) << i;
        return mask;
    });
}
namespace moe_ep {
inline float widen(float x) { return x; }
template <typename T> T narrow(float x) { return x; }
}
"""
BULK = """
#pragma once
#include "direct.cuh"
namespace moe_ep {
namespace {
inline char* block_shared() {
    static std::map<int, std::vector<char>> memory;
    auto& own = memory[current / blockDim.x];
    own.resize(1 << 16);
    return own.data();
}
inline uint4 load_l2_if(const uint4* at, bool wanted) { return wanted ? *at : uint4{}; }

// Copies of a thread, each as late as it may be: a load comes when it is awaited, a store reads its stage when that is
// awaited and writes when all of it is. A stage that is used twice at a time is an error.
struct Load { uint32_t stage, bytes, barrier; const char* from; };
struct Store { uint32_t stage, bytes; char* to; bool was_read; std::vector<char> data; };
struct Copies { std::vector<Load> loads; std::vector<Store> stores; std::map<uint32_t, uint32_t> phases; };
inline Copies& copies() {
    static std::map<int, Copies> all;
    return all[current];
}
inline void check(bool good, const char* what) {
    if (good) return;
    fprintf(stderr, "%s\\n", what);
    abort();
}
inline uint32_t shared_address(const char* at) { return at - block_shared(); }
inline void init_barrier(uint32_t barrier) { copies().phases[barrier] = 0; }
inline void fence_barriers() {}
inline void load_bulk(uint32_t stage, const char* from, uint32_t bytes, uint32_t barrier) {
    for (auto& load : copies().loads) check(load.stage != stage, "two loads into one stage");
    for (auto& store : copies().stores) check(store.was_read || store.stage != stage, "a load over what is stored");
    check(bytes > 0 && bytes % 16 == 0 && stage % 16 == 0 && copies().phases.count(barrier), "no such load");
    memset(block_shared() + stage, 0xee, bytes);
    copies().loads.push_back({stage, bytes, barrier, from});
}
inline void await_load(uint32_t barrier, uint32_t parity) {
    auto& loads = copies().loads;
    const auto load = std::find_if(loads.begin(), loads.end(), [=](auto& l) { return l.barrier == barrier; });
    check(load != loads.end() && (copies().phases[barrier]++ & 1) == parity, "nothing is loaded in that phase");
    memcpy(block_shared() + load->stage, load->from, load->bytes);
    loads.erase(load);
}
inline void store_bulk(char* to, uint32_t stage, uint32_t bytes) {
    for (auto& load : copies().loads) check(load.stage != stage, "a store of what is not here yet");
    copies().stores.push_back({stage, bytes, to, false});
}
inline void read_stages(size_t count) {
    for (size_t i = 0; i < count; ++i) {
        auto& store = copies().stores[i];
        if (store.was_read) continue;
        store.data.assign(block_shared() + store.stage, block_shared() + store.stage + store.bytes);
        store.was_read = true;
    }
}
inline void await_reads_but_last() { read_stages(std::max<size_t>(copies().stores.size(), 1) - 1); }
inline void await_stores() {
    __nanosleep(1);
    read_stages(copies().stores.size());
    for (auto& store : copies().stores) memcpy(store.to, store.data.data(), store.bytes);
    copies().stores.clear();
}
}
}
"""
MAIN = """
#include "direct_move.cuh"
#include "direct_return.cuh"
using namespace moe_ep;
enum { kExchange, kPush, kReturn };
// One operation of `ranks` ranks at once. Rank `late` lets the others run first.
extern "C" int run(int what, Domain** domains, Exchange** exchanges, Push** pushes, Return** returns, int ranks,
                   int blocks, int late) {
    blocks_of_rank = blocks;
    try {
        launch(ranks * blocks, kBlockThreads, [=] {
            const int r = current / blockDim.x / blocks;
            for (int i = 0; r == late && i < 200; ++i) __nanosleep(1);
            if (what == kExchange) settle_plan(*domains[r], *exchanges[r]);
            if (what == kPush) push_rows(*domains[r], *exchanges[r], *pushes[r]);
            if (what == kReturn) return_rows<float>(*domains[r], *returns[r]);
        }, ranks * blocks);
    } catch (const std::exception& error) {
        fprintf(stderr, "%s\\n", error.what());
        return 1;
    }
    return 0;
}
extern "C" void sizes(int* sizes) {
    sizes[0] = sizeof(Domain), sizes[1] = sizeof(Exchange), sizes[2] = sizeof(Push), sizes[3] = sizeof(Return);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no host C++ compiler (g++ or clang++) is installed")
    folder = tmp_path_factory.mktemp("source")
    for name in ("direct_settle.cuh", "direct_send.cuh", "direct_move.cuh", "direct_return.cuh"):
        shutil.copy(KERNELS / name, folder)
    shutil.copy(Path(__file__).with_name("host_block.cuh"), folder)
    text = (KERNELS / "direct.cuh").read_text()
    begin, end = text.index("__device__ __forceinline__ uint32_t load_acquire"), text.index("note_fault(const")
    end = text.rindex("\n", 0, end)
    (folder / "direct.cuh").write_text(text[:begin] + WORDS + text[end:])
    (folder / "common.cuh").write_text(COMMON)
    block = (KERNELS / "direct_block.cuh").read_text()
    for name, count in (("kBlockThreads", 64), ("kBulkWarps", 1)):
        block, found = re.subn(rf"constexpr int {name} = \d+;", f"constexpr int {name} = {count};", block)
        assert found == 1
    (folder / "direct_block.cuh").write_text(block)
    (folder / "direct_bulk.cuh").write_text(BULK)
    (folder / "main.cpp").write_text(MAIN)
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-w", "-fno-strict-aliasing"]
    flags.append("-U_FORTIFY_SOURCE")  # which forbids jumps between stacks
    subprocess.run([compiler, *flags, "main.cpp", "-o", "lib.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "lib.so"))


class HostGroup(Group):
    """Launches are kept, and run for all ranks together once all ranks have asked for them."""

    def __init__(self, library: Any, case: Case, late: int, timeout_s: float = 60.0) -> None:
        self.library, self.late = library, late
        self.asked: list[list[tuple[str, list[Any], int]]] = [[]]
        self.held: list[Ranked] = []
        super().__init__(case, timeout_s, "cpu")

    def hold(self, **fields: Any) -> Ranked:
        """In the place of `Ranked`."""
        self.held.append(Ranked(**fields))
        return self.held[-1]

    def keep(self, name: str, anchor: Tensor, *arguments: Any) -> None:
        """In the place of `launch`."""
        structs = []
        for argument in arguments:
            if hasattr(argument, "_obj"):
                copy = type(argument._obj)()
                ctypes.memmove(ctypes.byref(copy), argument, ctypes.sizeof(copy))
                structs.append(copy)
        self.asked[-1].append((name, structs, arguments[-1]))

    def each(self, fn: Callable[[int], Any], ranks: Sequence[int] | None = None) -> list[Any]:
        out, self.asked = [], []
        for r in range(self.num_ranks) if ranks is None else ranks:
            self.asked.append([])
            out.append(fn(r))
        for together in zip(*self.asked, strict=True):
            self.run(together)
        return out

    def run(self, together: Sequence[tuple[str, list[Any], int]]) -> None:
        what = ("moe_ep_direct_exchange", "moe_ep_direct_push", "moe_ep_direct_return").index(together[0][0])
        columns = []
        for kind in (Domain, Exchange, Push, Return):
            found = [next((s for s in structs if isinstance(s, kind)), kind()) for _, structs, _ in together]
            columns.append((ctypes.POINTER(kind) * len(found))(*(ctypes.pointer(s) for s in found)))
        assert self.library.run(what, *columns, len(together), together[0][2], self.late) == 0

    def sync(self) -> None:
        """Nothing is under way."""


@pytest.fixture
def make(library: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., HostGroup]:
    monkeypatch.setattr(direct, "check_structs", lambda index: None)

    def made(case: Case, late: int = -1, timeout_s: float = 60.0) -> HostGroup:
        group = HostGroup(library, case, late, timeout_s)
        monkeypatch.setattr(direct, "launch", group.keep)
        monkeypatch.setattr(direct, "Ranked", group.hold)  # memory goes back in stream order, which is later here
        return group

    return made


@pytest.mark.parametrize("exact", [False, True], ids=["capacity", "exact"])
@pytest.mark.parametrize("expand", [False, True], ids=["unique", "expanded"])
@pytest.mark.parametrize("name", HERE)
def test_rows_go_where_the_routes_say(make: Callable[..., HostGroup], name: str, expand: bool, exact: bool) -> None:
    check_case(make(HERE[name], late=len(HERE[name].tokens) - 1), len(name), expand, exact)


@pytest.mark.parametrize("expand", [False, True], ids=["unique", "expanded"])
@pytest.mark.parametrize("capacity", [1, 7, 60, 100])
def test_too_many_rows_are_a_fault_and_results_stay_defined(
    make: Callable[..., HostGroup], capacity: int, expand: bool
) -> None:
    check_overflow(make(OVERFLOW), capacity, expand)


@pytest.mark.parametrize("expand", [False, True])
def test_a_rank_that_never_comes_leaves_no_index(make: Callable[..., HostGroup], expand: bool) -> None:
    group = make(HERE["two"], timeout_s=0.1)
    ids = make_ids(group.case, torch.Generator().manual_seed(0))
    trip = make_trips(group, ids)[0]
    trip.row_capacity, trip.unique_capacity = 400, 83
    group.peers[0].prepare(trip, row_bound=400)
    x, weights = torch.ones(50, group.case.hidden), torch.ones(50, 4)
    (received,) = group.each(lambda r: group.peers[r].push_first(x, weights, trip, expand=expand, blocks=(2, 5)), [0])
    assert (int(group.faults[0]) >> 56, int(group.faults[0]) & 0xFFFFFFFF) == (LOST, 1)
    for left in (received.row_index, received.positions, trip.places):
        assert bool((left == -1).all())
    parts = group.peers[0].plan_parts(trip.plan)
    assert not parts["offsets"].any() and not parts["tokens"].any() and not parts["totals"].any()
    assert parts["words"][1].tolist()[:2] == [LOST, 1]


def test_structs_are_those_of_the_sources(library: Any) -> None:
    theirs = (ctypes.c_int * 4)()
    library.sizes(theirs)
    assert list(theirs) == [ctypes.sizeof(struct) for struct in (Domain, Exchange, Push, Return)]

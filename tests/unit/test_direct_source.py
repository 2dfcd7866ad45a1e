"""The kernels of `direct` as they stand, compiled for the host: all ranks' threads are fibers that run in turn.

Flags, waits between blocks and between ranks, and every index are real; memory order, timing and what is bulk copies on
a GPU are for tests/gpu.
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
from moe_ep.kernels.direct_types import Domain, Exchange, Push, Return
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
inline int __syncthreads_or(int value) { return __syncthreads_count(value != 0) != 0; }
inline uint64_t __shfl_sync(unsigned, uint64_t value, int from) {
    return exchange(value, [from](uint64_t* v) { return v[from]; });
}
inline uint32_t __shfl_sync(unsigned all, uint32_t value, int from) {
    return static_cast<uint32_t>(__shfl_sync(all, static_cast<uint64_t>(value), from));
}
inline char* block_shared() {
    static std::map<int, std::vector<char>> memory;
    auto& own = memory[current / blockDim.x];
    own.resize(1 << 16);
    return own.data();
}
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
MAIN = """
#include "direct_layout.cuh"
#include "direct_push.cuh"
#include "direct_return.cuh"
using namespace moe_ep;
enum { kExchange, kPush, kReturn };
// One operation of `ranks` ranks at once. Rank `late` lets the others run first.
extern "C" int run(int what, Domain** domains, Exchange** exchanges, Push** pushes, Return** returns, int ranks,
                   int blocks, int late) {
    blocks_of_rank = blocks;
    try {
        launch(ranks * blocks, 64, [=] {
            const int r = current / blockDim.x / blocks;
            for (int i = 0; r == late && i < 200; ++i) __nanosleep(1);
            if (what == kExchange) direct_layout::exchange_counts(*domains[r], *exchanges[r]);
            if (what == kPush) direct_push::push_rows(*domains[r], *pushes[r]);
            if (what == kReturn) direct_return::return_rows<float>(*domains[r], *returns[r]);
        }, ranks * blocks);
    } catch (const std::exception& error) {
        fprintf(stderr, "%s\\n", error.what());
        return 1;
    }
    return 0;
}
extern "C" void rank(const int64_t* ids, int num_tokens, int top_k, int num_experts, int num_ranks, int* route_rank,
                     int* unique, int* counts) {
    const int each = direct_layout::tokens_per_block(num_tokens);
    blocks_of_rank = num_tokens == 0 ? 1 : ceil_div(num_tokens, each);
    const direct_layout::Ranking all{ids, num_tokens, top_k, num_experts, num_ranks, each, route_rank, unique, counts};
    launch(blocks_of_rank, kWarp * kWarps, [=] { direct_layout::rank_routes(all); }, blocks_of_rank);
}
extern "C" int per_block(int num_tokens) { return direct_layout::tokens_per_block(num_tokens); }
extern "C" void sizes(int* sizes) {
    sizes[0] = sizeof(Domain), sizes[1] = sizeof(Exchange), sizes[2] = sizeof(Push), sizes[3] = sizeof(Return);
}
"""


def kernels_of(name: str) -> str:
    """A source without its launches, in a namespace of its own; blocks of two warps."""
    text = (KERNELS / f"{name}.cu").read_text()
    for end in ("template <typename T>\nint launch(", "\n}  // namespace\n}  // namespace moe_ep\n"):
        text = text.split(end)[0]
    text = re.sub(r"namespace moe_ep \{\s+namespace \{", f"namespace moe_ep {{\nnamespace {name} {{", text)
    text = re.sub(r"constexpr int kThreads = \d+;", "constexpr int kThreads = 64;", text)
    shared = r"\1* \2 = reinterpret_cast<\1*>(block_shared());"
    return re.sub(r"extern __shared__ ([^\n]*?) ?(\w+)\[\];", shared, text) + "\n}\n}\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no host C++ compiler (g++ or clang++) is installed")
    folder = tmp_path_factory.mktemp("source")
    for name in ("direct_layout", "direct_push", "direct_return"):
        (folder / f"{name}.cuh").write_text(kernels_of(name))
    shutil.copy(Path(__file__).with_name("host_block.cuh"), folder)
    text = (KERNELS / "direct.cuh").read_text()
    begin, end = text.index("__device__ __forceinline__ uint32_t load_acquire"), text.index("note_fault(const")
    end = text.rindex("\n", 0, end)
    (folder / "direct.cuh").write_text(text[:begin] + WORDS + text[end:])
    (folder / "common.cuh").write_text(COMMON)
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
        super().__init__(case, timeout_s, "cpu")

    def keep(self, name: str, anchor: Tensor, *arguments: Any) -> None:
        """In the place of `launch`; ranking, which knows one rank alone, runs at once."""
        if name == "moe_ep_direct_rank":
            self.library.rank(*(ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments))
            return
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
        blocks = 1 if what == 0 else together[0][2]
        columns = []
        for kind in (Domain, Exchange, Push, Return):
            found = [next((s for s in structs if isinstance(s, kind)), kind()) for _, structs, _ in together]
            columns.append((ctypes.POINTER(kind) * len(found))(*(ctypes.pointer(s) for s in found)))
        assert self.library.run(what, *columns, len(together), blocks, self.late) == 0

    def sync(self) -> None:
        """Nothing is under way."""


@pytest.fixture
def make(library: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., HostGroup]:
    monkeypatch.setattr(direct, "check_structs", lambda index: None)

    def made(case: Case, late: int = -1, timeout_s: float = 60.0) -> HostGroup:
        group = HostGroup(library, case, late, timeout_s)
        monkeypatch.setattr(direct, "launch", group.keep)
        monkeypatch.setattr(direct, "tokens_per_block", lambda num_tokens, index: library.per_block(num_tokens))
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
    """Rank 1 exchanges counts and sends nothing."""
    group = make(HERE["two"], timeout_s=0.1)
    trips = make_trips(group, make_ids(group.case, torch.Generator().manual_seed(0)))
    trip, peers = trips[0], group.peers
    group.each(lambda r: peers[r].exchange(trips[r], row_bound=400))
    trip.row_capacity, trip.unique_capacity = 400, 83
    x, weights = torch.ones(50, group.case.hidden), torch.ones(50, 4)
    (received,) = group.each(lambda r: peers[r].push_first(x, weights, trip, expand=expand, blocks=(2, 5)), [0])
    assert (int(group.faults[0]) >> 56, int(group.faults[0]) & 0xFFFFFFFF) == (LOST, 1)
    for left in (received.row_index, received.positions):
        assert bool((left == -1).all())
    parts = peers[0].plan_parts(trip.plan)
    assert not parts["offsets"].any() and not parts["tokens"].any() and not parts["totals"].any()


def test_structs_are_those_of_the_sources(library: Any) -> None:
    theirs = (ctypes.c_int * 4)()
    library.sizes(theirs)
    assert list(theirs) == [ctypes.sizeof(struct) for struct in (Domain, Exchange, Push, Return)]

"""The kernels of weight push and gradient pull as they stand, compiled for the host: a process for each rank.

A rank's threads run one after the other (`host_block.cuh`), the ranks side by side over shared memory, so that flags
and fences are real. What only a GPU shows (memory order, timing) is for tests/gpu.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_ep.kernels.direct_types import MAX_RANKS, Domain
from moe_ep.kernels.replica_sync import MAX_PARTS, UNIT, Slots, SlotShape
from torch import Tensor

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
LOST = 10
# what direct.cuh says in PTX, and what host_block.cuh leaves out
WORDS = """
inline uint32_t load_acquire(const uint32_t* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
inline uint64_t load_acquire(const uint64_t* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
inline void store_release(uint32_t* at, uint32_t value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
inline void store_release(uint64_t* at, uint64_t value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
inline int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}
"""
COMMON = """
#pragma once
#include <sched.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cstring>
#include <utility>
#include "host_block.cuh"
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
inline uint4 __ldcg(const uint4* at) { return *at; }
inline void __nanosleep(unsigned) {  // lets the block's other threads get on
    sched_yield();
    to_scheduler();
}
inline void __threadfence() { __sync_synchronize(); }
inline void __threadfence_system() { __sync_synchronize(); }
inline unsigned long long atomicMax(unsigned long long* at, unsigned long long value) {
    return std::exchange(*at, std::max(*at, value));
}
namespace moe_ep {
inline uint4 load_if(const uint4* at, bool wanted) { return wanted ? *at : uint4{}; }
namespace { extern int shared[]; }
}
"""
MAIN = """
#include "replica_sync.cuh"
namespace moe_ep { namespace { int shared[1 << 16]; } }
using namespace moe_ep;
// Every rank in a process of its own; blocks of a rank one after the other. A rank fills its slots first and looks at
// them behind the operation, as kernels in front of it and behind it would; `late` does so after a while.
extern "C" int run(Domain* domains, Slots* slots, int ranks, int pull, int blocks, int late, char** before,
                   char** after, int64_t first, int64_t bytes) {
    for (int r = 0; r < ranks; ++r) {
        if (fork() != 0) continue;
        if (r == late) usleep(30000);
        memcpy(domains[r].memory[r] + first, before[r], bytes);
        launch(blocks, kSyncThreads, [=] {
            pull ? pull_gradients(domains[r], slots[r]) : push_weights(domains[r], slots[r]);
        });
        memcpy(after[r], domains[r].memory[r] + first, bytes);
        _exit(0);
    }
    int failed = 0, status;
    for (int r = 0; r < ranks; ++r) failed += wait(&status) < 0 || status != 0;
    return failed;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no host C++ compiler (g++ or clang++) is installed")
    folder = tmp_path_factory.mktemp("source")
    shutil.copy(KERNELS / "replica_sync.cuh", folder)
    shutil.copy(Path(__file__).with_name("host_block.cuh"), folder)
    direct = (KERNELS / "direct.cuh").read_text()
    begin, end = direct.index("__device__ __forceinline__ uint32_t load_acquire"), direct.index("note_fault(const")
    end = direct.rindex("\n", 0, end)
    (folder / "direct.cuh").write_text(direct[:begin] + WORDS + direct[end:])
    (folder / "common.cuh").write_text(COMMON)
    (folder / "main.cpp").write_text(MAIN)
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE"]  # which forbids jumps between stacks
    subprocess.run([compiler, *flags, "main.cpp", "-o", "lib.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "lib.so"))


class Ranks:
    """R ends in shared memory, driven as SlotPeers drives them."""

    def __init__(self, library: Any, shape: SlotShape, timeout_s: float = 30.0) -> None:
        self.library, self.shape = library, shape
        flags, self.read_at, self.weights_at, self.grads_at, num_bytes = shape.layout()
        self.first = self.weights_at[0]
        self.memory, self.before, self.after = (
            [shared(torch.zeros(num_bytes, dtype=torch.uint8)) for _ in range(shape.num_ranks)] for _ in range(3)
        )
        self.epochs = [shared(torch.zeros(3, dtype=torch.int32)) for _ in range(shape.num_ranks)]
        self.faults = [shared(torch.zeros((), dtype=torch.int64)) for _ in range(shape.num_ranks)]
        self.domains = (Domain * shape.num_ranks)(
            *(
                Domain(
                    memory=(ctypes.c_void_p * MAX_RANKS)(*(block.data_ptr() for block in self.memory)),
                    at=flags,
                    rank=r,
                    num_ranks=shape.num_ranks,
                    num_local=shape.num_local,
                    timeout_ns=int(timeout_s * 1e9),
                    epoch=self.epochs[r].data_ptr(),
                    fault=self.faults[r].data_ptr(),
                    code_lost=LOST,
                )
                for r in range(shape.num_ranks)
            )
        )

    def run(
        self, instances: Tensor, tensors: list[list[Tensor]], *, pull: bool, late: int = -1, ranks: int = 0
    ) -> None:
        at = self.grads_at if pull else self.weights_at
        units = [n * (4 if pull else size) // UNIT for n, size in self.shape.parts]
        tasks = (Slots * self.shape.num_ranks)(
            *(
                Slots(
                    masters=(ctypes.c_void_p * MAX_PARTS)(*(t.data_ptr() for t in own)),
                    slots_at=(ctypes.c_int64 * MAX_PARTS)(*at),
                    part_units=(ctypes.c_int64 * MAX_PARTS)(*units),
                    read_at=self.read_at,
                    instances=instances.data_ptr(),
                    num_parts=len(units),
                    num_slots=instances.shape[1],
                )
                for own in tensors
            )
        )
        sides = [
            (ctypes.c_void_p * len(blocks))(*(block.data_ptr() + self.first for block in blocks))
            for blocks in (self.before, self.after)
        ]
        size = ctypes.c_int64(self.memory[0].numel() - self.first)
        arguments = (ranks or self.shape.num_ranks, pull, 2, late, *sides, ctypes.c_int64(self.first), size)
        assert self.library.run(self.domains, tasks, *arguments) == 0

    def slots(self, blocks: list[Tensor], rank: int, part: int, dtype: torch.dtype, *, grads: bool) -> Tensor:
        n = self.shape.parts[part][0]
        at = (self.grads_at if grads else self.weights_at)[part]
        return blocks[rank][at : at + self.shape.slots * n * dtype.itemsize].view(dtype).view(-1, n)


def shared(tensor: Tensor) -> Tensor:
    return tensor.share_memory_()


def draw_instances(num_ranks: int, num_local: int, slots: int, seed: int) -> Tensor:
    """Some slots of every rank filled with experts of others, ascending, -1 behind them."""
    gen = torch.Generator().manual_seed(seed)
    instances = torch.full((num_ranks, slots), -1, dtype=torch.int32)
    for rank in range(num_ranks):
        foreign = [e for e in range(num_ranks * num_local) if e // num_local != rank]
        order = torch.randperm(len(foreign), generator=gen)[: int(torch.randint(slots + 1, (), generator=gen))]
        chosen = sorted(foreign[i] for i in order)
        instances[rank, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return shared(instances)


@pytest.mark.parametrize(
    ("num_ranks", "num_local", "slots", "elements"),
    [(1, 2, 1, (8,)), (2, 1, 1, (8, 16400)), (3, 2, 2, (1032,)), (4, 3, 3, (16, 8, 4104)), (2, 2, 0, (8,))],
)
def test_slots_are_filled_and_gradients_added(
    library: Any, num_ranks: int, num_local: int, slots: int, elements: tuple[int, ...]
) -> None:
    """Three rounds of a push and a pull, with a late rank, one slot more than the plan knows and garbage in all."""
    shape = SlotShape(num_ranks=num_ranks, num_local=num_local, slots=slots + 1, parts=tuple((n, 2) for n in elements))
    ranks = Ranks(library, shape)
    for turn in range(3):
        for pull, dtype in ((False, torch.bfloat16), (True, torch.float32)):
            gen = torch.Generator().manual_seed(2 * turn + pull)
            instances = draw_instances(num_ranks, num_local, slots, 2 * turn + pull)
            home = [
                [shared(torch.randn(num_local, n, generator=gen).to(dtype)) for n in elements] for _ in range(num_ranks)
            ]
            held = [[torch.randn(slots + 1, n, generator=gen).to(dtype) for n in elements] for _ in range(num_ranks)]
            for rank, part in itertools.product(range(num_ranks), range(len(elements))):
                ranks.slots(ranks.before, rank, part, dtype, grads=pull).copy_(held[rank][part])
            wanted = expected(instances, [[t.clone() for t in own] for own in home], held, num_local, pull)
            ranks.run(instances, home, pull=pull, late=(turn + pull) % num_ranks)
            for rank, part in itertools.product(range(num_ranks), range(len(elements))):
                assert torch.equal(home[rank][part], wanted[rank][part])
                assert torch.equal(ranks.slots(ranks.after, rank, part, dtype, grads=pull), held[rank][part])
        assert [epoch.tolist() for epoch in ranks.epochs] == [[2 * turn + 2, 0, 0]] * num_ranks
    assert [int(fault) for fault in ranks.faults] == [0] * num_ranks


def expected(
    instances: Tensor, home: list[list[Tensor]], held: list[list[Tensor]], num_local: int, pull: bool
) -> list[list[Tensor]]:
    """What the masters come to; `held`, what the slots hold, is changed in place. By rank: the order of the sums."""
    for rank, filled in enumerate(instances.tolist()):
        for slot, expert in enumerate(filled):
            for part in range(len(home[0]) if expert >= 0 else 0):
                master = home[expert // num_local][part][expert % num_local]
                if pull:
                    master += held[rank][part][slot]
                    held[rank][part][slot] = 0
                else:
                    held[rank][part][slot] = master
    return home


@pytest.mark.parametrize("pull", [False, True])
def test_a_rank_that_never_comes_is_a_fault_and_loses_nothing(library: Any, pull: bool) -> None:
    ranks = Ranks(library, SlotShape(num_ranks=2, num_local=1, slots=1, parts=((8, 4),)), timeout_s=0.1)
    for block in (*ranks.before, *ranks.memory):
        block[ranks.first :] = 3
    ours = [[shared(torch.ones(1, 8))], [shared(torch.ones(1, 8))]]
    ranks.run(shared(torch.tensor([[1], [0]], dtype=torch.int32)), ours, pull=pull, ranks=1)
    assert (int(ranks.faults[0]) >> 56, int(ranks.faults[0]) & 0xFFFFFFFF) == (LOST, 1)
    assert ours[0][0].tolist() == [[1] * 8]
    for block in (*ranks.memory, ranks.after[0]):
        assert bool((block[ranks.first :] == 3).all())


@pytest.mark.parametrize("pull", [False, True])
def test_a_rank_that_is_told_to_stop_does_not_wait(library: Any, pull: bool) -> None:
    ranks = Ranks(library, SlotShape(num_ranks=2, num_local=1, slots=1, parts=((8, 4),)), timeout_s=60)
    stop = ranks.shape.layout()[0].stop
    ranks.memory[0][stop : stop + 4].view(torch.int32).fill_(2)
    ours = [[shared(torch.ones(1, 8))], [shared(torch.ones(1, 8))]]
    started = time.monotonic()
    ranks.run(shared(torch.tensor([[1], [0]], dtype=torch.int32)), ours, pull=pull, ranks=1)
    assert time.monotonic() - started < 30
    assert (int(ranks.faults[0]) >> 56, int(ranks.faults[0]) & 0xFFFFFFFF) == (LOST, 1)


def test_sizes_that_the_kernels_do_not_serve() -> None:
    def refusal(**changed: object) -> str | None:
        sizes = {"num_ranks": 2, "num_local": 2, "slots": 1, "parts": ((8, 2),)}
        return SlotShape(**(sizes | changed)).refusal()  # type: ignore[arg-type]

    assert refusal() is None
    assert "a parameter of 4 elements of 2 bytes does not fill whole 16-byte units" in str(refusal(parts=((4, 2),)))
    assert "a parameter of 34 elements of 8 bytes does not" in str(refusal(parts=((34, 8),)))
    assert "9 parameters, and at most 8" in str(refusal(parts=((8, 2),) * 9))
    assert "73 ranks are more than the 72" in str(refusal(num_ranks=73))
    assert "5000 slots on 2 ranks are more than can be listed" in str(refusal(slots=5000))

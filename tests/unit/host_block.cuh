// CUDA's words for a host compiler: the threads of a block, or of a cluster of blocks, are fibers that run one after the
// other and meet at barriers. A test puts this file in the place of kernels/common.cuh and of kernels/cluster.cuh.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __align__(bytes)
#define __launch_bounds__(...)

struct int2 {
    int x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
struct uint2 {
    unsigned x, y;
};
struct int4 {
    int x, y, z, w;
};
struct Index {
    int x;
};
static Index threadIdx, blockIdx, blockDim, gridDim;
using std::max;
using std::min;

namespace moe_ep {

constexpr int kWarp = 32;
constexpr int kWarps = 8;
constexpr unsigned kAll = 0xffffffffu;
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace moe_ep

enum State { kRuns, kAtWarp, kAtBlock, kAtCluster, kDone };
constexpr int kStack = 1 << 16, kMost = 4096, kMemory = 1 << 18;
static ucontext_t fresh[kMost];  // a fiber that has not run yet; later jumps make no system call
static jmp_buf scheduler, fibers[kMost];
static bool started[kMost];
static std::unique_ptr<char[]> stacks(new char[static_cast<size_t>(kStack) * kMost]);  // touched where it is used
static State states[kMost];
static uint64_t passed[kMost];
static std::function<void()> body;
static int current, first_block, blocks_of_cluster;  // the fiber that runs, and the cluster whose blocks run
static std::unique_ptr<int[]> memories(new int[static_cast<size_t>(kMemory) * 8]);  // shared memory of each block

static void resume(int fiber) {
    current = fiber;
    threadIdx.x = fiber % blockDim.x;
    blockIdx.x = first_block + fiber / blockDim.x;
    if (_setjmp(scheduler) != 0) return;
    if (started[fiber]) _longjmp(fibers[fiber], 1);
    started[fiber] = true;
    setcontext(&fresh[fiber]);
}
static void to_scheduler() {
    if (_setjmp(fibers[current]) == 0) _longjmp(scheduler, 1);
}
static void wait_at(State barrier) {
    states[current] = barrier;
    to_scheduler();
}
static void run_fiber() {
    body();
    wait_at(kDone);
}

// Goes on with the fibers of a group if all of them, but those that are done, wait at the barrier.
static bool release(int first, int count, State barrier) {
    int waiting = 0, done = 0;
    for (int f = first; f < first + count; ++f) waiting += states[f] == barrier, done += states[f] == kDone;
    if (waiting == 0 || waiting + done != count) return false;
    std::replace(states + first, states + first + count, barrier, kRuns);
    return true;
}

// Every thread to its next barrier; then the warps, blocks or the cluster whose threads are all there.
static bool advance(int threads) {
    const int count = threads * blocks_of_cluster;
    bool moved = false;
    for (int f = 0; f < count; ++f) {
        if (states[f] != kRuns) continue;
        moved = true;
        resume(f);
    }
    if (std::count(states, states + count, kDone) == count) return false;
    for (int f = 0; f < count; f += moe_ep::kWarp) moved |= release(f, moe_ep::kWarp, kAtWarp);
    for (int f = 0; f < count; f += threads) moved |= release(f, threads, kAtBlock);
    moved |= release(0, count, kAtCluster);
    if (!moved) throw std::runtime_error("threads of a block wait at different barriers");
    return true;
}

static void launch(int grid, int threads, std::function<void()> kernel, int cluster = 1) {
    gridDim.x = grid, blockDim.x = threads, body = std::move(kernel), blocks_of_cluster = cluster;
    if (threads * cluster > kMost || grid % cluster != 0) throw std::runtime_error("no such launch");
    for (first_block = 0; first_block < grid; first_block += cluster) {
        for (int f = 0; f < threads * cluster; ++f) {
            getcontext(&fresh[f]);
            fresh[f].uc_stack.ss_sp = &stacks[static_cast<size_t>(f) * kStack];
            fresh[f].uc_stack.ss_size = kStack;
            makecontext(&fresh[f], run_fiber, 0);
            states[f] = kRuns;
            started[f] = false;
        }
        while (advance(threads)) {
        }
    }
}

namespace moe_ep {

inline int cluster_blocks() { return blocks_of_cluster; }
inline int block_in_cluster() { return blockIdx.x - first_block; }
inline int* block_memory() { return &memories[static_cast<size_t>(kMemory) * block_in_cluster()]; }
inline void cluster_barrier() { wait_at(kAtCluster); }
inline void cluster_put(int2* at, int2 value, int block) {
    const auto offset = reinterpret_cast<int*>(at) - block_memory();
    *reinterpret_cast<int2*>(&memories[static_cast<size_t>(kMemory) * block + offset]) = value;
}

}  // namespace moe_ep

inline void __syncthreads() { wait_at(kAtBlock); }
inline void __syncwarp() { wait_at(kAtWarp); }

template <typename Combine>
uint64_t exchange(uint64_t value, Combine combine) {
    const int first = current / moe_ep::kWarp * moe_ep::kWarp;
    passed[current] = value;
    wait_at(kAtWarp);
    const uint64_t result = combine(passed + first);
    wait_at(kAtWarp);
    return result;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    return exchange(value, [](uint64_t* v) { return *std::max_element(v, v + moe_ep::kWarp); });
}
inline int __reduce_max_sync(unsigned, int value) {
    return exchange(static_cast<unsigned>(value), [](uint64_t* v) {
        int best = INT_MIN;
        for (int i = 0; i < moe_ep::kWarp; ++i) best = max(best, static_cast<int>(v[i]));
        return static_cast<unsigned>(best);
    });
}
inline int __reduce_min_sync(unsigned all, int value) { return ~__reduce_max_sync(all, ~value); }
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
    return exchange(value, [](uint64_t* v) {
        uint64_t sum = 0;
        for (int i = 0; i < moe_ep::kWarp; ++i) sum += v[i];
        return sum;
    });
}
inline unsigned __ballot_sync(unsigned, bool value) {
    return exchange(value, [](uint64_t* v) {
        uint64_t mask = 0;
        for (int i = 0; i < moe_ep::kWarp; ++i) mask |= v[i] << i;
        return mask;
    });
}
inline int __shfl_sync(unsigned, int value, int from) {
    return static_cast<int>(exchange(static_cast<unsigned>(value), [from](uint64_t* v) { return v[from]; }));
}
inline int __shfl_up_sync(unsigned, int value, int step) {
    const int lane = threadIdx.x % moe_ep::kWarp, from = lane >= step ? lane - step : lane;
    return __shfl_sync(0, value, from);
}
inline int __syncthreads_count(bool value) {
    const uint64_t* first = passed + current / blockDim.x * blockDim.x;
    passed[current] = value;
    wait_at(kAtBlock);
    const int count = static_cast<int>(std::count(first, first + blockDim.x, 1));
    wait_at(kAtBlock);
    return count;
}
inline int __ffs(unsigned value) { return __builtin_ffs(static_cast<int>(value)); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
template <typename T> T __ldg(const T* at) { return *at; }
template <typename T> T atomicAdd(T* at, T value) { return std::exchange(*at, *at + value); }
template <typename T> T atomicMax(T* at, T value) { return std::exchange(*at, max(*at, value)); }
template <typename T> T atomicMin(T* at, T value) { return std::exchange(*at, min(*at, value)); }

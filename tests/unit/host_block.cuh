// CUDA's words for a host compiler: the threads of a block are fibers that run one after the other and meet at barriers.
// A test puts this file in the place of kernels/common.cuh.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <functional>
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

enum State { kRuns, kAtWarp, kAtBlock, kDone };
constexpr int kStack = 1 << 16, kMost = 1024;
static ucontext_t scheduler, fibers[kMost];
static std::vector<char> stacks(static_cast<size_t>(kStack) * kMost);
static State states[kMost];
static uint64_t passed[kMost];
static std::function<void()> body;

static void wait_at(State barrier) {
    const int me = threadIdx.x;
    states[me] = barrier;
    swapcontext(&fibers[me], &scheduler);
    threadIdx.x = me;
}
static void run_fiber() {
    body();
    states[threadIdx.x] = kDone;
    swapcontext(&fibers[threadIdx.x], &scheduler);
}

// Every thread to its next barrier; then the warps, or else the block, whose threads are all there.
static bool advance(int threads) {
    bool moved = false;
    for (int t = 0; t < threads; ++t) {
        if (states[t] != kRuns) continue;
        threadIdx.x = t;
        moved = true;
        swapcontext(&scheduler, &fibers[t]);
    }
    for (int warp = 0; warp < threads; warp += moe_ep::kWarp) {
        if (std::count(states + warp, states + warp + moe_ep::kWarp, kAtWarp) != moe_ep::kWarp) continue;
        std::fill(states + warp, states + warp + moe_ep::kWarp, kRuns);
        moved = true;
    }
    const auto done = std::count(states, states + threads, kDone);
    if (done == threads) return false;
    if (done + std::count(states, states + threads, kAtBlock) == threads) {
        std::replace(states, states + threads, kAtBlock, kRuns);
        moved = true;
    }
    if (!moved) throw std::runtime_error("threads of a block wait at different barriers");
    return true;
}

static void launch(int grid, int threads, std::function<void()> kernel) {
    gridDim.x = grid, blockDim.x = threads, body = std::move(kernel);
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
        for (int t = 0; t < threads; ++t) {
            getcontext(&fibers[t]);
            fibers[t].uc_stack.ss_sp = &stacks[static_cast<size_t>(t) * kStack];
            fibers[t].uc_stack.ss_size = kStack;
            makecontext(&fibers[t], run_fiber, 0);
            states[t] = kRuns;
        }
        while (advance(threads)) {
        }
    }
}

inline void __syncthreads() { wait_at(kAtBlock); }
inline void __syncwarp() { wait_at(kAtWarp); }

template <typename Combine>
uint64_t exchange(uint64_t value, Combine combine) {
    const int first = threadIdx.x / moe_ep::kWarp * moe_ep::kWarp;
    passed[threadIdx.x] = value;
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
    passed[threadIdx.x] = value;
    wait_at(kAtBlock);
    const int count = static_cast<int>(std::count(passed, passed + blockDim.x, 1));
    wait_at(kAtBlock);
    return count;
}
inline int __ffs(unsigned value) { return __builtin_ffs(static_cast<int>(value)); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
template <typename T> T __ldg(const T* at) { return *at; }
template <typename T> T atomicAdd(T* at, T value) { return std::exchange(*at, *at + value); }
template <typename T> T atomicMax(T* at, T value) { return std::exchange(*at, max(*at, value)); }
template <typename T> T atomicMin(T* at, T value) { return std::exchange(*at, min(*at, value)); }

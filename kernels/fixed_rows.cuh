// Planner of equal rows: one block a domain. moe_ep/replica/planners.py says what it computes; the bits are the same.
//
// The fullest rank fills the emptiest one up, again and again, so a rank is filled once and by one other alone. That is
// a chain of at most R steps for one warp, lanes along the ranks, then along the experts of the fullest.
#pragma once

#include "plan.cuh"

namespace moe_ep {
namespace {

constexpr int kFixedThreads = 256;

__host__ __device__ int64_t fixed_ints(int64_t R, int64_t E) { return 2 * E + R; }

// The rank with most rows over its share, or with fewest; the lowest of equal ones.
__device__ int extreme_rank(const int* over, int R, int sign, int lane) {
    int best = INT32_MIN, mine = R;
    for (int r = lane; r < R; r += kWarp)
        if (sign * over[r] > best || mine == R) best = sign * over[r], mine = r;
    const int top = __reduce_max_sync(kAll, best);
    return R - static_cast<int>(__reduce_max_sync(kAll, best == top && mine < R ? static_cast<unsigned>(R - mine) : 0u));
}

// The expert of `rank` with most rows left; the lowest of equal ones.
__device__ int largest_left(const int* left, int first, int L, int lane) {
    int best = -1, mine = L;
    for (int l = lane; l < L; l += kWarp)
        if (left[first + l] > best) best = left[first + l], mine = l;
    const int top = __reduce_max_sync(kAll, best);
    return first + L - static_cast<int>(__reduce_max_sync(kAll, best == top ? static_cast<unsigned>(L - mine) : 0u));
}

// Rows from `from` until `to` has its share; its slots hold the experts that gave some, ascending.
__device__ void fill(const Plan& p, const Domain& d, int* left, int* given, int from, int to, int rows, int lane) {
    const int first_rank = blockIdx.x * d.R, first_expert = blockIdx.x * d.E, all_ranks = gridDim.x * d.R;
    const int own = from * d.L;
    for (int l = lane; l < d.L; l += kWarp) given[own + l] = 0;
    __syncwarp();
    while (rows > 0) {
        const int expert = largest_left(left, own, d.L, lane);
        const int taken = min(rows, left[expert]);
        __syncwarp();
        if (lane == 0) left[expert] -= taken, given[expert] = taken;
        rows -= taken;
        __syncwarp();
    }
    int used = 0;
    for (int start = 0; start < d.L; start += kWarp) {
        const int expert = own + start + lane, taken = start + lane < d.L ? given[expert] : 0;
        const unsigned all = __ballot_sync(kAll, taken > 0);
        if (taken > 0) {
            const int slot = used + __popc(all & ((1u << lane) - 1));
            p.instances[static_cast<int64_t>(first_rank + to) * d.S + slot] = first_expert + expert;
            p.quota[static_cast<int64_t>(first_expert + expert) * all_ranks + first_rank + to] = taken;
        }
        used += __popc(all);
    }
}

__global__ void __launch_bounds__(kFixedThreads) plan_fixed_rows(Plan p) {
    extern __shared__ __align__(16) int shared[];
    const int E = p.experts / gridDim.x, lane = threadIdx.x % kWarp;
    const Domain d{p.ranks, E, E / p.ranks, p.slots, p.ranks * p.slots, 1};
    const int first_rank = blockIdx.x * d.R, first_expert = blockIdx.x * d.E, all_ranks = gridDim.x * d.R;
    int* next = shared;
    int *left = carve(next, d.E), *given = carve(next, d.E), *over = carve(next, d.R);
    Orders orders;
    orders.total = left;
    sum_sources(p, d, orders);
    int64_t sum = 0;
    for (int e = 0; e < d.E; ++e) sum += left[e];
    const int share = static_cast<int>(sum / d.R), more = static_cast<int>(sum % d.R);
    __syncthreads();
    for (int r = threadIdx.x; r < d.R; r += blockDim.x) {
        int rows = 0;
        for (int e = r * d.L; e < (r + 1) * d.L; ++e) rows += left[e];
        over[r] = rows - share - (r < more);
    }
    for (int64_t i = threadIdx.x; i < static_cast<int64_t>(d.E) * all_ranks; i += blockDim.x)
        p.quota[static_cast<int64_t>(first_expert) * all_ranks + i] = 0;
    for (int i = threadIdx.x; i < d.Q; i += blockDim.x) p.instances[static_cast<int64_t>(first_rank) * d.S + i] = -1;
    __syncthreads();
    if (threadIdx.x < kWarp) {
        for (int from; over[from = extreme_rank(over, d.R, 1, lane)] > 0;) {
            const int to = extreme_rank(over, d.R, -1, lane), rows = -over[to];
            __syncwarp();
            if (lane == 0) over[to] = 0, over[from] -= rows;
            __syncwarp();
            fill(p, d, left, given, from, to, rows, lane);
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < d.E; e += blockDim.x)
        p.quota[static_cast<int64_t>(first_expert + e) * all_ranks + first_rank + e / d.L] = left[e];
    if (threadIdx.x == 0) p.peak[blockIdx.x] = p.bound[blockIdx.x] = share + (more > 0);
}

}  // namespace
}  // namespace moe_ep

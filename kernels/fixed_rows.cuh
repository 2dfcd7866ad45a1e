// Planner of equal rows: one block a domain. moe_ep/replica/planners.py says what it computes; the bits are the same.
//
// The fullest rank fills the emptiest one up, again and again, so a rank is filled once and by one other alone. That is
// a chain of at most R steps for one warp. What each rank has over its share lies in the lanes' registers, by rank;
// expert l of a rank is touched by lane l % 32 alone.
#pragma once

#include "plan_orders.cuh"

namespace moe_ep {
namespace {

__host__ __device__ int64_t fixed_ints(int64_t R, int64_t E) { return 2 * E + R; }

struct Extreme {
    int rank, over;
};

// The rank with most rows over its share (sign 1) or fewest (-1), the lowest of equal ones, on every lane.
template <int kPerLane>
__device__ __forceinline__ Extreme extreme_rank(const int (&over)[kPerLane], int R, int sign) {
    const int lane = threadIdx.x % kWarp;
    int best = INT32_MIN, at = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j)
        if (lane * kPerLane + j < R && sign * over[j] > best) best = sign * over[j], at = j;
    const int top = __reduce_max_sync(kAll, best), holder = first_lane(best == top);
    return {holder * kPerLane + __shfl_sync(kAll, at, holder), sign * top};
}

struct Largest {
    int expert, rows;
};

// The expert of a rank with most rows left, the lowest of equal ones, and these rows.
__device__ __forceinline__ Largest largest_left(const int* left, int first, int L) {
    int best = -1, mine = INT32_MAX;
    for (int e = first + threadIdx.x % kWarp; e < first + L; e += kWarp)
        if (left[e] > best) best = left[e], mine = e;
    const int top = __reduce_max_sync(kAll, best);
    return {__reduce_min_sync(kAll, best == top ? mine : INT32_MAX), top};
}

// Rows from `from` until `to` has its share; its slots hold the experts that gave some, ascending.
__device__ void fill(const Plan& p, const Domain& d, int* left, int* given, int from, int to, int rows) {
    const int own = from * d.L, lane = threadIdx.x % kWarp;
    int* slots = p.instances + static_cast<int64_t>(d.first_rank() + to) * d.S;
    int* quota = p.quota + static_cast<int64_t>(d.first_expert()) * d.all_ranks() + d.first_rank() + to;
    for (int l = lane; l < d.L; l += kWarp) given[own + l] = 0;
    while (rows > 0) {
        const Largest most = largest_left(left, own, d.L);
        const int taken = min(rows, most.rows);
        if ((most.expert - own) % kWarp == lane) left[most.expert] -= taken, given[most.expert] = taken;
        rows -= taken;
    }
    int used = 0;
    for (int start = 0; start < d.L; start += kWarp) {
        const int expert = own + start + lane, taken = start + lane < d.L ? given[expert] : 0;
        const unsigned all = __ballot_sync(kAll, taken > 0);
        if (taken > 0) {
            slots[used + __popc(all & ((1u << lane) - 1))] = d.first_expert() + expert;
            quota[static_cast<int64_t>(expert) * d.all_ranks()] = taken;
        }
        used += __popc(all);
    }
}

// All steps, by one warp.
template <int kPerLane>
__device__ void level(const Plan& p, const Domain& d, int* left, int* given, const int* over_R) {
    const int lane = threadIdx.x % kWarp;
    int over[kPerLane];
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) over[j] = lane * kPerLane + j < d.R ? over_R[lane * kPerLane + j] : 0;
    for (;;) {
        const Extreme from = extreme_rank(over, d.R, 1), to = extreme_rank(over, d.R, -1);
        if (from.over <= 0) return;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            if (lane * kPerLane + j == from.rank) over[j] += to.over;
            if (lane * kPerLane + j == to.rank) over[j] = 0;
        }
        fill(p, d, left, given, from.rank, to.rank, -to.over);
    }
}

// Quotas 0 and slots -1, for `fill` to write into.
__device__ void clear_plan(const Plan& p, const Domain& d) {
    int* quota = p.quota + static_cast<int64_t>(d.first_expert()) * d.all_ranks();
    int* instances = p.instances + static_cast<int64_t>(d.first_rank()) * d.S;
    for (int64_t i = threadIdx.x; i < static_cast<int64_t>(d.E) * d.all_ranks(); i += blockDim.x) quota[i] = 0;
    for (int i = threadIdx.x; i < d.Q; i += blockDim.x) instances[i] = -1;
}

template <int kPerLane>
__global__ void __launch_bounds__(kPlanThreads) plan_fixed_rows(Plan p) {
    const Domain d = domain_of(p, blockIdx.x, gridDim.x);
    int* next = block_memory();
    int *left = carve(next, d.E), *given = carve(next, d.E), *over = carve(next, d.R);
    clear_plan(p, d);
    sum_sources(p, d, left);
    for (int r = threadIdx.x; r < d.R; r += blockDim.x) {
        over[r] = 0;
        for (int e = r * d.L; e < (r + 1) * d.L; ++e) over[r] += left[e];
    }
    __syncthreads();
    const unsigned sum = sum_and_most(d, over).x;
    const int share = static_cast<int>(sum / d.R), more = static_cast<int>(sum % d.R);
    __syncthreads();
    for (int r = threadIdx.x; r < d.R; r += blockDim.x) over[r] -= share + (r < more);
    __syncthreads();
    if (threadIdx.x < kWarp) level<kPerLane>(p, d, left, given, over);
    __syncthreads();
    const int64_t all_ranks = d.all_ranks();
    int* quota = p.quota + d.first_expert() * all_ranks + d.first_rank();
    for (int e = threadIdx.x; e < d.E; e += blockDim.x) quota[e * all_ranks + e / d.L] = left[e];
    if (threadIdx.x == 0) p.peak[d.index] = p.bound[d.index] = share + (more > 0);
}

}  // namespace
}  // namespace moe_ep

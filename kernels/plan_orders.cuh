// Before a planner's first step: rows of each expert, the orders of ranks and experts, and what no plan can go below.
#pragma once

#include "plan.cuh"

namespace moe_ep {
namespace {

__device__ __forceinline__ int4 plus(int4 a, int4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
__device__ __forceinline__ int plus(int a, int b) { return a + b; }
__device__ __forceinline__ void add_to(int* at, int4 v) {
    atomicAdd(at, v.x), atomicAdd(at + 1, v.y), atomicAdd(at + 2, v.z), atomicAdd(at + 3, v.w);
}
__device__ __forceinline__ void add_to(int* at, int v) { atomicAdd(at, v); }

// Columns of one or four experts a thread, sources in turn. All loads of a batch are under way before one is added.
template <typename V>
__device__ void add_sources(const Plan& p, const Domain& d, int* total) {
    constexpr int kWide = sizeof(V) / sizeof(int), kBatch = 8;
    const int columns = d.E / kWide, threads = blockDim.x;
    const int parts = max(1, threads / columns), part = threadIdx.x / columns;
    for (int c = threadIdx.x % columns; part < parts && c < columns; c += threads) {
        V own{};
        const int* column = p.load + d.first_expert() + c * kWide;
        for (int first = part; first < p.sources; first += kBatch * parts) {
            V batch[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int64_t at = static_cast<int64_t>(first + i * parts) * p.experts;
                batch[i] = first + i * parts < p.sources ? __ldg(reinterpret_cast<const V*>(column + at)) : V{};
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) own = plus(own, batch[i]);
        }
        add_to(total + c * kWide, own);
    }
}

// `total` is [E].
__device__ void sum_sources(const Plan& p, const Domain& d, int* total) {
    for (int e = threadIdx.x; e < d.E; e += blockDim.x) total[e] = 0;
    __syncthreads();
    if (d.E % 4 == 0 && reinterpret_cast<uintptr_t>(p.load) % sizeof(int4) == 0) add_sources<int4>(p, d, total);
    else add_sources<int>(p, d, total);
    __syncthreads();
}

// A warp counts how many ranks come before one, in both orders.
__device__ void order_ranks(const Domain& d, const Orders& orders) {
    const int lane = threadIdx.x % kWarp;
    for (int r = threadIdx.x / kWarp; r < d.R; r += kPlanWarps) {
        const int mine = orders.at_home[r];
        int above = 0, below = 0;
        for (int first = 0; first < d.R; first += kWarp) {
            const int other = first + lane, rows = other < d.R ? orders.at_home[other] : mine;
            const bool tied = rows == mine && other < r;
            above += __popc(__ballot_sync(kAll, rows > mine || tied));
            below += __popc(__ballot_sync(kAll, rows < mine || tied));
        }
        if (lane == 0) orders.place[r] = above, orders.most_first[above] = r, orders.least_first[below] = r;
    }
}

__device__ void find_orders(const Domain& d, const Orders& orders) {
    for (int r = threadIdx.x; r < d.R; r += blockDim.x) {
        int rows = 0;
        for (int e = r * d.L; e < (r + 1) * d.L; ++e) rows += orders.total[e];
        orders.at_home[r] = rows;
    }
    for (int e = threadIdx.x; e < d.E; e += blockDim.x) {
        const int first = e / d.L * d.L, rows = orders.total[e];
        int before = 0;
        for (int other = first; other < first + d.L; ++other)
            before += orders.total[other] > rows || (orders.total[other] == rows && other < e);
        orders.expert_at[first + before] = e;
        orders.rows_at[first + before] = rows;
    }
    __syncthreads();
    order_ranks(d, orders);
    __syncthreads();
}

// Rows of all ranks and of the most loaded one, on every thread.
__device__ uint2 sum_and_most(const Domain& d, const int* rows_R) {
    unsigned sum = 0, most = 0;
    for (int r = threadIdx.x % kWarp; r < d.R; r += kWarp) sum += rows_R[r], most = max(most, unsigned(rows_R[r]));
    return {__reduce_add_sync(kAll, sum), __reduce_max_sync(kAll, most)};
}

// A warp counts how many experts come before one.
__device__ void sort_experts(const Domain& d, const Orders& orders) {
    const int lane = threadIdx.x % kWarp;
    for (int e = threadIdx.x / kWarp; e < d.E; e += kPlanWarps) {
        const int rows = orders.total[e];
        int count = 0;
        for (int other = lane; other < d.E; other += kWarp)
            count += orders.total[other] > rows || (orders.total[other] == rows && other < e);
        const unsigned before = __reduce_add_sync(kAll, static_cast<unsigned>(count));
        if (lane == 0) orders.sorted_rows[before] = rows, orders.sorted_place[before] = orders.place[e / d.L];
    }
    __syncthreads();
}

// Largest mean, over the k most loaded ranks, of the rows that cannot leave them: at most S*(R-k) experts can.
__device__ void find_bound(const Domain& d, const Orders& orders, int* bound) {
    sort_experts(d, orders);
    const int lane = threadIdx.x % kWarp;
    for (int k = 1 + threadIdx.x / kWarp; k < d.R; k += kPlanWarps) {
        int gone = 0, stuck = 0;
        for (int first = 0; first < d.E; first += kWarp) {
            const int at = first + lane;
            const bool inside = at < d.E && orders.sorted_place[at] < k;
            const unsigned all = __ballot_sync(kAll, inside);
            if (inside && gone + __popc(all & ((1u << lane) - 1)) >= d.S * (d.R - k)) stuck += orders.sorted_rows[at];
            gone += __popc(all);
        }
        const int rows = static_cast<int>(__reduce_add_sync(kAll, static_cast<unsigned>(stuck)));
        if (lane == 0) atomicMax(bound, static_cast<int>(div_up(rows, k)));
    }
    __syncthreads();
}

}  // namespace
}  // namespace moe_ep

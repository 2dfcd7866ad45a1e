// Planner of replicas: one cluster of blocks a domain, one warp a greedy run. It tries the sixteen rules for the mean
// as threshold, which mostly is reached, then for narrower ones.
//
// Every block keeps loads and orders itself, runs its share, and tells all blocks how its runs came out. So all know
// which run is best, and only the block that has it keeps it and writes the plan in the end: no run is ever moved.
#pragma once

#include "plan_orders.cuh"
#include "plan_result.cuh"
#include "plan_run.cuh"

namespace moe_ep {
namespace {

constexpr int kThresholds = 4;  // of a round after the first

// Largest load and pieces of a run, and its number among those of a wave. The smallest of all three is the best.
struct Score {
    int peak, pieces, run;
};

__device__ bool before(int2 a, int2 b) { return a.x < b.x || (a.x == b.x && a.y < b.y); }

__device__ Score best_of(const int2* scores, int count) {
    int2 mine = make_int2(INT32_MAX, INT32_MAX);
    int at = INT32_MAX;
    for (int i = threadIdx.x % kWarp; i < count; i += kWarp)
        if (before(scores[i], mine)) mine = scores[i], at = i;
    const int peak = __reduce_min_sync(kAll, mine.x);
    const int pieces = __reduce_min_sync(kAll, mine.x == peak ? mine.y : INT32_MAX);
    return {peak, pieces, __reduce_min_sync(kAll, mine.x == peak && mine.y == pieces ? at : INT32_MAX)};
}

// Values low, low + step, ... of a round.
struct Thresholds {
    int low, step, count;
};

struct Search {
    Domain d;
    Memory m;
    int block, blocks, warp;  // of the cluster, and this warp of its block
    int owner;  // block that has the best run
    int waves;  // so far
};

// Sixteen runs for each threshold, as many at a time as there are warps. Returns the best, if it lies below `limit`.
template <typename Key, int kPerLane>
__device__ __forceinline__ int try_round(Search& s, const Thresholds& thresholds, int limit) {
    int2 round = make_int2(INT32_MAX, INT32_MAX);
    const int runs = thresholds.count * kRules, wave = s.blocks * kPlanWarps, own = s.block + s.blocks * s.warp;
    for (int first = 0; first < runs; first += wave, ++s.waves) {
        int2* scores = s.m.scores + s.waves % 2 * kWave;  // some block may still read those of the wave before
        int2 score = make_int2(INT32_MAX, INT32_MAX);
        if (const int run = first + own; run < runs) {
            const int tau = thresholds.low + run / kRules * thresholds.step;
            score = greedy<Key, kPerLane>(s.m.own, s.d, s.m.orders, tau, rule_of(static_cast<unsigned>(run) % kRules));
        }
        if (const int lane = threadIdx.x % kWarp; lane < s.blocks) cluster_put(scores + own, score, lane);
        cluster_barrier();
        const Score best = best_of(scores, wave);
        if (best.peak >= limit || !before(make_int2(best.peak, best.pieces), round)) continue;
        round = make_int2(best.peak, best.pieces);
        s.owner = best.run % s.blocks;
        if (best.run == own) keep_run(s.m.winner, s.m.own, s.d, s.m.orders);
    }
    return min(limit, round.x);
}

// Narrows the threshold; returns the largest load of the best run.
template <typename Key, int kPerLane>
__device__ __forceinline__ int search(Search& s, const Plan& p, const uint2& loads) {
    const int mean = static_cast<int>(div_up(loads.x, s.d.R));
    const int aim = mean + static_cast<int>(static_cast<int64_t>(mean) * p.tolerance / 1000);
    if (threadIdx.x == 0) *s.m.bound = mean;
    cluster_barrier();  // no block is written to before it runs; and all quotas are cleared
    int best = static_cast<int>(loads.y);
    Thresholds next{aim, best - aim, 1};
    for (bool first = true; next.count > 0 && best > max(aim, *s.m.bound); first = false) {
        best = try_round<Key, kPerLane>(s, next, best);
        if (first && best > mean) find_bound(s.d, s.m.orders, s.m.bound);  // mostly the mean is reached, which is one
        if (next.step == 1) break;
        next.low = max(aim + 1, best - next.step);
        next.step = max(1, static_cast<int>(div_up(best - next.low, kThresholds)));
        next.count = best > next.low ? static_cast<int>(div_up(best - next.low, next.step)) : 0;
    }
    __syncthreads();
    return best;
}

template <int kPerLane>
__global__ void __launch_bounds__(kPlanThreads, 1) plan_replicas(Plan p) {
    const int blocks = cluster_blocks();
    const Domain d = domain_of(p, blockIdx.x / blocks, gridDim.x / blocks);
    const int warp = threadIdx.x / kWarp;
    Search s{d, carve_memory(block_memory(), d), block_in_cluster(), blocks, warp, 0, 0};
    clear_quotas(p, d, s.block, blocks);
    sum_sources(p, d, s.m.orders.total);
    find_orders(d, s.m.orders);
    keep_masters(s.m.winner, d, s.m.orders);
    const uint2 before = sum_and_most(d, s.m.orders.at_home);
    const int best = wide_enough<uint32_t, kPerLane>(before.y, d.L) ? search<uint32_t, kPerLane>(s, p, before)
                                                                     : search<uint64_t, kPerLane>(s, p, before);
    if (s.block != s.owner) return;
    while (drop_one(s.m, d, best)) {
    }
    write_plan(p, s.m.winner, d);
    const uint2 after = sum_and_most(d, s.m.winner.rows);
    if (threadIdx.x == 0) p.peak[d.index] = after.y, p.bound[d.index] = *s.m.bound;
}

}  // namespace
}  // namespace moe_ep

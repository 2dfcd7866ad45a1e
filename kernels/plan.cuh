// What the planners share: a plan's arguments, its domains, and what a block keeps in shared memory.
//
// moe_ep/replica/greedy.py and planners.py say what is computed and why; every integer here is theirs, and every tie is
// broken alike, so the plans agree bit for bit. Device code only, so that a test can compile it for the host.
#pragma once

#include "cluster.cuh"

namespace moe_ep {
namespace {

constexpr int kRules = 16;
constexpr int kPlanThreads = 512;
constexpr int kPlanWarps = kPlanThreads / kWarp;  // one run of a rule each
constexpr int kPlanBlocks = 8;  // of a cluster, the most that every GPU with clusters can hold
constexpr int kWave = kPlanBlocks * kPlanWarps;  // most runs at a time
constexpr int kMostRanks = 512;  // of a domain: 16 in the registers of each lane
constexpr int kClosed = INT32_MIN;  // bit of an expert that no rank could take

struct Plan {
    const int* load;  // [sources, experts]
    int sources, experts, ranks, slots, min_quota, tolerance;  // experts of all domains, ranks of one
    int *quota, *instances;
    int64_t *peak, *bound;
};

// One domain of `count`: R ranks, E experts, Q = R * S slots.
struct Domain {
    int R, E, L, S, Q, min_quota, index, count;
    __device__ int first_rank() const { return index * R; }
    __device__ int first_expert() const { return index * E; }
    __device__ int all_ranks() const { return count * R; }
};

__device__ Domain domain_of(const Plan& p, int index, int count) {
    const int E = p.experts / count;
    return {p.ranks, E, E / p.ranks, p.slots, p.ranks * p.slots, p.min_quota, index, count};
}

// Experts along the ranks, within one the expert with most rows first, is the order of all `at` below.
struct Orders {
    int* total;  // [E]: rows of each expert
    int* at_home;  // [R]: rows of each rank's own experts
    int* place;  // [R]: the most loaded rank first
    int *most_first, *least_first;  // [R]: ranks in the two orders of the rules
    int *expert_at, *rows_at;  // [E]
    int *sorted_place, *sorted_rows;  // [E]: of experts, most rows first: their home's place; made for the slot bound
};

// What a run leaves. A rank's used slots come first.
struct Run {
    int* rest;  // [E]: rows still at home
    int *rows, *left;  // [R]: rows that a rank computes, its unused slots
    int *slot_expert, *slot_rows;  // [Q]
};

struct Memory {
    unsigned long long *chosen, *room;  // the replica to drop; [E]: rows that all instances can take
    int2* scores;  // [2, kWave]: largest load and pieces of each run of a wave
    int* bound;
    Orders orders;
    Run winner, own;  // the best run of this block so far, this warp's
};

__host__ __device__ int64_t run_ints(int64_t R, int64_t E, int64_t S) { return E + 2 * R + 2 * R * S; }
__host__ __device__ int64_t plan_ints(int64_t R, int64_t E, int64_t S) {
    return 2 * (1 + E) + 4 * kWave + 1 + 4 * R + 5 * E + (1 + kPlanWarps) * run_ints(R, E, S);
}

__device__ int* carve(int*& next, int count) {
    int* here = next;
    next += count;
    return here;
}

__device__ Run carve_run(int*& next, const Domain& d) {
    Run run;
    run.rest = carve(next, d.E);
    run.rows = carve(next, d.R);
    run.left = carve(next, d.R);
    run.slot_expert = carve(next, d.Q);
    run.slot_rows = carve(next, d.Q);
    return run;
}

__device__ Memory carve_memory(int* next, const Domain& d) {
    Memory m;
    m.chosen = reinterpret_cast<unsigned long long*>(carve(next, 2));
    m.room = reinterpret_cast<unsigned long long*>(carve(next, 2 * d.E));
    m.scores = reinterpret_cast<int2*>(carve(next, 4 * kWave));
    m.bound = carve(next, 1);
    m.orders.total = carve(next, d.E);
    m.orders.at_home = carve(next, d.R);
    m.orders.place = carve(next, d.R);
    m.orders.most_first = carve(next, d.R);
    m.orders.least_first = carve(next, d.R);
    m.orders.expert_at = carve(next, d.E);
    m.orders.rows_at = carve(next, d.E);
    m.orders.sorted_place = carve(next, d.E);
    m.orders.sorted_rows = carve(next, d.E);
    m.winner = carve_run(next, d);
    next += threadIdx.x / kWarp * run_ints(d.R, d.E, d.S);
    m.own = carve_run(next, d);
    return m;
}

__device__ __forceinline__ int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The first lane on which `mine` holds; -1 where it holds on none.
__device__ __forceinline__ int first_lane(bool mine) { return __ffs(__ballot_sync(kAll, mine)) - 1; }

}  // namespace
}  // namespace moe_ep

// What a greedy run looks at in every rank, in the registers of a warp's lanes, and the choices of a step.
//
// Ranks stand in the run's own order: lane i holds those at places i*kPerLane and behind. So the first place is the
// first lane, and a tie costs nothing.
#pragma once

#include "plan.cuh"

namespace moe_ep {
namespace {

struct Rule {
    bool ascending, largest, fill, careful;
};

__device__ __forceinline__ Rule rule_of(unsigned bits) {
    return {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0};
}

template <int kPerLane>
struct Ranks {
    int rank[kPerLane];
    int need[kPerLane], slack[kPerLane], avail[kPerLane], left[kPerLane];  // left: unused slots
    int give[kPerLane], giver[kPerLane];  // at most how many rows the rank's next piece has, and of which expert; 0: none
    unsigned held[kPerLane];  // bits of the experts in its slots, modulo 32
};

template <int kPerLane>
__device__ __forceinline__ int pick(const int (&values)[kPerLane], int at) {
    int value = values[0];
#pragma unroll
    for (int j = 1; j < kPerLane; ++j)
        if (j == at) value = values[j];
    return value;
}

// `at` is for the lane itself: which of its ranks. The rest is the same on all lanes; lane -1: none.
struct Source {
    int lane, at, rank, expert, want, need;
};
struct Target {
    int lane, at, room;
    bool last;  // its last slot
};

// Experts are counted in the order of `Orders::expert_at`, so a rank's first one has most rows, and gives first.
template <int kPerLane>
__device__ __forceinline__ void start(Ranks<kPerLane>& ranks, const Run& run, const Domain& d, const Orders& orders,
                                      int tau, bool ascending) {
    const int lane = threadIdx.x % kWarp;
    const int* rank_at = ascending ? orders.least_first : orders.most_first;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const int place = lane * kPerLane + j, rank = place < d.R ? rank_at[place] : -1;
        const int rows = rank < 0 ? 0 : orders.at_home[rank], most = rank < 0 ? 0 : orders.rows_at[rank * d.L];
        ranks.rank[j] = rank;
        ranks.avail[j] = rows;
        ranks.need[j] = rank < 0 ? 0 : max(rows - tau, 0);
        ranks.slack[j] = rank < 0 ? 0 : max(tau - rows, 0);
        ranks.left[j] = rank < 0 ? 0 : d.S;
        ranks.give[j] = ranks.need[j] > 0 && most >= d.min_quota ? min(max(ranks.need[j], d.min_quota), most) : 0;
        ranks.giver[j] = rank * d.L;
        ranks.held[j] = 0;
    }
    for (int e = lane; e < d.E; e += kWarp) run.rest[e] = orders.rows_at[e];
    __syncwarp();
}

// The rank that gives the next piece: the one that can give most, or the first in the order.
template <int kPerLane>
__device__ __forceinline__ Source choose_source(const Ranks<kPerLane>& ranks, bool largest) {
    unsigned best = 0;
    int at = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const unsigned key = largest ? ranks.give[j] : min(ranks.give[j], 1);
        if (key > best) best = key, at = j;
    }
    const unsigned top = __reduce_max_sync(kAll, best);
    if (top == 0) return {-1, 0, 0, 0, 0, 0};
    const int lane = first_lane(best == top);
    return {lane,
            at,
            __shfl_sync(kAll, pick(ranks.rank, at), lane),
            __shfl_sync(kAll, pick(ranks.giver, at), lane),
            __shfl_sync(kAll, pick(ranks.give, at), lane),
            __shfl_sync(kAll, pick(ranks.need, at), lane)};
}

// Bits of the lane's ranks that have an unused slot and do not hold the expert.
template <int kPerLane>
__device__ __forceinline__ unsigned usable(const Ranks<kPerLane>& ranks, const Run& run, const Domain& d, int expert) {
    const unsigned bit = 1u << (expert & 31);
    unsigned usable = 0, doubtful = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        if (ranks.left[j] == 0) continue;
        usable |= 1u << j;
        if (ranks.held[j] & bit) doubtful |= 1u << j;
    }
    for (; doubtful != 0; doubtful &= doubtful - 1) {
        const int j = __ffs(doubtful) - 1, first = pick(ranks.rank, j) * d.S;
#pragma unroll 1
        for (int slot = first; slot < first + d.S - pick(ranks.left, j); ++slot)
            if (run.slot_expert[slot] == expert) usable &= ~(1u << j);
    }
    return usable;
}

// The rank with slack that takes the piece: its widest one, or with `fill` the widest that is filled whole. A rank with
// slack was never a source, so it is not the expert's home.
template <int kPerLane>
__device__ __forceinline__ Target choose_target(const Ranks<kPerLane>& ranks, const Domain& d, unsigned usable, int want,
                                                bool fill) {
    unsigned best = 0;
    int at = 0, rank = INT32_MAX;  // where nothing is able, best stays 0 and they do not matter
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const unsigned slack = ranks.slack[j];
        const unsigned filled = ranks.slack[j] <= want ? 0x80000000u + slack : 0x80000000u - slack;
        const bool able = (usable >> j & 1) && ranks.slack[j] >= d.min_quota;
        const unsigned key = !able ? 0 : fill ? filled : slack;
        const bool better = key > best || (key == best && ranks.rank[j] < rank);
        best = better ? key : best, at = better ? j : at, rank = better ? ranks.rank[j] : rank;
    }
    const unsigned top = __reduce_max_sync(kAll, best);
    if (top == 0) return {-1, 0, 0, true};
    unsigned those = __ballot_sync(kAll, best == top);
    const unsigned last = __ballot_sync(kAll, pick(ranks.left, at) == 1);
    if (those & (those - 1)) {  // equal ones: the lowest rank
        const int lowest = __reduce_min_sync(kAll, best == top ? rank : INT32_MAX);
        those = __ballot_sync(kAll, best == top && rank == lowest);
    }
    const int lane = __ffs(those) - 1, room = fill ? abs(static_cast<int>(top - 0x80000000u)) : top;
    return {lane, at, room, (last >> lane & 1) != 0};
}

// The next source in the order that can take the piece and give away as much more of its own.
template <int kPerLane>
__device__ __forceinline__ Target choose_relay(const Ranks<kPerLane>& ranks, unsigned usable, const Source& source) {
    const int lane = threadIdx.x % kWarp;
    int at = -1;
#pragma unroll
    for (int j = kPerLane - 1; j >= 0; --j) {
        const bool later = lane > source.lane || (lane == source.lane && j > source.at);
        const bool able = ranks.need[j] > 0 && ranks.avail[j] - ranks.need[j] >= source.want;
        if (later && able && (usable >> j & 1)) at = j;
    }
    return {first_lane(at >= 0), at, source.want, false};
}

}  // namespace
}  // namespace moe_ep

// One greedy run, which is what one warp does: a chain of some R steps, each of them three or four warp reductions.
//
// A step needs no memory but the experts of the one or two ranks that it changes. Shared memory is private to a lane
// until the run ends: expert l of a rank to lane l % 32, slots to the lane that holds their rank. So there is nothing to
// wait for.
#pragma once

#include "plan_choose.cuh"

namespace moe_ep {
namespace {

struct Given {
    int rows, expert;
};

// What a rank gives next. On the way `expert`, if it is one of them, loses `moved` rows, or is closed where none moved.
__device__ __forceinline__ Given find_giver(const Run& run, const Domain& d, bool largest, int rank, int need, int expert,
                                            int moved) {
    const int first = rank * d.L, wish = max(need, d.min_quota);
    int best = 0, most = 0, mine = INT32_MAX;
#pragma unroll 1
    for (int e = first + threadIdx.x % kWarp; e < first + d.L; e += kWarp) {
        int rows = run.rest[e];
        if (e == expert) run.rest[e] = rows = moved > 0 ? rows - moved : rows | kClosed;
        const int could = rows < d.min_quota ? 0 : min(wish, rows);  // closed ones are negative
        const int key = largest ? could : min(could, 1);
        if (key > best) best = key, most = could, mine = e;
    }
    if (need == 0) return {0, 0};
    const int top = __reduce_max_sync(kAll, best);
    unsigned those = __ballot_sync(kAll, best == top);
    if (d.L > kWarp && (those & (those - 1))) {
        const int earliest = __reduce_min_sync(kAll, best == top ? mine : INT32_MAX);
        those = __ballot_sync(kAll, best == top && mine == earliest);
    }
    const int lane = __ffs(those) - 1;  // where none gives, all have 0 rows to give
    return {__shfl_sync(kAll, most, lane), __shfl_sync(kAll, mine, lane)};
}

// A slot of the target takes a piece, as one with slack or as a relay.
template <int kPerLane>
__device__ __forceinline__ void take(Ranks<kPerLane>& ranks, const Run& run, const Domain& d, const Target& target,
                                     int expert, int rows, bool relay) {
    const bool here = threadIdx.x % kWarp == target.lane;
    if (here) {
        const int slot = (pick(ranks.rank, target.at) + 1) * d.S - pick(ranks.left, target.at);
        run.slot_expert[slot] = expert;
        run.slot_rows[slot] = rows;
    }
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const bool mine = here && j == target.at;
        ranks.left[j] -= mine;
        ranks.held[j] |= mine ? 1u << (expert & 31) : 0;
        ranks.need[j] += mine && relay ? rows : 0;
        ranks.slack[j] -= mine && !relay ? rows : 0;
    }
}

template <int kPerLane>
__device__ __forceinline__ void set_giver(Ranks<kPerLane>& ranks, int lane, int at, const Given& given) {
    const bool here = threadIdx.x % kWarp == lane;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        ranks.give[j] = here && j == at ? given.rows : ranks.give[j];
        ranks.giver[j] = here && j == at ? given.expert : ranks.giver[j];
    }
}

// The source has given `rows`, and needs to give `need` more.
template <int kPerLane>
__device__ __forceinline__ void give(Ranks<kPerLane>& ranks, const Source& source, int rows, int need) {
    const bool here = threadIdx.x % kWarp == source.lane;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const bool mine = here && j == source.at;
        ranks.avail[j] -= mine ? rows : 0;
        ranks.need[j] = mine ? need : ranks.need[j];
    }
}

// Moves the piece, or closes its expert where there is no target.
template <int kPerLane>
__device__ __forceinline__ void move_piece(Ranks<kPerLane>& ranks, const Run& run, const Domain& d, const Source& source,
                                           const Target& target, bool relay, bool largest) {
    const int rows = target.lane < 0 ? 0 : min(source.want, target.room), need = max(source.need - rows, 0);
    take(ranks, run, d, target, source.expert, rows, relay);
    give(ranks, source, rows, need);
    set_giver(ranks, source.lane, source.at, find_giver(run, d, largest, source.rank, need, source.expert, rows));
    if (!relay) return;
    const int rank = __shfl_sync(kAll, pick(ranks.rank, target.at), target.lane);
    const int its_need = __shfl_sync(kAll, pick(ranks.need, target.at), target.lane);
    set_giver(ranks, target.lane, target.at, find_giver(run, d, largest, rank, its_need, -1, 0));
}

// Writes down what each rank computes and which slots it has left; returns the largest load.
template <int kPerLane>
__device__ __forceinline__ int finish(const Ranks<kPerLane>& ranks, const Run& run, const Domain& d) {
    int peak = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        if (ranks.rank[j] < 0) continue;
        const int first = ranks.rank[j] * d.S;
        int rows = ranks.avail[j];
        for (int slot = first; slot < first + d.S - ranks.left[j]; ++slot) rows += run.slot_rows[slot];
        run.rows[ranks.rank[j]] = rows;
        run.left[ranks.rank[j]] = ranks.left[j];
        peak = max(peak, rows);
    }
    return __reduce_max_sync(kAll, peak);
}

// One run with threshold tau; returns its largest load and its number of pieces.
template <int kPerLane>
__device__ __forceinline__ int2 greedy(const Run& run, const Domain& d, const Orders& orders, int tau, const Rule& rule) {
    Ranks<kPerLane> ranks;
    start(ranks, run, d, orders, tau, rule.ascending);
    int pieces = 0;
    for (Source source; (source = choose_source(ranks, rule.largest)).lane >= 0;) {
        const unsigned open = usable(ranks, run, d, source.expert);
        Target target = choose_target(ranks, d, open, source.want, rule.fill);
        bool wasteful = target.lane < 0 || (target.room > source.want && target.last), relay = false;
        if (rule.careful && source.want < source.need) wasteful = false;
        if (wasteful) {
            const Target other = choose_relay(ranks, open, source);
            if ((relay = other.lane >= 0)) target = other;
        }
        move_piece(ranks, run, d, source, target, relay, rule.largest);
        pieces += target.lane >= 0;
    }
    return make_int2(finish(ranks, run, d), pieces);
}

}  // namespace
}  // namespace moe_ep

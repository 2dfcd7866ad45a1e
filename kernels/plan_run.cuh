// One greedy run, which is what one warp does: a chain of some R steps, each of them a few reductions over its lanes.
//
// A step needs no memory but the experts of the one or two ranks that it changes. Shared memory is private to a lane
// until the run ends: expert l of a rank to lane l % 32, slots to the lane that holds their rank. So there is nothing
// to wait for. While a step finds the target of a piece, it also finds the best source beside the one that gives now.
#pragma once

#include "plan_choose.cuh"

namespace moe_ep {
namespace {

struct Given {
    int rows, expert;
};

// Rows of the lane's first expert of a rank that are at home, read long before they are needed.
__device__ __forceinline__ int first_rest(const Run& run, const Domain& d, int rank) {
    const int lane = threadIdx.x % kWarp;
    return lane < d.L ? run.rest[rank * d.L + lane] : kClosed;
}

// The same after `moved` rows of `expert` went; closed where none could.
__device__ __forceinline__ int update_rest(const Run& run, int e, int rest, int expert, int moved) {
    const int next = moved > 0 ? rest - moved : rest | kClosed;
    if (e == expert) run.rest[e] = next;
    return e == expert ? next : rest;
}

// What a rank gives next, after `moved` rows of `expert` went.
template <typename B, typename Key>
__device__ __forceinline__ Given find_giver(const Run& run, const Domain& d, bool largest, int rank, int rest, int need,
                                            int expert, int moved) {
    const int first = rank * d.L, lane = threadIdx.x % kWarp, wish = max(need, d.min_quota);
    const auto bid = [&](int l, int rows) {
        rows = update_rest(run, first + l, rows, expert, moved);
        return B::of(max(rows, 0) < d.min_quota ? 0 : min(wish, rows), l, largest);  // closed ones are negative
    };
    Key best = bid(lane, rest);
    if (d.L > kWarp) {
#pragma unroll 1
        for (int l = lane + kWarp; l < d.L; l += kWarp) best = max(best, bid(l, run.rest[first + l]));
    }
    const Key top = B::turn(largest_of(best), B::back(largest));
    return {need == 0 ? 0 : static_cast<int>(B::rows(top)), first + B::code(top)};
}

constexpr int kNobody = -2;

// A slot of a rank takes a piece: of the target's slack, or at a relay's place.
template <typename Key, int kPerLane>
__device__ __forceinline__ void take(Ranks<Key, kPerLane>& ranks, const Run& run, const Domain& d, int expert, int rows,
                                     bool relay, int which) {
    int slot = -1;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const bool mine = (relay ? ranks.place(j) : ranks.rank[j]) == which;
        slot = mine ? (ranks.rank[j] + 1) * d.S - ranks.left[j] : slot;
        ranks.left[j] -= mine;
        ranks.held[j] |= mine ? 1u << (expert & 31) : 0;
        ranks.need[j] += mine && relay ? rows : 0;
        ranks.slack[j] -= mine && !relay ? rows : 0;
    }
    if (slot >= 0) run.slot_expert[slot] = expert, run.slot_rows[slot] = rows;
}

template <typename Key, int kPerLane>
__device__ __forceinline__ void set_giver(Ranks<Key, kPerLane>& ranks, int place, Key bid, int expert) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        ranks.bid[j] = ranks.place(j) == place ? bid : ranks.bid[j];
        ranks.giver[j] = ranks.place(j) == place ? expert : ranks.giver[j];
    }
}

// The source has given `rows`.
template <typename Key, int kPerLane>
__device__ __forceinline__ void give(Ranks<Key, kPerLane>& ranks, int place, int rows) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const bool mine = ranks.place(j) == place;
        ranks.avail[j] -= mine ? rows : 0;
        ranks.need[j] = mine ? max(ranks.need[j] - rows, 0) : ranks.need[j];
    }
}

// A piece moves, or its expert is closed where no rank takes it; returns the source as it is then.
template <typename Key, int kPerLane>
__device__ __forceinline__ Source<Key> move_piece(Ranks<Key, kPerLane>& ranks, const Run& run, const Domain& d,
                                                  bool largest, const Source<Key>& source, int rest, int rows,
                                                  bool relay, int which) {
    using B = Bid<Key, kPerLane>;
    take(ranks, run, d, source.expert, rows, relay, which);
    give(ranks, source.place, rows);
    const int need = max(source.need - rows, 0);
    const Given next = find_giver<B, Key>(run, d, largest, source.rank, rest, need, source.expert, rows);
    const Key bid = B::of(next.rows, source.place, largest);
    set_giver(ranks, source.place, bid, next.expert);
    return {bid, source.place, source.rank, next.expert, next.rows, need};
}

// A relay has more to give away now; returns the best source of all.
template <typename Key, int kPerLane>
__device__ __forceinline__ Source<Key> pass_on(Ranks<Key, kPerLane>& ranks, const Run& run, const Domain& d,
                                               bool largest, int place) {
    using B = Bid<Key, kPerLane>;
    const int rank = value_at(ranks.rank, place), need = value_at(ranks.need, place);
    const Given next = find_giver<B, Key>(run, d, largest, rank, first_rest(run, d, rank), need, -1, 0);
    set_giver(ranks, place, B::of(next.rows, place, largest), next.expert);
    return source_of(ranks, largest_of(bid_source(ranks, -1)), largest);
}

// Writes down what each rank computes and which slots it has left; returns the largest load.
template <typename Key, int kPerLane>
__device__ __forceinline__ int finish(const Ranks<Key, kPerLane>& ranks, const Run& run, const Domain& d) {
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

// The better of two sources.
template <typename Key>
__device__ __forceinline__ Source<Key> better(const Source<Key>& a, const Source<Key>& b) {
    const bool first = a.bid > b.bid;
    return {first ? a.bid : b.bid,       first ? a.place : b.place, first ? a.rank : b.rank,
            first ? a.expert : b.expert, first ? a.want : b.want,   first ? a.need : b.need};
}

// One run with threshold tau; returns its largest load and its number of pieces.
template <typename Key, int kPerLane>
__device__ __forceinline__ int2 greedy(const Run& run, const Domain& d, const Orders& orders, int tau,
                                       const Rule& rule) {
    Ranks<Key, kPerLane> ranks;
    start(ranks, run, d, orders, tau, rule);
    int pieces = 0;
    for (auto source = source_of(ranks, largest_of(bid_source(ranks, -1)), rule.largest); source.bid != 0;) {
        const int rest = first_rest(run, d, source.rank);
        const Offers<kPerLane> offers = look_at(ranks, run, d, source.expert);
        const Key target_bid = bid_target(ranks, offers, source.want, rule.fill);
        const int relay_bid = bid_relay(ranks, offers, source);
        const Target target = target_of<Key, kPerLane>(largest_of(target_bid));
        const int place = __reduce_min_sync(kAll, relay_bid);
        const auto other = source_of(ranks, largest_of(bid_source(ranks, source.place)), rule.largest);
        bool wasteful = target.room == 0 || (target.room > source.want && target.last);
        if (rule.careful && source.want < source.need) wasteful = false;
        const bool relay = wasteful && place != INT32_MAX;
        const int rows = relay ? source.want : min(source.want, target.room);
        const int which = rows == 0 ? kNobody : relay ? place : target.rank;
        const auto same = move_piece(ranks, run, d, rule.largest, source, rest, rows, relay, which);
        source = relay ? pass_on(ranks, run, d, rule.largest, place) : better(same, other);
        pieces += rows > 0;
    }
    return make_int2(finish(ranks, run, d), pieces);
}

}  // namespace
}  // namespace moe_ep

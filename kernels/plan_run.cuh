// One greedy run, which is what one warp does: a chain of some R steps, each of them a few reductions over its lanes.
//
// A step needs no memory but the experts of the one or two ranks that it changes. Shared memory is private to a lane
// until the run ends: expert l of a rank to lane l % 32, slots to the lane that holds their rank. So there is nothing to
// wait for. While a step finds the target of a piece, it also finds the next source beside the one that gives now.
#pragma once

#include "plan_choose.cuh"

namespace moe_ep {
namespace {

struct Given {
    int rows, expert;
};

// The best giver among the experts that a lane looks at.
struct Giver {
    int key, rows, expert;

    __device__ __forceinline__ void look(const Domain& d, bool largest, int wish, int e, int rest) {
        const int could = max(rest, 0) < d.min_quota ? 0 : min(wish, rest);  // closed ones are negative
        const int its_key = source_key(could, largest);
        expert = its_key > key ? e : expert, rows = its_key > key ? could : rows;
        key = max(key, its_key);
    }
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
__device__ __forceinline__ Given find_giver(const Run& run, const Domain& d, bool largest, int rank, int rest, int need,
                                            int expert, int moved) {
    const int first = rank * d.L, own = first + threadIdx.x % kWarp, wish = max(need, d.min_quota);
    Giver mine{0, 0, INT32_MAX};
    mine.look(d, largest, wish, own, update_rest(run, own, rest, expert, moved));
    if (d.L > kWarp) {
#pragma unroll 1
        for (int e = own + kWarp; e < first + d.L; e += kWarp)
            mine.look(d, largest, wish, e, update_rest(run, e, run.rest[e], expert, moved));
    }
    const int top = __reduce_max_sync(kAll, mine.key);
    const int next = __reduce_min_sync(kAll, mine.key == top ? mine.expert : INT32_MAX);
    const int rows = __shfl_sync(kAll, mine.rows, (next - first) & (kWarp - 1));  // 0 on all lanes where none gives
    return {need == 0 ? 0 : rows, next};
}

constexpr int kNobody = -2;

// A slot of a rank takes a piece: of the target's slack, or at a relay's place.
template <int kPerLane>
__device__ __forceinline__ void take(Ranks<kPerLane>& ranks, const Run& run, const Domain& d, int expert, int rows,
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

template <int kPerLane>
__device__ __forceinline__ void set_giver(Ranks<kPerLane>& ranks, int place, const Given& given) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        ranks.give[j] = ranks.place(j) == place ? given.rows : ranks.give[j];
        ranks.giver[j] = ranks.place(j) == place ? given.expert : ranks.giver[j];
    }
}

// The source has given `rows`.
template <int kPerLane>
__device__ __forceinline__ void give(Ranks<kPerLane>& ranks, const Source& source, int rows) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const bool mine = ranks.place(j) == source.place;
        ranks.avail[j] -= mine ? rows : 0;
        ranks.need[j] = mine ? max(ranks.need[j] - rows, 0) : ranks.need[j];
    }
}

// The better one of two sources.
__device__ __forceinline__ Source better(const Source& a, const Source& b, bool largest) {
    const int more = source_key(a.want, largest) - source_key(b.want, largest);
    const bool first = more > (a.place < b.place ? -1 : 0);
    return {first ? a.place : b.place, first ? a.rank : b.rank, first ? a.expert : b.expert, first ? a.want : b.want,
            first ? a.need : b.need};
}

// Moves a piece, or closes its expert where no rank takes it; returns the next source, of which `other` may be one.
template <int kPerLane>
__device__ __forceinline__ Source move_piece(Ranks<kPerLane>& ranks, const Run& run, const Domain& d, const Rule& rule,
                                             const Source& source, const Source& other, int rest, int rows, bool relay,
                                             int which) {
    take(ranks, run, d, source.expert, rows, relay, which);
    give(ranks, source, rows);
    const int need = max(source.need - rows, 0);
    const Given next = find_giver(run, d, rule.largest, source.rank, rest, need, source.expert, rows);
    set_giver(ranks, source.place, next);
    if (!relay) return better({source.place, source.rank, next.expert, next.rows, need}, other, rule.largest);
    const int rank = value_at(ranks.rank, which), its_need = value_at(ranks.need, which);
    set_giver(ranks, which, find_giver(run, d, rule.largest, rank, first_rest(run, d, rank), its_need, -1, 0));
    return choose_source(ranks, rule.largest);
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
    for (Source source = choose_source(ranks, rule.largest); source.want > 0;) {
        const int rest = first_rest(run, d, source.rank);
        const Offers<kPerLane> offers = look_at(ranks, run, d, source.expert);
        const auto [other, target, place] = choose(ranks, offers, source, rule);
        bool wasteful = target.room == 0 || (target.room > source.want && target.last);
        if (rule.careful && source.want < source.need) wasteful = false;
        const bool relay = wasteful && place != INT32_MAX;
        const int rows = relay ? source.want : min(source.want, target.room);
        const int which = rows == 0 ? kNobody : relay ? place : target.rank;
        source = move_piece(ranks, run, d, rule, source, other, rest, rows, relay, which);
        pieces += rows > 0;
    }
    return make_int2(finish(ranks, run, d), pieces);
}

}  // namespace
}  // namespace moe_ep

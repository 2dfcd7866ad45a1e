// What a greedy run looks at in every rank, in the registers of a warp's lanes, and the choices of a step.
//
// Ranks stand in the run's own order: lane i holds those at places i*kPerLane and behind. A choice is one reduction for
// the best key and one for the first place, or lowest rank, that has it: no branch, and the choices of a step that do not
// need each other overlap. A comparison costs more than the arithmetic that it saves, as long as a warp runs alone.
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

    __device__ __forceinline__ static int place(int j) { return threadIdx.x % kWarp * kPerLane + j; }
};

template <int kPerLane>
__device__ __forceinline__ int pick(const int (&values)[kPerLane], int at) {
    int value = values[0];
#pragma unroll
    for (int j = 1; j < kPerLane; ++j) value = j == at ? values[j] : value;
    return value;
}

// The value that the rank at a place has, on every lane.
template <int kPerLane>
__device__ __forceinline__ int value_at(const int (&values)[kPerLane], int place) {
    return __shfl_sync(kAll, pick(values, place % kPerLane), place / kPerLane);
}

// The same on all lanes, as all that follows. Rows 0: none.
struct Source {
    int place, rank, expert, want, need;
};
struct Target {
    int rank, room;
    bool last;  // its last slot
};

// Experts are counted in the order of `Orders::expert_at`, so a rank's first one has most rows, and gives first.
template <int kPerLane>
__device__ __forceinline__ void start(Ranks<kPerLane>& ranks, const Run& run, const Domain& d, const Orders& orders,
                                      int tau, bool ascending) {
    const int* rank_at = ascending ? orders.least_first : orders.most_first;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const int place = ranks.place(j), rank = place < d.R ? rank_at[place] : -1;
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
    for (int e = threadIdx.x % kWarp; e < d.E; e += kWarp) run.rest[e] = orders.rows_at[e];
    __syncwarp();
}

// The key of a source that can give so many rows: those, or 1.
__device__ __forceinline__ int source_key(int rows, bool largest) { return largest ? rows : min(rows, 1); }

// What a lane would choose: the best key that it has, and a code, of which the smallest is taken where keys are equal.
template <typename Key>
struct Bid {
    Key key;
    int code;
};

// The rank that gives the next piece, but for that at `without`: the one that can give most, or the first in the order.
template <int kPerLane>
__device__ __forceinline__ Bid<int> bid_source(const Ranks<kPerLane>& ranks, bool largest, int without) {
    Bid<int> bid{0, INT32_MAX};
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const int key = ranks.place(j) == without ? 0 : source_key(ranks.give[j], largest);
        bid.code = key > bid.key ? ranks.place(j) : bid.code;
        bid.key = max(bid.key, key);
    }
    return bid;
}

template <int kPerLane>
__device__ __forceinline__ Source source_at(const Ranks<kPerLane>& ranks, int top, int code) {
    const int place = code & (kWarp * kPerLane - 1);  // of some other rank where there is none
    const int want = value_at(ranks.give, place);
    return {place, value_at(ranks.rank, place), value_at(ranks.giver, place), top == 0 ? 0 : want,
            value_at(ranks.need, place)};
}

template <int kPerLane>
__device__ __forceinline__ Source choose_source(const Ranks<kPerLane>& ranks, bool largest) {
    const Bid<int> bid = bid_source(ranks, largest, -1);
    const int top = __reduce_max_sync(kAll, bid.key);
    return source_at(ranks, top, __reduce_min_sync(kAll, bid.key == top ? bid.code : INT32_MAX));
}

// What each of a lane's ranks can do for an expert: rows that it can take into its slack, and rows that it can give away
// beside what it needs to; 0 and -1 where it has no slot or holds the expert.
template <int kPerLane>
struct Offers {
    int slack[kPerLane], spare[kPerLane];
};

template <int kPerLane>
__device__ __forceinline__ Offers<kPerLane> look_at(const Ranks<kPerLane>& ranks, const Run& run, const Domain& d,
                                                    int expert) {
    Offers<kPerLane> offers;
    unsigned doubtful = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const bool open = ranks.left[j] > 0;
        offers.slack[j] = open && ranks.slack[j] >= d.min_quota ? ranks.slack[j] : 0;
        offers.spare[j] = open && ranks.need[j] > 0 ? ranks.avail[j] - ranks.need[j] : -1;
        doubtful |= (ranks.held[j] >> (expert & 31) & 1) << j;
    }
    for (; doubtful != 0; doubtful &= doubtful - 1) {
        const int at = __ffs(doubtful) - 1, first = pick(ranks.rank, at) * d.S;
        bool holds = false;
#pragma unroll 1
        for (int slot = first; slot < first + d.S - pick(ranks.left, at); ++slot)
            holds |= run.slot_expert[slot] == expert;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j)
            if (holds && j == at) offers.slack[j] = 0, offers.spare[j] = -1;
    }
    return offers;
}

constexpr unsigned kMiddle = 0x80000000u;

// The rank with slack that takes the piece: its widest one, or with `fill` the widest that is filled whole, else the
// narrowest. A rank with slack was never a source, so it is not the expert's home. The key is 0 without slack, below the
// middle for too wide a one, else above it; the code is the rank, and whether this is its last slot.
template <int kPerLane>
__device__ __forceinline__ Bid<unsigned> bid_target(const Ranks<kPerLane>& ranks, const Offers<kPerLane>& offers, int want,
                                                    bool fill) {
    Bid<unsigned> bid{0, INT32_MAX};
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const int slack = offers.slack[j], flip = fill ? (want - slack) >> 31 : 0;  // -1: too wide
        const unsigned key = ((slack ^ flip) - flip) + (slack > 0 ? kMiddle : 0);
        const int code = 2 * ranks.rank[j] + (ranks.left[j] == 1);
        bid.code = min(key >= bid.key ? code : INT32_MAX, key <= bid.key ? bid.code : INT32_MAX);
        bid.key = max(bid.key, key);
    }
    return bid;
}

// The place of the lane's first source, behind the one that gives, that can take the piece and give away as much more of
// its own.
template <int kPerLane>
__device__ __forceinline__ int bid_relay(const Ranks<kPerLane>& ranks, const Offers<kPerLane>& offers,
                                         const Source& source) {
    int place = INT32_MAX;
#pragma unroll
    for (int j = kPerLane - 1; j >= 0; --j)
        place = ranks.place(j) > source.place && offers.spare[j] >= source.want ? ranks.place(j) : place;
    return place;
}

struct Choice {
    Source other;  // the best source beside the one that gives
    Target target;
    int relay;  // its place; INT32_MAX: none
};

// The three choices of a step. Their reductions stand beside each other, so that one does not wait for the other.
template <int kPerLane>
__device__ __forceinline__ Choice choose(const Ranks<kPerLane>& ranks, const Offers<kPerLane>& offers,
                                         const Source& source, const Rule& rule) {
    const Bid<unsigned> target = bid_target(ranks, offers, source.want, rule.fill);
    const Bid<int> other = bid_source(ranks, rule.largest, source.place);
    const int relay = bid_relay(ranks, offers, source);
    const unsigned room = __reduce_max_sync(kAll, target.key);
    const int top = __reduce_max_sync(kAll, other.key), place = __reduce_min_sync(kAll, relay);
    const int which = __reduce_min_sync(kAll, target.key == room ? target.code : INT32_MAX);
    const int next = __reduce_min_sync(kAll, other.key == top ? other.code : INT32_MAX);
    const int rows = room == 0 ? 0 : abs(static_cast<int>(room - kMiddle));
    return {source_at(ranks, top, next), {which >> 1, rows, (which & 1) != 0}, place};
}

}  // namespace
}  // namespace moe_ep

// What a greedy run looks at in every rank, in the registers of a warp's lanes, and the choices of a step.
//
// Ranks stand in the run's own order: lane i holds those at places i*kPerLane and behind. A choice is a *bid* of each
// lane and one reduction for the largest: rows and the number of who has them share an integer, which settles ties. It
// has 32 bits where the most loaded rank leaves room for that (below 2^24 rows with up to 64 ranks), else 64. There is
// hardly a branch, so choices of a step that do not need each other overlap: a warp mostly waits for its own results.
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

template <typename Key>
__device__ __forceinline__ Key largest_of(Key mine) {
    if constexpr (sizeof(Key) == 4) {
        return __reduce_max_sync(kAll, mine);
    } else {
        const unsigned high = mine >> 32, top = __reduce_max_sync(kAll, high);
        return static_cast<Key>(top) << 32 | __reduce_max_sync(kAll, high == top ? static_cast<unsigned>(mine) : 0);
    }
}

// Bids of rows and a code. Most rows win, then the smallest code; of bids in order the smallest code wins.
template <typename Key, int kPerLane>
struct Bid {
    static constexpr int kWide = 8 * sizeof(Key), kBits = kWide == 64 ? 24 : kPerLane == 2 ? 7 : kPerLane == 8 ? 9 : 10;
    static constexpr Key kCodes = (Key{1} << kBits) - 1;
    static constexpr Key kMiddle = Key{1} << (kWide - kBits - 1);  // in the middle of all rows

    __device__ __forceinline__ static Key make(Key rows, int code) { return rows << kBits | (kCodes - code); }
    __device__ __forceinline__ static Key rows(Key bid) { return bid >> kBits; }
    __device__ __forceinline__ static int code(Key bid) { return static_cast<int>(~bid & kCodes); }
    // The code in front of the rows, which is how bids in order are compared, and back.
    __device__ __forceinline__ static Key turn(Key bid, int by) { return bid >> by | bid << (kWide - by & kWide - 1); }
    __device__ __forceinline__ static int there(bool largest) { return largest ? 0 : kBits; }
    __device__ __forceinline__ static int back(bool largest) { return largest ? 0 : kWide - kBits; }
    __device__ __forceinline__ static Key of(int rows, int code, bool largest) {
        return rows == 0 ? 0 : turn(make(rows, code), there(largest));
    }
};

template <typename Key, int kPerLane>
__device__ bool wide_enough(int most, int num_local) {
    using B = Bid<Key, kPerLane>;
    return static_cast<Key>(most) < B::kMiddle && static_cast<Key>(num_local) <= B::kCodes;
}

template <typename Key, int kPerLane>
struct Ranks {
    int rank[kPerLane];
    int need[kPerLane], slack[kPerLane], avail[kPerLane], left[kPerLane];  // left: unused slots
    Key bid[kPerLane];  // at most how many rows the rank's next piece has, and its place; 0: none
    int giver[kPerLane];  // the expert of that piece
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
    const unsigned at = place;
    return __shfl_sync(kAll, pick(values, at % kPerLane), at / kPerLane % kWarp);
}

// Who gives a piece, the same on all lanes. Bid 0: nobody.
template <typename Key>
struct Source {
    Key bid;
    int place, rank, expert, want, need;
};

// Experts are counted in the order of `Orders::expert_at`, so a rank's first one has most rows, and gives first.
template <typename Key, int kPerLane>
__device__ __forceinline__ void start(Ranks<Key, kPerLane>& ranks, const Run& run, const Domain& d,
                                      const Orders& orders, int tau, const Rule& rule) {
    const int* rank_at = rule.ascending ? orders.least_first : orders.most_first;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const int place = ranks.place(j), rank = place < d.R ? rank_at[place] : -1;
        const int rows = rank < 0 ? 0 : orders.at_home[rank], most = rank < 0 ? 0 : orders.rows_at[rank * d.L];
        const int need = rank < 0 ? 0 : max(rows - tau, 0);
        const int give = need > 0 && most >= d.min_quota ? min(max(need, d.min_quota), most) : 0;
        ranks.rank[j] = rank;
        ranks.need[j] = need;
        ranks.slack[j] = rank < 0 ? 0 : max(tau - rows, 0);
        ranks.avail[j] = rows;
        ranks.left[j] = rank < 0 ? 0 : d.S;
        ranks.bid[j] = Bid<Key, kPerLane>::of(give, place, rule.largest);
        ranks.giver[j] = rank * d.L;
        ranks.held[j] = 0;
    }
    for (int e = threadIdx.x % kWarp; e < d.E; e += kWarp) run.rest[e] = orders.rows_at[e];
    __syncwarp();
}

// The lane's best rank to give the next piece, but for that at `without`: most rows, or the first in the order.
template <typename Key, int kPerLane>
__device__ __forceinline__ Key bid_source(const Ranks<Key, kPerLane>& ranks, int without) {
    Key best = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) best = max(best, ranks.place(j) == without ? Key{0} : ranks.bid[j]);
    return best;
}

template <typename Key, int kPerLane>
__device__ __forceinline__ Source<Key> source_of(const Ranks<Key, kPerLane>& ranks, Key bid, bool largest) {
    using B = Bid<Key, kPerLane>;
    const Key turned = B::turn(bid, B::back(largest));
    const int place = B::code(turned);
    return {bid, place, value_at(ranks.rank, place), value_at(ranks.giver, place), static_cast<int>(B::rows(turned)),
            value_at(ranks.need, place)};
}

// What each of a lane's ranks can do for an expert: rows that it can take into its slack, and rows that it can give
// away beside what it needs to; 0 and -1 where it has no slot or holds the expert.
template <int kPerLane>
struct Offers {
    int slack[kPerLane], spare[kPerLane];
};

template <typename Key, int kPerLane>
__device__ __forceinline__ Offers<kPerLane> look_at(const Ranks<Key, kPerLane>& ranks, const Run& run, const Domain& d,
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

// The lane's rank with slack that takes the piece: its widest one, or with `fill` the widest that is filled whole, else
// the narrowest. A rank with slack was never a source, so it is not the expert's home. Rows of the bid are below the
// middle for too wide a one, else above it; the code is the rank, and whether this is its last slot.
template <typename Key, int kPerLane>
__device__ __forceinline__ Key bid_target(const Ranks<Key, kPerLane>& ranks, const Offers<kPerLane>& offers, int want,
                                          bool fill) {
    using B = Bid<Key, kPerLane>;
    Key best = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const int slack = offers.slack[j], flip = fill ? (want - slack) >> 31 : 0;  // -1: too wide
        const Key rows = B::kMiddle + static_cast<Key>((slack ^ flip) - flip);
        best = max(best, slack == 0 ? Key{0} : B::make(rows, 2 * ranks.rank[j] + (ranks.left[j] == 1)));
    }
    return best;
}

// The place of the lane's first source, behind the one that gives, that can take the piece and give away as much more
// of its own.
template <typename Key, int kPerLane>
__device__ __forceinline__ int bid_relay(const Ranks<Key, kPerLane>& ranks, const Offers<kPerLane>& offers,
                                         const Source<Key>& source) {
    int place = INT32_MAX;
#pragma unroll
    for (int j = kPerLane - 1; j >= 0; --j)
        place = ranks.place(j) > source.place && offers.spare[j] >= source.want ? ranks.place(j) : place;
    return place;
}

struct Target {
    int rank, room;  // 0: none
    bool last;  // its last slot
};

template <typename Key, int kPerLane>
__device__ __forceinline__ Target target_of(Key bid) {
    using B = Bid<Key, kPerLane>;
    const int code = B::code(bid), room = static_cast<int>(B::rows(bid) - B::kMiddle);
    return {code >> 1, bid == 0 ? 0 : abs(room), (code & 1) != 0};
}

}  // namespace
}  // namespace moe_ep

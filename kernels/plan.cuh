// Planner of replicas: one block a domain, one warp a greedy run. moe_ep/replica/greedy.py and planners.py say what it
// computes and why; every integer here is theirs, and every tie is broken alike, so the plans agree bit for bit.
//
// A block sums the loads over sources, orders ranks and experts by counting, and tries the sixteen rules for the mean
// as threshold, then for narrower ones. A run keeps what it has placed in slots (expert, rows), so whether a rank holds
// an expert is a look at its few used slots.
// Device code only, so that a test can compile it for the host and run its threads one after the other.
#pragma once

#include "common.cuh"

namespace moe_ep {
namespace {

constexpr int kRules = 16;
constexpr int kThresholds = 4;  // of a round after the first
constexpr int kPlanThreads = kRules * kWarp;
constexpr int kClosed = INT32_MIN;  // bit of an expert that no rank could take

struct Plan {
    const int* load;  // [sources, experts]
    int sources, experts, ranks, slots, min_quota, tolerance;  // experts of all domains, ranks of one
    int *quota, *instances, *peak, *bound;
};

// Shared memory of a block. R ranks, E experts of the domain, Q = R * S slots.
struct Orders {
    int *total, *sorted;  // [E]: rows of each expert; experts by rows
    int* at_home;  // [R]
    int* rank_place[2];  // [R]: the most loaded rank first, the least loaded one first
    int* expert_place[2];  // [E]: along the ranks, within one the expert with most rows first
};

struct Run {
    int *need, *slack, *left, *avail, *rows;  // [R]; left: unused slots
    int *giver, *give;  // [R]: the expert of each rank that gives its next piece, and at most how many rows; 0: none
    int* rest;  // [E]
    int *slot_expert, *slot_rows;  // [Q]
};

// What the warps of a block share beside that.
struct Common {
    unsigned long long* chosen;
    Run* runs;
    int2* scores;
    int* bound;
};

constexpr int kCommonInts =
    (sizeof(unsigned long long) + kRules * (sizeof(Run) + sizeof(int2)) + 2 * sizeof(int)) / sizeof(int);

__device__ Common carve_common(int* shared) {
    Common common;
    common.chosen = reinterpret_cast<unsigned long long*>(shared);
    common.runs = reinterpret_cast<Run*>(common.chosen + 1);
    common.scores = reinterpret_cast<int2*>(common.runs + kRules);
    common.bound = reinterpret_cast<int*>(common.scores + kRules);
    return common;
}

struct Domain {
    int R, E, L, S, Q, min_quota;
};

__device__ int* carve(int*& next, int count) {
    int* here = next;
    next += count;
    return here;
}

__device__ Run carve_run(int*& next, const Domain& d) {
    Run run;
    run.need = carve(next, d.R);
    run.slack = carve(next, d.R);
    run.left = carve(next, d.R);
    run.avail = carve(next, d.R);
    run.rows = carve(next, d.R);
    run.giver = carve(next, d.R);
    run.give = carve(next, d.R);
    run.rest = carve(next, d.E);
    run.slot_expert = carve(next, d.Q);
    run.slot_rows = carve(next, d.Q);
    return run;
}

__device__ __forceinline__ int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

__host__ __device__ int64_t run_ints(int64_t R, int64_t E, int64_t S) { return 7 * R + E + 2 * R * S; }
__host__ __device__ int64_t plan_ints(int64_t R, int64_t E, int64_t S) {
    return kCommonInts + 4 * E + 3 * R + (kRules + 1) * run_ints(R, E, S);
}

// The value that one lane has, where `mine` holds on exactly one.
__device__ int from_lane(bool mine, int value) {
    return __shfl_sync(kAll, value, __ffs(__ballot_sync(kAll, mine)) - 1);
}

__device__ bool holds(const Run& run, const Domain& d, int rank, int expert) {
    for (int k = 0; k < d.S - run.left[rank]; ++k)
        if (run.slot_expert[rank * d.S + k] == expert) return true;
    return false;
}

// The best giver among the experts that a lane looks at: by rows where `largest`, then by place.
struct Giver {
    unsigned first, second;
    int expert, rows;

    __device__ __forceinline__ void look(const Run& run, const Domain& d, const int* place, bool largest, int need,
                                         int e) {
        const int rest = run.rest[e];
        if (rest < d.min_quota) return;  // closed ones are negative
        const int could = min(max(need, d.min_quota), rest);
        const unsigned a = largest ? could : 1, b = d.E - place[e];
        if (a > first || (a == first && b > second)) first = a, second = b, expert = e, rows = could;
    }
};

// Finds the giver of `rank` again. A step changes those of one or two ranks; a look at all experts in every step would
// be most of the instructions of a run, and sixteen runs share one SM.
__device__ void find_giver(const Run& run, const Domain& d, const int* place, bool largest, int rank, int lane) {
    const int need = run.need[rank];
    Giver mine{0, 0, -1, 0};
    for (int e = rank * d.L + lane; e < (rank + 1) * d.L && need > 0; e += kWarp)
        mine.look(run, d, place, largest, need, e);
    const unsigned top = need > 0 ? __reduce_max_sync(kAll, mine.first) : 0;
    if (top == 0) {
        if (lane == 0) run.give[rank] = 0;
        return;
    }
    const unsigned next = __reduce_max_sync(kAll, mine.first == top ? mine.second : 0);
    if (mine.first == top && mine.second == next) run.giver[rank] = mine.expert, run.give[rank] = mine.rows;
}

// The rank whose expert gives the next piece: the one that can give most, or the first in the order. -1: none.
__device__ int choose_source(const Run& run, const Domain& d, const int* place, bool largest, int lane) {
    unsigned first = 0, second = 0;
    int mine = -1;
    for (int r = lane; r < d.R; r += kWarp) {
        const int rows = run.give[r];
        if (rows == 0) continue;
        const unsigned a = largest ? rows : 1, b = d.R - place[r];
        if (a > first || (a == first && b > second)) first = a, second = b, mine = r;
    }
    const unsigned top = __reduce_max_sync(kAll, first);
    if (top == 0) return -1;
    const unsigned next = __reduce_max_sync(kAll, first == top ? second : 0);
    return from_lane(first == top && second == next, mine);
}

// The rank with slack that takes the piece: its widest one, or with `fill` the widest that is filled whole. -1: none.
__device__ int choose_target(const Run& run, const Domain& d, int expert, int home, int want, bool fill, int lane) {
    unsigned best = 0;
    int mine = -1;
    for (int r = lane; r < d.R; r += kWarp) {
        const int slack = run.slack[r];
        if (slack < d.min_quota || run.left[r] == 0 || r == home || holds(run, d, r, expert)) continue;
        const unsigned key = !fill ? slack : slack <= want ? 0x80000000u + slack : 0x80000000u - slack;
        if (key > best) best = key, mine = r;
    }
    const unsigned top = __reduce_max_sync(kAll, best);
    if (top == 0) return -1;
    return d.R - static_cast<int>(__reduce_max_sync(kAll, best == top ? d.R - mine : 0));
}

// The next source in the order that can take the piece and give away as much more of its own. -1: none.
__device__ int choose_relay(const Run& run, const Domain& d, const int* place, int expert, int home, int want,
                            int lane) {
    unsigned best = 0;
    int mine = -1;
    for (int r = lane; r < d.R; r += kWarp) {
        const int need = run.need[r];
        if (need == 0 || place[r] <= place[home] || run.avail[r] - need < want || run.left[r] == 0) continue;
        if (holds(run, d, r, expert)) continue;
        const unsigned key = d.R - place[r];
        if (key > best) best = key, mine = r;
    }
    const unsigned top = __reduce_max_sync(kAll, best);
    return top == 0 ? -1 : from_lane(best == top, mine);
}

__device__ void start(const Run& run, const Domain& d, const Orders& orders, int tau, int rule, int lane) {
    for (int r = lane; r < d.R; r += kWarp) {
        const int rows = orders.at_home[r];
        run.rows[r] = run.avail[r] = rows;
        run.need[r] = max(rows - tau, 0);
        run.slack[r] = max(tau - rows, 0);
        run.left[r] = d.S;
    }
    for (int e = lane; e < d.E; e += kWarp) run.rest[e] = orders.total[e];
    __syncwarp();
    for (int r = lane; r < d.R; r += kWarp) {
        Giver best{0, 0, -1, 0};
        for (int e = r * d.L; e < (r + 1) * d.L && run.need[r] > 0; ++e)
            best.look(run, d, orders.expert_place[rule & 1], rule & 2, run.need[r], e);
        run.giver[r] = best.expert;
        run.give[r] = best.rows;
    }
    __syncwarp();
}

// One run of one warp; returns its largest load and its number of pieces, on every lane.
__device__ int2 greedy(const Run& run, const Domain& d, const Orders& orders, int tau, int rule, int lane) {
    const int* place = orders.expert_place[rule & 1];
    const int* rank_place = orders.rank_place[rule & 1];
    const bool largest = rule & 2, fill = rule & 4, careful = rule & 8;
    int pieces = 0;
    start(run, d, orders, tau, rule, lane);
    for (int home; (home = choose_source(run, d, rank_place, largest, lane)) >= 0;) {
        const int expert = run.giver[home], want = run.give[home], need = run.need[home];
        int dest = choose_target(run, d, expert, home, want, fill, lane);
        const int room = dest < 0 ? 0 : run.slack[dest];
        bool wasteful = dest < 0 || (room > want && run.left[dest] == 1);
        if (careful && want < need) wasteful = false;
        const int relay = wasteful ? choose_relay(run, d, rank_place, expert, home, want, lane) : -1;
        const int rows = relay >= 0 ? want : min(want, room);
        if (relay >= 0) dest = relay;
        __syncwarp();
        if (lane == 0 && dest < 0) run.rest[expert] |= kClosed;
        if (lane == 0 && dest >= 0) {
            const int slot = dest * d.S + d.S - run.left[dest];
            run.slot_expert[slot] = expert;
            run.slot_rows[slot] = rows;
            run.left[dest] -= 1;
            run.need[home] = max(need - rows, 0);
            run.avail[home] -= rows;
            run.rest[expert] -= rows;
            run.rows[home] -= rows;
            run.rows[dest] += rows;
            (relay >= 0 ? run.need : run.slack)[dest] += relay >= 0 ? rows : -rows;
        }
        pieces += dest >= 0;
        __syncwarp();
        find_giver(run, d, place, largest, home, lane);
        if (relay >= 0) find_giver(run, d, place, largest, relay, lane);
        __syncwarp();
    }
    int peak = 0;
    for (int r = lane; r < d.R; r += kWarp) peak = max(peak, run.rows[r]);
    return make_int2(__reduce_max_sync(kAll, static_cast<unsigned>(peak)), pieces);
}

__device__ void sum_sources(const Plan& p, const Domain& d, const Orders& orders) {
    for (int e = threadIdx.x; e < d.E; e += blockDim.x) orders.total[e] = 0;
    __syncthreads();
    const int64_t first = static_cast<int64_t>(blockIdx.x) * d.E;
    const int parts = max(1, static_cast<int>(blockDim.x) / d.E), part = threadIdx.x / d.E;
    for (int e = threadIdx.x % d.E; part < parts && e < d.E; e += blockDim.x) {
        int own = 0;
        const int* column = p.load + first + e;
#pragma unroll 8
        for (int s = part; s < p.sources; s += parts) own += __ldg(column + static_cast<int64_t>(s) * p.experts);
        atomicAdd(orders.total + e, own);
    }
    __syncthreads();
}

__device__ void find_orders(const Domain& d, const Orders& orders) {
    for (int r = threadIdx.x; r < d.R; r += blockDim.x) {
        int rows = 0;
        for (int e = r * d.L; e < (r + 1) * d.L; ++e) rows += orders.total[e];
        orders.at_home[r] = rows;
    }
    __syncthreads();
    for (int r = threadIdx.x; r < d.R; r += blockDim.x) {
        int above = 0, below = 0;
        for (int other = 0; other < d.R; ++other) {
            const int more = orders.at_home[other] - orders.at_home[r];
            above += more > 0 || (more == 0 && other < r);
            below += more < 0 || (more == 0 && other < r);
        }
        orders.rank_place[0][r] = above;
        orders.rank_place[1][r] = below;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < d.E; e += blockDim.x) {
        const int home = e / d.L, rows = orders.total[e];
        int before = 0;
        for (int other = home * d.L; other < (home + 1) * d.L; ++other)
            before += orders.total[other] > rows || (orders.total[other] == rows && other < e);
        for (int way = 0; way < 2; ++way)
            orders.expert_place[way][e] = orders.rank_place[way][home] * d.L + before;
    }
    __syncthreads();
}

// Largest mean, over the k most loaded ranks, of the rows that cannot leave them: at most S*(R-k) experts can.
__device__ void find_bound(const Domain& d, const Orders& orders, int* bound) {
    for (int e = threadIdx.x; e < d.E; e += blockDim.x) {
        int before = 0;
        for (int other = 0; other < d.E; ++other)
            before += orders.total[other] > orders.total[e] || (orders.total[other] == orders.total[e] && other < e);
        orders.sorted[before] = e;
    }
    __syncthreads();
    const int lane = threadIdx.x % kWarp;
    for (int k = 1 + threadIdx.x / kWarp; k < d.R; k += blockDim.x / kWarp) {
        int gone = 0, stuck = 0;
        for (int first = 0; first < d.E; first += kWarp) {
            const int expert = first + lane < d.E ? orders.sorted[first + lane] : -1;
            const bool inside = expert >= 0 && orders.rank_place[0][expert / d.L] < k;
            const unsigned all = __ballot_sync(kAll, inside);
            if (inside && gone + __popc(all & ((1u << lane) - 1)) >= d.S * (d.R - k)) stuck += orders.total[expert];
            gone += __popc(all);
        }
        const int rows = static_cast<int>(__reduce_add_sync(kAll, static_cast<unsigned>(stuck)));
        if (lane == 0) atomicMax(bound, static_cast<int>(div_up(rows, k)));
    }
    __syncthreads();
}

__device__ void copy_run(const Run& to, const Run& from, const Domain& d) {
    for (int r = threadIdx.x; r < d.R; r += blockDim.x) to.rows[r] = from.rows[r], to.left[r] = from.left[r];
    for (int e = threadIdx.x; e < d.E; e += blockDim.x) to.rest[e] = from.rest[e] & ~kClosed;
    for (int q = threadIdx.x; q < d.Q; q += blockDim.x)
        to.slot_expert[q] = from.slot_expert[q], to.slot_rows[q] = from.slot_rows[q];
    __syncthreads();
}

// Sixteen runs for one threshold; the best, if it lies below `limit` and before what the round has, becomes `winner`.
__device__ void try_threshold(const Run& own, const Run& winner, Run* runs, int2* scores, const Domain& d,
                              const Orders& orders, int tau, int limit, int2& round) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int2 score = greedy(own, d, orders, tau, warp, lane);
    if (lane == 0) scores[warp] = score, runs[warp] = own;
    __syncthreads();
    int best = 0;
    for (int w = 1; w < kRules; ++w)
        if (scores[w].x < scores[best].x || (scores[w].x == scores[best].x && scores[w].y < scores[best].y)) best = w;
    const int2 found = scores[best];
    if (found.x < limit && (found.x < round.x || (found.x == round.x && found.y < round.y))) {
        round = found;
        copy_run(winner, runs[best], d);
    }
    __syncthreads();
}

// Drops the replica with fewest rows among those whose rows fit into the expert's other instances under `peak`; false
// where there is none. Ties go to the lowest expert, then to the lowest rank.
__device__ bool drop_one(const Run& run, const Domain& d, int peak, unsigned long long* chosen) {
    if (threadIdx.x == 0) *chosen = ~0ull;
    __syncthreads();
    for (int q = threadIdx.x; q < d.Q; q += blockDim.x) {
        const int rank = q / d.S;
        if (q % d.S >= d.S - run.left[rank]) continue;
        const int expert = run.slot_expert[q], rows = run.slot_rows[q];
        int64_t room = peak - run.rows[expert / d.L];
        for (int r = 0; r < d.R; ++r)
            if (r != rank && holds(run, d, r, expert)) room += peak - run.rows[r];
        if (room < rows) continue;
        const auto place = static_cast<unsigned long long>(expert) * d.R + rank;  // below 2^24
        atomicMin(chosen, (static_cast<unsigned long long>(rows) << 32) | place);
    }
    __syncthreads();
    const unsigned long long key = *chosen;
    __syncthreads();
    if (key == ~0ull) return false;
    if (threadIdx.x == 0) {
        const int place = static_cast<int>(key & 0xffffffffu), expert = place / d.R, rank = place % d.R;
        const int home = expert / d.L, last = d.S - run.left[rank] - 1;
        int rows = static_cast<int>(key >> 32), k = 0;
        const int taken_home = min(rows, peak - run.rows[home]);
        run.rest[expert] += taken_home;
        run.rows[home] += taken_home;
        rows -= taken_home;
        for (int r = 0; r < d.R && rows > 0; ++r) {
            if (r == rank || r == home) continue;
            for (int slot = r * d.S; slot < (r + 1) * d.S - run.left[r]; ++slot) {
                if (run.slot_expert[slot] != expert) continue;
                const int taken = min(rows, peak - run.rows[r]);
                run.slot_rows[slot] += taken;
                run.rows[r] += taken;
                rows -= taken;
            }
        }
        while (run.slot_expert[rank * d.S + k] != expert) ++k;
        run.rows[rank] -= static_cast<int>(key >> 32);
        run.slot_expert[rank * d.S + k] = run.slot_expert[rank * d.S + last];
        run.slot_rows[rank * d.S + k] = run.slot_rows[rank * d.S + last];
        run.left[rank] += 1;
    }
    __syncthreads();
    return true;
}

__device__ void write_plan(const Plan& p, const Run& run, const Domain& d) {
    const int first_rank = blockIdx.x * d.R, first_expert = blockIdx.x * d.E;
    const int all_ranks = gridDim.x * d.R;
    int* quota = p.quota + static_cast<int64_t>(first_expert) * all_ranks;
    for (int64_t i = threadIdx.x; i < static_cast<int64_t>(d.E) * all_ranks; i += blockDim.x) quota[i] = 0;
    __syncthreads();
    for (int e = threadIdx.x; e < d.E; e += blockDim.x)
        quota[static_cast<int64_t>(e) * all_ranks + first_rank + e / d.L] = run.rest[e];
    for (int r = threadIdx.x; r < d.R; r += blockDim.x) {
        int* out = p.instances + static_cast<int64_t>(first_rank + r) * d.S;
        const int used = d.S - run.left[r];
        for (int k = 0; k < d.S; ++k) out[k] = -1;
        for (int k = 0; k < used; ++k) {
            const int expert = run.slot_expert[r * d.S + k];
            int before = 0;
            for (int other = 0; other < used; ++other) before += run.slot_expert[r * d.S + other] < expert;
            out[before] = first_expert + expert;
            quota[static_cast<int64_t>(expert) * all_ranks + first_rank + r] = run.slot_rows[r * d.S + k];
        }
    }
}

__global__ void __launch_bounds__(kPlanThreads, 1) plan_replicas(Plan p) {
    extern __shared__ __align__(16) int shared[];
    const Common common = carve_common(shared);
    const int domains = gridDim.x;
    const int E = p.experts / domains;
    const Domain d{p.ranks, E, E / p.ranks, p.slots, p.ranks * p.slots, p.min_quota};
    int* next = shared + kCommonInts;
    Orders orders;
    orders.total = carve(next, d.E);
    orders.sorted = carve(next, d.E);
    orders.at_home = carve(next, d.R);
    for (int way = 0; way < 2; ++way) orders.rank_place[way] = carve(next, d.R);
    for (int way = 0; way < 2; ++way) orders.expert_place[way] = carve(next, d.E);
    const Run winner = carve_run(next, d);
    next += (threadIdx.x / kWarp) * run_ints(d.R, d.E, d.S);
    const Run own = carve_run(next, d);

    sum_sources(p, d, orders);
    find_orders(d, orders);
    int64_t sum = 0;
    int best = 0;
    for (int r = 0; r < d.R; ++r) sum += orders.at_home[r], best = max(best, orders.at_home[r]);
    const int mean = static_cast<int>(div_up(sum, d.R));
    for (int r = threadIdx.x; r < d.R; r += blockDim.x) winner.rows[r] = orders.at_home[r], winner.left[r] = d.S;
    for (int e = threadIdx.x; e < d.E; e += blockDim.x) winner.rest[e] = orders.total[e];
    if (threadIdx.x == 0) *common.bound = mean;
    __syncthreads();

    const int aim = mean + static_cast<int>(static_cast<int64_t>(mean) * p.tolerance / 1000);
    int low = aim, step = best - aim, count = 1;
    for (bool first = true; count > 0 && best > max(aim, *common.bound); first = false) {
        int2 round = make_int2(INT32_MAX, INT32_MAX);
        for (int i = 0; i < count; ++i)
            try_threshold(own, winner, common.runs, common.scores, d, orders, low + i * step, best, round);
        best = min(best, round.x);
        if (first && best > mean) find_bound(d, orders, common.bound);  // mostly the mean is reached, which is one
        if (step == 1) break;
        low = max(aim + 1, best - step);
        step = max(1, static_cast<int>(div_up(best - low, kThresholds)));
        count = best > low ? static_cast<int>(div_up(best - low, step)) : 0;
    }
    while (drop_one(winner, d, best, common.chosen)) {
    }
    write_plan(p, winner, d);
    if (threadIdx.x != 0) return;
    int peak = 0;
    for (int r = 0; r < d.R; ++r) peak = max(peak, winner.rows[r]);
    p.peak[blockIdx.x] = peak;
    p.bound[blockIdx.x] = *common.bound;
}

}  // namespace
}  // namespace moe_ep

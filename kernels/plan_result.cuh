// The end of a plan: replicas that nobody needs are dropped, and the best run is written down.
#pragma once

#include "plan.cuh"

namespace moe_ep {
namespace {

// The warp's own run becomes the block's best. Experts have their numbers again.
__device__ void keep_run(const Run& to, const Run& from, const Domain& d, const Orders& orders) {
    const int lane = threadIdx.x % kWarp;
    __syncwarp();
    for (int e = lane; e < d.E; e += kWarp) to.rest[orders.expert_at[e]] = from.rest[e] & ~kClosed;
    for (int r = lane; r < d.R; r += kWarp) {
        to.rows[r] = from.rows[r];
        to.left[r] = from.left[r];
        for (int slot = r * d.S; slot < (r + 1) * d.S - from.left[r]; ++slot) {
            to.slot_expert[slot] = orders.expert_at[from.slot_expert[slot]];
            to.slot_rows[slot] = from.slot_rows[slot];
        }
    }
    __syncwarp();
}

__device__ void keep_masters(const Run& to, const Domain& d, const Orders& orders) {
    for (int r = threadIdx.x; r < d.R; r += blockDim.x) to.rows[r] = orders.at_home[r], to.left[r] = d.S;
    for (int e = threadIdx.x; e < d.E; e += blockDim.x) to.rest[e] = orders.total[e];
}

__device__ bool used(const Run& run, const Domain& d, int slot) { return slot % d.S < d.S - run.left[slot / d.S]; }

// Room of each expert: rows that its instances could still take under `peak`, all together.
__device__ void find_room(const Memory& m, const Domain& d, int peak) {
    const Run& run = m.winner;
    for (int e = threadIdx.x; e < d.E; e += blockDim.x) m.room[e] = peak - run.rows[e / d.L];
    if (threadIdx.x == 0) *m.chosen = ~0ull;
    __syncthreads();
    for (int slot = threadIdx.x; slot < d.Q; slot += blockDim.x)
        if (used(run, d, slot))
            atomicAdd(m.room + run.slot_expert[slot], static_cast<unsigned long long>(peak - run.rows[slot / d.S]));
    __syncthreads();
}

// Takes a replica away and gives its rows to the expert's home first, then to its other instances by rank. One thread.
__device__ void drop(const Run& run, const Domain& d, int peak, int expert, int rank, int rows) {
    const int home = expert / d.L, last = rank * d.S + d.S - run.left[rank] - 1;
    run.rows[rank] -= rows;
    const int at_home = min(rows, peak - run.rows[home]);
    run.rest[expert] += at_home;
    run.rows[home] += at_home;
    rows -= at_home;
    for (int slot = 0; slot < d.Q && rows > 0; ++slot) {
        const int other = slot / d.S;
        if (other == rank || !used(run, d, slot) || run.slot_expert[slot] != expert) continue;
        const int taken = min(rows, peak - run.rows[other]);
        run.slot_rows[slot] += taken;
        run.rows[other] += taken;
        rows -= taken;
    }
    int slot = rank * d.S;
    while (run.slot_expert[slot] != expert) ++slot;
    run.slot_expert[slot] = run.slot_expert[last];
    run.slot_rows[slot] = run.slot_rows[last];
    run.left[rank] += 1;
}

// Drops the replica with fewest rows among those whose rows fit into the expert's other instances under `peak`; false
// where there is none. Ties go to the lowest expert, then to the lowest rank.
__device__ bool drop_one(const Memory& m, const Domain& d, int peak) {
    const Run& run = m.winner;
    find_room(m, d, peak);
    for (int slot = threadIdx.x; slot < d.Q; slot += blockDim.x) {
        if (!used(run, d, slot)) continue;
        const int rank = slot / d.S, expert = run.slot_expert[slot], rows = run.slot_rows[slot];
        if (m.room[expert] - static_cast<unsigned long long>(peak - run.rows[rank]) < rows) continue;
        const auto place = static_cast<unsigned long long>(expert) * d.R + rank;  // below 2^24
        atomicMin(m.chosen, (static_cast<unsigned long long>(rows) << 32) | place);
    }
    __syncthreads();
    const unsigned long long key = *m.chosen;
    __syncthreads();
    if (key == ~0ull) return false;
    const int place = static_cast<int>(key & 0xffffffffu);
    if (threadIdx.x == 0) drop(run, d, peak, place / d.R, place % d.R, static_cast<int>(key >> 32));
    __syncthreads();
    return true;
}

// All quotas of the domain's experts, by the blocks of a cluster together.
__device__ void clear_quotas(const Plan& p, const Domain& d, int block, int blocks) {
    int* quota = p.quota + static_cast<int64_t>(d.first_expert()) * d.all_ranks();
    const int64_t count = static_cast<int64_t>(d.E) * d.all_ranks(), stride = blocks * blockDim.x;
    for (int64_t i = block * blockDim.x + threadIdx.x; i < count; i += stride) quota[i] = 0;
}

// Quotas that are not 0, and each rank's slots by expert, -1 behind them.
__device__ void write_plan(const Plan& p, const Run& run, const Domain& d) {
    const int64_t all_ranks = d.all_ranks();
    int* quota = p.quota + d.first_expert() * all_ranks + d.first_rank();
    for (int e = threadIdx.x; e < d.E; e += blockDim.x) quota[e * all_ranks + e / d.L] = run.rest[e];
    for (int slot = threadIdx.x; slot < d.Q; slot += blockDim.x) {
        const int rank = slot / d.S, first = rank * d.S, end = first + d.S - run.left[rank];
        int* out = p.instances + static_cast<int64_t>(d.first_rank()) * d.S;
        if (slot >= end) {
            out[slot] = -1;
            continue;
        }
        const int expert = run.slot_expert[slot];
        int before = 0;
        for (int other = first; other < end; ++other) before += run.slot_expert[other] < expert;
        out[first + before] = d.first_expert() + expert;
        quota[expert * all_ranks + rank] = run.slot_rows[slot];
    }
}

}  // namespace
}  // namespace moe_ep

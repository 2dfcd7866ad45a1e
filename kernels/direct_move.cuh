// `direct`, a push: counts, sending and moving in one launch.
//
// The first warps of blocks [0, send_blocks) send rows. The other blocks (all, where all send) take blocks of tokens and
// rank them; the one that ends the last exchanges counts. Every warp that is through with that takes groups of places to
// send, and then moves rows: it takes the next chunk of a source, waits for its places and its rows, and moves the rows on,
// either once each into `source` (unique rows) or to all places of their routes (expanded rows). Rows that stay on the
// rank go straight from x.
//
// Nobody waits in a circle, and within a rank nobody waits for a block that may not have begun: what others wait for has
// been taken by a block that runs. Ranking waits for nothing; the exchange for the other ranks' counts, which they write
// in front of all their waits; sending for memory to be open, which every rank says first of all, and for the plan; moving
// for what has been sent. Only senders are named by number: they are the first blocks, which start first.
#pragma once

#include "direct_send.cuh"

namespace moe_ep {
namespace {

template <bool kPeer>
__device__ __forceinline__ uint4 load_row(const uint4* at) { return kPeer ? load_l2(at) : __ldg(at); }

// One row to one place.
template <bool kPeer>
__device__ __forceinline__ void copy_row(const uint4* from, uint4* to, int units, int lane) {
    for (int i = lane; i < units; i += kWarp * kUnroll) {
        uint4 v[kUnroll];
#pragma unroll
        for (int j = 0; j < kUnroll; ++j)
            if (i + j * kWarp < units) v[j] = load_row<kPeer>(from + i + j * kWarp);
#pragma unroll
        for (int j = 0; j < kUnroll; ++j)
            if (i + j * kWarp < units) to[i + j * kWarp] = v[j];
    }
}

// One row to the places that the lanes hold; -1: none. Up to 32 routes at a time.
template <bool kPeer>
__device__ __forceinline__ void spread_row(const uint4* from, char* out, int place, int units, int lane) {
    const unsigned wanted = __ballot_sync(kAll, place >= 0);
    if (wanted == 0) return;
    for (int i = lane; i - lane < units; i += kWarp * kUnroll) {
        uint4 v[kUnroll];
#pragma unroll
        for (int j = 0; j < kUnroll; ++j)
            if (i + j * kWarp < units) v[j] = load_row<kPeer>(from + i + j * kWarp);
        for (unsigned left = wanted; left != 0; left &= left - 1) {
            const int64_t row = __shfl_sync(kAll, place, __ffs(left) - 1);
            uint4* to = reinterpret_cast<uint4*>(out) + row * units;
#pragma unroll
            for (int j = 0; j < kUnroll; ++j)
                if (i + j * kWarp < units) to[i + j * kWarp] = v[j];
        }
    }
}

// Expert row of the lane's route, -1: none. The first pass takes it from what was sent and notes it. A row whose token
// found no place among the unique rows (an overflow, which is a fault by now) points nowhere and weighs nothing.
__device__ __forceinline__ int take_route(const Domain& d, const Push& p, const Route* routes, int64_t place, int k) {
    if (k >= d.top_k) return -1;
    const bool has_place = place < p.unique_capacity;
    if (!p.first) return has_place ? p.positions[place * d.top_k + k] : -1;
    const int2 both = __ldcg(reinterpret_cast<const int2*>(routes + k));
    const int to = both.x < p.row_capacity ? both.x : -1;
    if (has_place) p.positions[place * d.top_k + k] = to;
    if (to >= 0) {
        p.row_index[to] = has_place ? static_cast<int>(place) : -1;
        p.row_weights[to] = has_place ? __int_as_float(both.y) : 0.0f;
    }
    return to;
}

// A row that is here: its routes' places are noted (first pass) and the row is moved on.
template <bool kPeer>
__device__ void take_row(const Domain& d, const Push& p, const uint4* row, const Route* routes, int64_t place, int lane) {
    const int units = static_cast<int>(d.row_bytes / 16);
    if (!p.expand && place < p.unique_capacity)
        copy_row<kPeer>(row, reinterpret_cast<uint4*>(p.out) + place * units, units, lane);
    if (!p.expand && !p.first) return;
    for (int start = 0; start < d.top_k; start += kWarp) {
        const int to = take_route(d, p, routes, place, start + lane);
        if (p.expand) spread_row<kPeer>(row, p.out, to, units, lane);
    }
}

// Until a chunk's places (first pass) and rows are here; false where a rank never came.
__device__ bool await_chunk(const Domain& d, const Push& p, int chunk, int source, uint32_t epoch, int lane) {
    const int64_t groups = (d.max_tokens + kPlaceTokens - 1) / kPlaceTokens;
    const uint32_t* places = peer_at<uint32_t>(d, d.rank, d.at.place_flags) + source * groups;
    const uint32_t* rows = peer_at<uint32_t>(d, d.rank, d.at.push_flags) + static_cast<int64_t>(source) * d.chunks;
    bool here = true;
    if (lane == 0 && p.first) here = wait_epoch(d, places + chunk * d.chunk_rows / kPlaceTokens, epoch, source);
    if (lane == 1 && source != d.rank) here = wait_epoch(d, rows + chunk, epoch, source);
    const bool all = __ballot_sync(kAll, here) == kAll;
    __syncwarp();  // a vote orders no memory
    return all;
}

__device__ void move_chunk(const Domain& d, const Push& p, int chunk, int source, uint32_t epoch) {
    const int lane = threadIdx.x % kWarp, first = chunk * d.chunk_rows;
    if (!await_chunk(d, p, chunk, source, epoch, lane)) return;
    const int64_t base = static_cast<int64_t>(source) * d.max_tokens + first;
    int place = -1;
    if (lane < d.chunk_rows && first + lane < d.max_tokens) {
        place = p.first ? __ldcg(peer_at<int>(d, d.rank, d.at.push_places) + base + lane) : p.places[base + lane];
        if (p.first) p.places[base + lane] = place;
    }
    const char* rows = peer_at<char>(d, d.rank, d.at.push_rows);
    for (unsigned left = __ballot_sync(kAll, place >= 0); left != 0; left &= left - 1) {
        const int bit = __ffs(left) - 1;
        const int64_t to = __shfl_sync(kAll, place, bit);
        const Route* routes = peer_at<Route>(d, d.rank, d.at.push_routes) + (base + bit) * d.top_k;
        const char* row = source == d.rank ? p.x + (first + bit) * d.row_bytes : rows + (base + bit) * d.row_bytes;
        if (source == d.rank) take_row<false>(d, p, reinterpret_cast<const uint4*>(row), routes, to, lane);
        else take_row<true>(d, p, reinterpret_cast<const uint4*>(row), routes, to, lane);
    }
}

// Behind the last row there is nothing: -1.
__device__ void clear_tail(const Push& p, const Plan& plan, int top_k) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kBlockThreads;
    for (int64_t n = plan.totals[0] + thread; n < p.row_capacity; n += threads) p.row_index[n] = -1;
    const int64_t unique = min(static_cast<int64_t>(plan.totals[1]), p.unique_capacity);
    for (int64_t i = unique * top_k + thread; i < p.unique_capacity * top_k; i += threads) p.positions[i] = -1;
}

// What was not sent has left no index: as if nothing had come, so that whoever runs on reads nothing.
__device__ void forget_rows(const Domain& d, const Push& p, const Plan& plan) {
    for (int64_t n = threadIdx.x; n < p.row_capacity; n += kBlockThreads) p.row_index[n] = -1;
    for (int64_t i = threadIdx.x; i < p.unique_capacity * d.top_k; i += kBlockThreads) p.positions[i] = -1;
    for (int64_t i = threadIdx.x; i < static_cast<int64_t>(d.num_ranks) * d.max_tokens; i += kBlockThreads)
        p.places[i] = -1;
    for (int l = threadIdx.x; l < d.num_local; l += kBlockThreads) plan.offsets[l] = plan.tokens[l] = 0;
    if (threadIdx.x == 0) plan.offsets[d.num_local] = plan.totals[0] = plan.totals[1] = 0;
}

// Whether this block is the operation's last; all of its threads take part.
__device__ bool is_last_block(const Domain& d) {
    __threadfence();
    __syncthreads();
    const bool last = __syncthreads_count(threadIdx.x == 0 && atomicAdd(d.epoch + 1, 1u) == gridDim.x - 1) != 0;
    if (last) __threadfence();
    return last;
}

// As the end of end_operation, by one thread.
__device__ void close_operation(const Domain& d, uint32_t epoch) {
    d.epoch[1] = d.epoch[2] = d.epoch[3] = d.epoch[5] = d.epoch[6] = 0;
    __threadfence();
    *reinterpret_cast<volatile uint32_t*>(d.epoch) = epoch;
}

__global__ void __launch_bounds__(kBlockThreads, 2) push_rows(Domain d, Exchange x, Push p) {
    const uint32_t epoch = current_epoch(d);
    const Plan plan(p.plan, d.num_experts, d.num_ranks, d.num_local);
    const bool sends = blockIdx.x < p.send_blocks;
    open_memory(d, epoch);
    if (p.settle && (!sends || gridDim.x == p.send_blocks)) settle_counts(d, x, epoch);
    if (sends && threadIdx.x / kWarp < kSendWarps) send_rows(d, p, epoch);
    if (p.first) send_places(d, p, plan, epoch);
    for (int64_t i; (i = take_item(d)) < static_cast<int64_t>(d.chunks) * d.num_ranks;)
        move_chunk(d, p, static_cast<int>(i / d.num_ranks), (d.rank + static_cast<int>(i % d.num_ranks)) % d.num_ranks,
                   epoch);
    if (p.first) clear_tail(p, plan, d.top_k);
    if (!is_last_block(d)) return;
    if (p.first && __syncthreads_count(threadIdx.x == 0 && is_lost(d))) forget_rows(d, p, plan);
    if (threadIdx.x == 0) close_operation(d, epoch);
}

// Counts alone, for a host that must read them before it can make room for rows.
__global__ void __launch_bounds__(kBlockThreads, 2) settle_plan(Domain d, Exchange x) {
    const uint32_t epoch = current_epoch(d);
    settle_counts(d, x, epoch);
    if (is_last_block(d) && threadIdx.x == 0) close_operation(d, epoch);
}

}  // namespace
}  // namespace moe_ep

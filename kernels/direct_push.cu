// `direct`, second part: one copy of a token to each rank that has experts for it.
//
// The first blocks send: a warp takes a chunk of tokens for one destination, writes their rows into that rank's peer
// memory and sets the chunk's flag. The others, and those that have sent, receive: a warp takes the next chunk of a
// source, waits for its flag, and moves the rows on, either once each into `source` (unique rows) or to all places of their routes (expanded rows). Rows that
// stay on the rank go straight from x. So a chunk is moved on while the next ones are on the link.
//
// The first pass of a micro-batch also sends where each route's row belongs, and its weight; later passes know it.
#include "direct.cuh"

namespace moe_ep {

namespace {

constexpr int kThreads = 384;
constexpr int kUnroll = 4;  // 16-byte loads in flight a lane

__device__ __forceinline__ uint4 load_own(const uint4* at) { return __ldg(at); }

// One row to one place.
template <bool kPeer>
__device__ __forceinline__ void copy_row(const uint4* from, uint4* to, int units, int lane) {
    for (int i = lane; i < units; i += kWarp * kUnroll) {
        uint4 v[kUnroll];
#pragma unroll
        for (int j = 0; j < kUnroll; ++j)
            if (i + j * kWarp < units) v[j] = kPeer ? load_l2(from + i + j * kWarp) : load_own(from + i + j * kWarp);
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
            if (i + j * kWarp < units) v[j] = kPeer ? load_l2(from + i + j * kWarp) : load_own(from + i + j * kWarp);
        for (unsigned left = wanted; left != 0; left &= left - 1) {
            const int64_t row = __shfl_sync(kAll, place, __ffs(left) - 1);
            uint4* to = reinterpret_cast<uint4*>(out) + row * units;
#pragma unroll
            for (int j = 0; j < kUnroll; ++j)
                if (i + j * kWarp < units) to[i + j * kWarp] = v[j];
        }
    }
}

// Unique index of the lane's token for `dest`, -1 where it does not go there or there is no token.
__device__ __forceinline__ int find_unique(const Domain& d, const Push& p, int t, int last, int dest) {
    if (t >= last) return -1;
    const int64_t at = static_cast<int64_t>(t) * d.num_ranks + dest;
    const int own = p.unique[at];
    if (!p.first || own < 0) return own;
    const int width = d.num_experts + d.num_ranks + 1;
    const int index = own + p.block_counts[static_cast<int64_t>(t / p.tokens_per_block) * width + d.num_experts + dest];
    p.unique[at] = index;
    return index;
}

// Where route k of token t lies at `dest`: first pass.
__device__ __forceinline__ Route find_route(const Domain& d, const Push& p, const Plan& plan, int t, int k, int dest) {
    const int64_t at = static_cast<int64_t>(t) * d.top_k + k;
    const int64_t id = __ldg(p.ids + at);
    if (id < 0 || id >= d.num_experts || id / d.num_local != dest) return {-1, 0.0f};
    const int width = d.num_experts + d.num_ranks + 1;
    const int64_t row = static_cast<int64_t>(plan.base[id]) + __ldg(p.route_rank + at) +
                        p.block_counts[static_cast<int64_t>(t / p.tokens_per_block) * width + id];
    return {row < p.row_bound ? static_cast<int>(row) : -1, __ldg(p.weights + at)};
}

// Rows of one chunk into the destination's memory; returns what its flag says of them.
__device__ uint64_t send_chunk(const Domain& d, const Push& p, const Plan& plan, int chunk, int dest) {
    const int lane = threadIdx.x % kWarp, units = static_cast<int>(d.row_bytes / 16);
    const int first = chunk * d.chunk_rows, last = min(p.num_tokens, first + d.chunk_rows);
    const int index = find_unique(d, p, first + lane, lane < d.chunk_rows ? last : 0, dest);
    const unsigned goes = __ballot_sync(kAll, index >= 0);
    const int start = goes == 0 ? 0 : __shfl_sync(kAll, index, __ffs(goes) - 1);
    int64_t row = static_cast<int64_t>(d.rank) * d.max_tokens + start;
    for (unsigned left = goes; left != 0; left &= left - 1, ++row) {
        const int t = first + __ffs(left) - 1;
        copy_row<false>(reinterpret_cast<const uint4*>(p.x) + static_cast<int64_t>(t) * units,
                        peer_at<uint4>(d, dest, d.at.push_rows) + row * units, units, lane);
        for (int k = lane; p.first && k < d.top_k; k += kWarp)
            peer_at<Route>(d, dest, d.at.push_routes)[row * d.top_k + k] = find_route(d, p, plan, t, k, dest);
    }
    return static_cast<uint64_t>(start) << 8 | __popc(goes);
}

__device__ void send_group(const Domain& d, const Push& p, const Plan& plan, int first, int last, int dest,
                           uint32_t epoch) {
    const int lane = threadIdx.x % kWarp;
    uint64_t mine = 0;
    for (int chunk = first; chunk < last; ++chunk) {
        const uint64_t said = send_chunk(d, p, plan, chunk, dest);
        if (lane == chunk - first) mine = said;
    }
    uint64_t* flags = peer_at<uint64_t>(d, dest, d.at.push_flags) + static_cast<int64_t>(d.rank) * d.chunks;
    set_flags(flags + first + lane, static_cast<uint64_t>(epoch) << 32 | mine, lane < last - first);
}

// A row that is here: its routes' places are noted (first pass) and the row is moved on.
template <bool kPeer>
__device__ void take_row(const Domain& d, const Push& p, const Plan& plan, const uint4* row, const Route* routes, int t,
                         int source, int index, int units, int lane) {
    const int64_t place = plan.received_base[source] + static_cast<int64_t>(index);
    // no place is an overflow, which is a fault by now
    if (!p.expand && place < p.unique_capacity) copy_row<kPeer>(row, reinterpret_cast<uint4*>(p.out) + place * units, units, lane);
    for (int start = 0; start < d.top_k; start += kWarp) {
        const int k = start + lane;
        int to = -1;
        if (k < d.top_k && p.first) {
            Route route;
            if (kPeer) {
                const int2 both = __ldcg(reinterpret_cast<const int2*>(routes + k));
                route = {both.x, __int_as_float(both.y)};
            } else {
                route = find_route(d, p, plan, t, k, d.rank);
            }
            to = route.row;
            if (place < p.unique_capacity) p.positions[place * d.top_k + k] = to;
            if (to >= 0) {  // a row whose token has no place points nowhere and weighs nothing
                p.row_index[to] = place < p.unique_capacity ? static_cast<int>(place) : -1;
                p.row_weights[to] = place < p.unique_capacity ? route.weight : 0.0f;
            }
        } else if (k < d.top_k && place < p.unique_capacity) {
            to = p.positions[place * d.top_k + k];
        }
        if (p.expand) spread_row<kPeer>(row, p.out, to, units, lane);
    }
}

__device__ void receive_chunk(const Domain& d, const Push& p, const Plan& plan, int chunk, int source, uint32_t epoch) {
    const int lane = threadIdx.x % kWarp, units = static_cast<int>(d.row_bytes / 16);
    const uint64_t* flag = peer_at<uint64_t>(d, d.rank, d.at.push_flags) + static_cast<int64_t>(source) * d.chunks + chunk;
    const uint64_t value = __shfl_sync(kAll, lane == 0 ? wait_chunk(d, flag, epoch, source) : 0, 0);
    const int count = static_cast<int>(value & 0xff), start = static_cast<int>(value >> 8 & 0xffffff);
    for (int index = start; index < start + count; ++index) {
        const int64_t at = static_cast<int64_t>(source) * d.max_tokens + index;
        take_row<true>(d, p, plan, peer_at<uint4>(d, d.rank, d.at.push_rows) + at * units,
                       peer_at<Route>(d, d.rank, d.at.push_routes) + at * d.top_k, 0, source, index, units, lane);
    }
}

__device__ void keep_chunk(const Domain& d, const Push& p, const Plan& plan, int chunk) {
    const int lane = threadIdx.x % kWarp, units = static_cast<int>(d.row_bytes / 16);
    const int first = chunk * d.chunk_rows, last = min(p.num_tokens, first + d.chunk_rows);
    const int index = find_unique(d, p, first + lane, lane < d.chunk_rows ? last : 0, d.rank);
    for (unsigned left = __ballot_sync(kAll, index >= 0); left != 0; left &= left - 1) {
        const int bit = __ffs(left) - 1, t = first + bit;
        take_row<false>(d, p, plan, reinterpret_cast<const uint4*>(p.x) + static_cast<int64_t>(t) * units, nullptr, t,
                        d.rank, __shfl_sync(kAll, index, bit), units, lane);
    }
}

// Behind the last row there is nothing: -1.
__device__ void clear_tail(const Domain& d, const Push& p, const Plan& plan, int64_t thread, int64_t threads) {
    for (int64_t n = plan.totals[0] + thread; n < p.row_capacity; n += threads) p.row_index[n] = -1;
    const int64_t unique = min(static_cast<int64_t>(plan.totals[1]), p.unique_capacity);
    for (int64_t i = unique * d.top_k + thread; i < p.unique_capacity * d.top_k; i += threads) p.positions[i] = -1;
}

// What was not sent has left no index: as if nothing had come, so that whoever runs on reads nothing.
__device__ void forget_rows(const Domain& d, const Push& p, const Plan& plan) {
    for (int64_t n = threadIdx.x; n < p.row_capacity; n += kThreads) p.row_index[n] = -1;
    for (int64_t i = threadIdx.x; i < p.unique_capacity * d.top_k; i += kThreads) p.positions[i] = -1;
    for (int l = threadIdx.x; l < d.num_local; l += kThreads) plan.offsets[l] = plan.tokens[l] = 0;
    if (threadIdx.x == 0) plan.offsets[d.num_local] = plan.totals[0] = plan.totals[1] = 0;
}

// As end_operation; behind a lost rank the last block forgets what the others noted.
__device__ void end_first(const Domain& d, const Push& p, const Plan& plan, uint32_t epoch) {
    __threadfence();
    __syncthreads();
    const int last = threadIdx.x == 0 && atomicAdd(d.epoch + 1, 1u) == gridDim.x - 1;
    if (!__syncthreads_or(last)) return;
    if (__syncthreads_or(threadIdx.x == 0 && is_lost(d))) forget_rows(d, p, plan);
    if (threadIdx.x != 0) return;
    d.epoch[1] = d.epoch[2] = 0;
    __threadfence();
    *reinterpret_cast<volatile uint32_t*>(d.epoch) = epoch;
}

__global__ void __launch_bounds__(kThreads, 2) push_rows(Domain d, Push p) {
    const uint32_t epoch = current_epoch(d);
    const Plan plan(p.plan, d.num_experts, d.num_ranks, d.num_local);
    const int others = d.num_ranks - 1, warp = threadIdx.x / kWarp;
    if (!p.first) open_memory(d, epoch);  // the first pass stands behind an exchange of counts, which says the same
    if (blockIdx.x < p.send_blocks) {
        if (!p.first) await_open_memory(d, epoch);
        const int warps = p.send_blocks * (kThreads / kWarp), group = group_of_chunks(d, warps);
        const int64_t groups = (d.chunks + group - 1) / group;
        for (int64_t i = warp * p.send_blocks + blockIdx.x; i < groups * others; i += warps) {
            const int first = static_cast<int>(i / others) * group;
            send_group(d, p, plan, first, min(d.chunks, first + group),
                       (d.rank + 1 + static_cast<int>(i % others)) % d.num_ranks, epoch);
        }
    }
    for (int64_t i; (i = take_item(d)) < static_cast<int64_t>(d.chunks) * d.num_ranks;) {
        const int source = (d.rank + static_cast<int>(i % d.num_ranks)) % d.num_ranks;
        const int chunk = static_cast<int>(i / d.num_ranks);
        if (source == d.rank) keep_chunk(d, p, plan, chunk);
        else receive_chunk(d, p, plan, chunk, source, epoch);
    }
    if (!p.first) return end_operation(d, epoch);
    clear_tail(d, p, plan, static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x,
               static_cast<int64_t>(gridDim.x) * kThreads);
    end_first(d, p, plan, epoch);
}

}  // namespace
}  // namespace moe_ep

// Blocks [0, send_blocks) send first; all `blocks` receive. Returns a cudaError_t.
extern "C" int moe_ep_direct_push(const moe_ep::Domain* domain, const moe_ep::Push* push, int blocks,
                                  cudaStream_t stream) {
    using namespace moe_ep;
    if (push->send_blocks < 1 || blocks < push->send_blocks) return cudaErrorInvalidValue;
    push_rows<<<blocks, kThreads, 0, stream>>>(*domain, *push);
    return launched();
}

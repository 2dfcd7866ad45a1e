// `direct`, sending: one copy of a token to each rank that has experts for it, and where its routes' rows belong there.
//
// Rows need no plan: a token's row lies at the token's own place in the destination's memory. They start at once, beside
// the exchange of counts; places follow when the plan is there.
#pragma once

#include "direct_settle.cuh"

namespace moe_ep {
namespace {

__device__ __forceinline__ bool goes_to(const Domain& d, const int64_t* ids, int dest) {
    bool goes = false;
    for (int k = 0; k < d.top_k; ++k) {
        const int64_t id = __ldg(ids + k);
        goes |= id >= 0 && id < d.num_experts && id / d.num_local == dest;
    }
    return goes;
}

// Rows of tokens [first, last) that go to `dest`; neighbours travel together.
__device__ void send_tokens(const Domain& d, const Push& p, Sender& sender, int first, int last, int dest) {
    const int lane = threadIdx.x % kWarp;
    char* there = peer_at<char>(d, dest, d.at.push_rows) + static_cast<int64_t>(d.rank) * d.max_tokens * d.row_bytes;
    for (int start = first; start < last; start += kWarp) {
        const int t = start + lane;
        unsigned left = __ballot_sync(kAll, t < last && goes_to(d, p.ids + static_cast<int64_t>(t) * d.top_k, dest));
        while (left != 0) {
            const int skip = __ffs(left) - 1, length = __ffs(~(left >> skip)) - 1;
            const int count = length < 0 ? kWarp : length;
            const int64_t at = static_cast<int64_t>(start + skip) * d.row_bytes;
            sender.copy(p.x + at, there + at, count * d.row_bytes);
            left = skip + count >= kWarp ? 0 : left >> (skip + count) << (skip + count);
        }
    }
}

// The first warps of the first blocks. Whoever has enough to send alone makes its groups of chunks longer.
__device__ void send_rows(const Domain& d, const Push& p, uint32_t epoch) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, others = d.num_ranks - 1;
    if (others == 0) return;
    await_open_memory(d, epoch);
    Sender sender(block_shared(), warp);
    const int warps = p.send_blocks * kSendWarps, group = group_of_chunks(d, warps);
    const int64_t groups = (d.chunks + group - 1) / group;
    for (int64_t i = warp * p.send_blocks + blockIdx.x; i < groups * others; i += warps) {
        const int first = static_cast<int>(i / others) * group, last = min(d.chunks, first + group);
        const int dest = (d.rank + 1 + static_cast<int>(i % others)) % d.num_ranks;
        send_tokens(d, p, sender, first * d.chunk_rows, min(p.num_tokens, last * d.chunk_rows), dest);
        sender.drain();
        uint32_t* flags = peer_at<uint32_t>(d, dest, d.at.push_flags) + static_cast<int64_t>(d.rank) * d.chunks;
        set_flags(flags + first + lane, epoch, lane < last - first);
    }
}

// Expert row at `dest` and weight of route k of token t.
__device__ __forceinline__ Route find_route(const Domain& d, const Push& p, const Plan& plan, int t, int k, int dest) {
    const int64_t at = static_cast<int64_t>(t) * d.top_k + k;
    const int64_t id = __ldg(p.ids + at);
    if (id < 0 || id >= d.num_experts || id / d.num_local != dest) return {-1, 0.0f};
    const int width = d.num_experts + d.num_ranks + 1;
    const int64_t row = static_cast<int64_t>(plan.base[id]) + p.route_rank[at] +
                        p.block_counts[static_cast<int64_t>(t / p.tokens_per_block) * width + id];
    return {row < p.row_bound ? static_cast<int>(row) : -1, __ldg(p.weights + at)};
}

// A group of tokens: each one's unique row at `dest`, and its routes. Tokens that there are not go nowhere.
__device__ void send_places_of(const Domain& d, const Push& p, const Plan& plan, int group, int dest, uint32_t epoch) {
    const int lane = threadIdx.x % kWarp, first = group * kPlaceTokens, t = first + lane;
    const int64_t base = static_cast<int64_t>(d.rank) * d.max_tokens + first;
    int place = t < p.num_tokens ? p.unique[static_cast<int64_t>(t) * d.num_ranks + dest] : -1;
    const int width = d.num_experts + d.num_ranks + 1;
    if (place >= 0)
        place += plan.sent_base[dest] +
                 p.block_counts[static_cast<int64_t>(t / p.tokens_per_block) * width + d.num_experts + dest];
    if (t < d.max_tokens) peer_at<int>(d, dest, d.at.push_places)[base + lane] = place;
    const unsigned goes = __ballot_sync(kAll, place >= 0);
    Route* routes = peer_at<Route>(d, dest, d.at.push_routes) + base * d.top_k;
    for (int i = lane; goes != 0 && i < kPlaceTokens * d.top_k; i += kWarp)
        if (goes >> (i / d.top_k) & 1) routes[i] = find_route(d, p, plan, first + i / d.top_k, i % d.top_k, dest);
    const int64_t groups = (d.max_tokens + kPlaceTokens - 1) / kPlaceTokens;
    set_flags(peer_at<uint32_t>(d, dest, d.at.place_flags) + d.rank * groups + group, epoch, lane == 0);
}

// Places of all tokens at all ranks, this one too: a warp takes the next group of tokens and rank.
__device__ void send_places(const Domain& d, const Push& p, const Plan& plan, uint32_t epoch) {
    const int64_t groups = (d.max_tokens + kPlaceTokens - 1) / kPlaceTokens;
    if (p.settle) await_plan(d, epoch);
    await_open_memory(d, epoch);
    for (int64_t i; (i = take_item(d.epoch + 6)) < groups * d.num_ranks;)
        send_places_of(d, p, plan, static_cast<int>(i / d.num_ranks),
                       (d.rank + static_cast<int>(i % d.num_ranks)) % d.num_ranks, epoch);
}

}  // namespace
}  // namespace moe_ep

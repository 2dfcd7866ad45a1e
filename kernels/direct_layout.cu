// `direct`, first part: where every row of this rank goes, and the exchange of counts.
//
// rank_routes  compute stream: ranks inside blocks of tokens, and each block's counts
// exchange     comm stream, one block: scans the blocks' counts, tells every rank, and derives the exact places
//
// A row's place at its destination is a function of counts alone, so no rank asks another for room and results repeat.
#include "direct.cuh"

namespace moe_ep {
namespace {

constexpr int kThreads = kWarp * kWarps;
constexpr int kMaxTokenBlocks = 128;

struct Ranking {
    const int64_t* ids;  // [T, K]
    int num_tokens, top_k, num_experts, num_ranks, per_block;
    int *route_rank, *unique, *counts;  // [T, K], [T, R], [blocks, E + R + 1]
};

// Rank of each route among its block's routes to the same expert, in the order (token, k).
__device__ void rank_in_expert(const Ranking& r, int* histogram, int first, int last) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int per_warp = (last - first + kThreads - 1) / kThreads * kWarp;
    const int begin = min(last, first + warp * per_warp), end = min(last, begin + per_warp);
    int* own = histogram + warp * r.num_experts;
    for (int i = begin + lane; i < end; i += kWarp) {
        const int64_t id = __ldg(r.ids + i);
        if (id >= 0 && id < r.num_experts) atomicAdd(own + id, 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < r.num_experts; e += blockDim.x) {
        int running = 0;
        for (int w = 0; w < kWarps; ++w) {
            const int count = histogram[w * r.num_experts + e];
            histogram[w * r.num_experts + e] = running;
            running += count;
        }
        r.counts[static_cast<int64_t>(blockIdx.x) * (r.num_experts + r.num_ranks + 1) + e] = running;
    }
    __syncthreads();
    for (int start = begin; start < end; start += kWarp) {
        const int i = start + lane;
        const int64_t id = i < end ? __ldg(r.ids + i) : -1;
        const bool valid = id >= 0 && id < r.num_experts;
        const unsigned same = __match_any_sync(kAll, valid ? static_cast<int>(id) : -1);
        const int before = __popc(same & ((1u << lane) - 1));
        const int place = valid ? own[id] + before : -1;
        __syncwarp();
        if (valid && before == 0) own[id] += __popc(same);
        __syncwarp();
        if (i < end) r.route_rank[i] = place;
    }
}

// Rank of each token among its block's tokens with a route to the same rank.
__device__ void rank_in_destination(const Ranking& r, int first, int last) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, num_local = r.num_experts / r.num_ranks;
    int* counts = r.counts + static_cast<int64_t>(blockIdx.x) * (r.num_experts + r.num_ranks + 1) + r.num_experts;
    for (int rank = warp; rank < r.num_ranks; rank += kWarps) {
        int running = 0;
        for (int start = first; start < last; start += kWarp) {
            const int t = start + lane;
            bool goes = false;
            for (int k = 0; k < r.top_k && t < last; ++k) {
                const int64_t id = __ldg(r.ids + static_cast<int64_t>(t) * r.top_k + k);
                goes |= id >= 0 && id < r.num_experts && id / num_local == rank;
            }
            const unsigned all = __ballot_sync(kAll, goes);
            if (t < last)
                r.unique[static_cast<int64_t>(t) * r.num_ranks + rank] =
                    goes ? running + __popc(all & ((1u << lane) - 1)) : -1;
            running += __popc(all);
        }
        if (lane == 0) counts[rank] = running;
    }
}

// Shared memory: a histogram [E] a warp, and the number of bad ids.
__global__ void rank_routes(Ranking r) {
    extern __shared__ int shared[];
    int* bad = shared + kWarps * r.num_experts;
    for (int i = threadIdx.x; i <= kWarps * r.num_experts; i += blockDim.x) shared[i] = 0;
    const int first = blockIdx.x * r.per_block, last = min(r.num_tokens, first + r.per_block);
    __syncthreads();
    rank_in_expert(r, shared, first * r.top_k, last * r.top_k);
    rank_in_destination(r, first, last);
    for (int i = first * r.top_k + threadIdx.x; i < last * r.top_k; i += blockDim.x) {
        const int64_t id = __ldg(r.ids + i);
        if (id < -1 || id >= r.num_experts) atomicAdd(bad, 1);
    }
    __syncthreads();
    const int width = r.num_experts + r.num_ranks + 1;
    if (threadIdx.x == 0) r.counts[static_cast<int64_t>(blockIdx.x) * width + width - 1] = *bad;
}

// Exclusive prefix over the blocks, in place; the totals go to shared memory.
__device__ void scan_blocks(const Exchange& x, int* totals, int width) {
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        int running = 0;
        for (int b = 0; b < x.num_blocks; b += 8) {
            int counts[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) counts[j] = b + j < x.num_blocks ? x.block_counts[(b + j) * width + c] : 0;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                if (b + j < x.num_blocks) x.block_counts[(b + j) * width + c] = running;
                running += counts[j];
            }
        }
        totals[c] = running;
    }
    __syncthreads();
}

// What this rank says of itself, the worst of its faults first.
__device__ int own_word(const Exchange& x, int bad_ids, int word) {
    const int bad_tokens = x.bad_tokens == nullptr ? 0 : static_cast<int>(*x.bad_tokens);
    if (word == 2) return x.no_grad;
    if (word == 3) return x.place;
    if (bad_tokens > 0) return word == 0 ? x.code_non_finite : bad_tokens;
    if (bad_ids > 0) return word == 0 ? x.code_bad_ids : bad_ids;
    return word == 0 ? x.host_code : x.host_value;
}

__device__ __forceinline__ int* counts_of(const Domain& d, int rank, uint32_t epoch) {
    const int64_t size = static_cast<int64_t>(d.num_ranks) * (d.num_experts + d.num_ranks + kWords);
    return peer_at<int>(d, rank, d.at.counts) + (epoch & 1) * size;
}

// Tells every rank this rank's counts and words, and waits for theirs.
__device__ void all_gather_counts(const Domain& d, const Exchange& x, const int* totals, uint32_t epoch) {
    const int width = d.num_experts + d.num_ranks, columns = width + kWords;
    for (int i = threadIdx.x; i < d.num_ranks * columns; i += blockDim.x) {
        const int to = i / columns, c = i % columns;
        counts_of(d, to, epoch)[d.rank * columns + c] = c < width ? totals[c] : own_word(x, totals[width], c - width);
    }
    __syncthreads();
    for (int r = threadIdx.x; r < d.num_ranks; r += blockDim.x) {
        __threadfence_system();
        store_release(peer_at<uint32_t>(d, r, d.at.arrived) + d.rank, epoch);
    }
    for (int r = threadIdx.x; r < d.num_ranks; r += blockDim.x)
        if (!wait_epoch(d, peer_at<uint32_t>(d, d.rank, d.at.arrived) + r, epoch, r)) {
            int* words = counts_of(d, d.rank, epoch) + r * columns + width;
            words[0] = d.code_lost, words[1] = r;
        }
    __syncthreads();
}

// A warp a destination: rows of its experts, this rank's share in them, and its unique rows.
__device__ void place_at(const Domain& d, const Exchange& x, const int* counts, int dest, const Plan& plan) {
    const int lane = threadIdx.x % kWarp, columns = d.num_experts + d.num_ranks + kWords;
    int running = 0;
    for (int start = 0; start < d.num_local; start += kWarp) {
        const int l = start + lane, e = dest * d.num_local + l;
        int total = 0, before = 0;
        for (int s = 0; s < d.num_ranks && l < d.num_local; ++s) {
            const int count = __ldcg(counts + s * columns + e);
            if (s < d.rank) before += count;
            total += count;
        }
        int through = total;
        for (int step = 1; step < kWarp; step *= 2) {
            const int other = __shfl_up_sync(kAll, through, step);
            if (lane >= step) through += other;
        }
        if (l < d.num_local) {
            plan.base[e] = running + through - total + before;
            if (dest == d.rank) {
                plan.offsets[l] = static_cast<int>(min(static_cast<int64_t>(running + through - total), x.row_capacity));
                const int64_t end = min(static_cast<int64_t>(running + through), x.row_capacity);
                plan.tokens[l] = static_cast<int>(end) - plan.offsets[l];
            }
        }
        running += __shfl_sync(kAll, through, kWarp - 1);
    }
    if (lane == 0 && running > x.row_capacity) note_fault(d, x.code_overflow, running);
    if (lane == 0 && dest == d.rank) {
        plan.offsets[d.num_local] = static_cast<int>(min(static_cast<int64_t>(running), x.row_capacity));
        plan.totals[0] = plan.offsets[d.num_local];
    }
}

__device__ void place_unique(const Domain& d, const int* counts, const Plan& plan) {
    const int columns = d.num_experts + d.num_ranks + kWords;
    for (int r = threadIdx.x; r < d.num_ranks; r += blockDim.x) {
        int sent = 0, received = 0;
        for (int s = 0; s < d.rank; ++s) sent += __ldcg(counts + s * columns + d.num_experts + r);
        for (int s = 0; s < r; ++s) received += __ldcg(counts + s * columns + d.num_experts + d.rank);
        const int own = __ldcg(counts + r * columns + d.num_experts + d.rank);
        plan.sent_base[r] = sent;
        plan.received_base[r] = received;
        plan.received[r] = own;
        if (r == d.num_ranks - 1) plan.totals[1] = received + own;
    }
}

// The same faults on every rank, since every rank sees the same words.
__device__ void note_words(const Domain& d, const Exchange& x, const int* counts, const Plan& plan) {
    const int width = d.num_experts + d.num_ranks, columns = width + kWords;
    for (int r = threadIdx.x; r < d.num_ranks; r += blockDim.x) {
        const int* words = counts + r * columns + width;
        int said[kWords];
        for (int w = 0; w < kWords; ++w) plan.words[r * kWords + w] = said[w] = __ldcg(words + w);
        if (said[0] > 0) note_fault(d, said[0], said[1]);
        if (said[2] != __ldcg(counts + width + 2)) note_fault(d, x.code_no_grad, r);
        if (said[3] != __ldcg(counts + width + 3)) note_fault(d, x.code_place, r);
    }
}

// One block. Shared memory: totals [E + R + 1].
__global__ void exchange_counts(Domain d, Exchange x) {
    extern __shared__ int totals[];
    const uint32_t epoch = current_epoch(d);
    scan_blocks(x, totals, d.num_experts + d.num_ranks + 1);
    all_gather_counts(d, x, totals, epoch);
    const Plan plan(x.plan, d.num_experts, d.num_ranks, d.num_local);
    const int* counts = counts_of(d, d.rank, epoch);
    for (int dest = threadIdx.x / kWarp; dest < d.num_ranks; dest += blockDim.x / kWarp)
        place_at(d, x, counts, dest, plan);
    place_unique(d, counts, plan);
    note_words(d, x, counts, plan);
    end_operation(d, epoch);
}

int tokens_per_block(int num_tokens) {
    const int64_t even = ceil_div(num_tokens, kMaxTokenBlocks);
    return static_cast<int>(ceil_div(even < 1 ? 1 : even, kWarp) * kWarp);
}

}  // namespace
}  // namespace moe_ep

// Tokens that one block of moe_ep_direct_rank takes.
extern "C" int moe_ep_direct_tokens_per_block(int num_tokens) { return moe_ep::tokens_per_block(num_tokens); }

// ids int64 [T, K]; route_rank int32 [T, K]; unique int32 [T, R]; counts int32 [blocks, E + R + 1] with
// blocks = max(1, ceil(T / tokens_per_block)). Returns a cudaError_t.
extern "C" int moe_ep_direct_rank(const int64_t* ids, int num_tokens, int top_k, int num_experts, int num_ranks,
                                  int* route_rank, int* unique, int* counts, cudaStream_t stream) {
    using namespace moe_ep;
    const int per_block = tokens_per_block(num_tokens);
    const int blocks = num_tokens == 0 ? 1 : static_cast<int>(ceil_div(num_tokens, per_block));
    const size_t bytes = sizeof(int) * (static_cast<size_t>(kWarps) * num_experts + 1);
    if (num_experts < 1 || bytes > 200 * 1024) return cudaErrorInvalidValue;
    if (bytes > 48 * 1024) {
        const auto error = cudaFuncSetAttribute(rank_routes, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                static_cast<int>(bytes));
        if (error) return error;
    }
    const Ranking ranking{ids, num_tokens, top_k, num_experts, num_ranks, per_block, route_rank, unique, counts};
    rank_routes<<<blocks, kThreads, bytes, stream>>>(ranking);
    return launched();
}

// Fills the plan, int32 [E + 7R + 2L + 3]. Returns a cudaError_t.
extern "C" int moe_ep_direct_exchange(const moe_ep::Domain* domain, const moe_ep::Exchange* exchange,
                                      cudaStream_t stream) {
    using namespace moe_ep;
    const size_t bytes = sizeof(int) * (domain->num_experts + domain->num_ranks + 1);
    exchange_counts<<<1, 1024, bytes, stream>>>(*domain, *exchange);
    return launched();
}

// Bytes of the structs that cross the C interface, so that the caller can check its own.
extern "C" void moe_ep_direct_sizes(int* sizes) {
    sizes[0] = sizeof(moe_ep::Domain);
    sizes[1] = sizeof(moe_ep::Exchange);
    sizes[2] = sizeof(moe_ep::Push);
    sizes[3] = sizeof(moe_ep::Return);
}

// `direct`, where every row goes: ranks inside blocks of tokens, the exchange of counts, and the plan.
//
// A row's place at its destination is a function of counts alone, so no rank asks another for room and results repeat.
#pragma once

#include "direct_block.cuh"

namespace moe_ep {
namespace {

// Rank of each route among its block's routes to the same expert, in the order (token, k).
__device__ void rank_in_expert(const Domain& d, const Exchange& x, int* histogram, int block, int first, int last) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int per_warp = (last - first + kBlockThreads - 1) / kBlockThreads * kWarp;
    const int begin = min(last, first + warp * per_warp), end = min(last, begin + per_warp);
    int* own = histogram + warp * d.num_experts;
    for (int i = begin + lane; i < end; i += kWarp) {
        const int64_t id = __ldg(x.ids + i);
        if (id >= 0 && id < d.num_experts) atomicAdd(own + id, 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < d.num_experts; e += blockDim.x) {
        int running = 0;
        for (int w = 0; w < kBlockWarps; ++w) {
            const int count = histogram[w * d.num_experts + e];
            histogram[w * d.num_experts + e] = running;
            running += count;
        }
        x.block_counts[static_cast<int64_t>(block) * (d.num_experts + d.num_ranks + 1) + e] = running;
    }
    __syncthreads();
    for (int start = begin; start < end; start += kWarp) {
        const int i = start + lane;
        const int64_t id = i < end ? __ldg(x.ids + i) : -1;
        const bool valid = id >= 0 && id < d.num_experts;
        const unsigned same = __match_any_sync(kAll, valid ? static_cast<int>(id) : -1);
        const int before = __popc(same & ((1u << lane) - 1));
        const int place = valid ? own[id] + before : -1;
        __syncwarp();
        if (valid && before == 0) own[id] += __popc(same);
        __syncwarp();
        if (i < end) x.route_rank[i] = place;
    }
}

// Rank of each token among its block's tokens with a route to the same rank.
__device__ void rank_in_destination(const Domain& d, const Exchange& x, int block, int first, int last) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    int* counts = x.block_counts + static_cast<int64_t>(block) * (d.num_experts + d.num_ranks + 1) + d.num_experts;
    for (int rank = warp; rank < d.num_ranks; rank += kBlockWarps) {
        int running = 0;
        for (int start = first; start < last; start += kWarp) {
            const int t = start + lane;
            bool goes = false;
            for (int k = 0; k < d.top_k && t < last; ++k) {
                const int64_t id = __ldg(x.ids + static_cast<int64_t>(t) * d.top_k + k);
                goes |= id >= 0 && id < d.num_experts && id / d.num_local == rank;
            }
            const unsigned all = __ballot_sync(kAll, goes);
            if (t < last)
                x.unique[static_cast<int64_t>(t) * d.num_ranks + rank] =
                    goes ? running + __popc(all & ((1u << lane) - 1)) : -1;
            running += __popc(all);
        }
        if (lane == 0) counts[rank] = running;
    }
}

// Shared memory: a histogram [E] a warp, and the number of bad ids. All threads of the block take part.
__device__ void rank_tokens(const Domain& d, const Exchange& x, int block, int* shared) {
    int* bad = shared + kBlockWarps * d.num_experts;
    for (int i = threadIdx.x; i <= kBlockWarps * d.num_experts; i += kBlockThreads) shared[i] = 0;
    const int first = block * x.tokens_per_block, last = min(x.num_tokens, first + x.tokens_per_block);
    __syncthreads();
    rank_in_expert(d, x, shared, block, first * d.top_k, last * d.top_k);
    rank_in_destination(d, x, block, first, last);
    for (int i = first * d.top_k + threadIdx.x; i < last * d.top_k; i += kBlockThreads) {
        const int64_t id = __ldg(x.ids + i);
        if (id < -1 || id >= d.num_experts) atomicAdd(bad, 1);
    }
    __syncthreads();
    const int width = d.num_experts + d.num_ranks + 1;
    if (threadIdx.x == 0) x.block_counts[static_cast<int64_t>(block) * width + width - 1] = *bad;
}

// Exclusive prefix over the blocks, in place; the totals go to shared memory.
__device__ void scan_blocks(const Exchange& x, int* totals, int width) {
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        int running = 0;
        for (int b = 0; b < x.num_blocks; b += 8) {
            int counts[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) counts[j] = b + j < x.num_blocks ? __ldcg(x.block_counts + (b + j) * width + c) : 0;
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
__device__ void exchange_counts(const Domain& d, const Exchange& x, uint32_t epoch, int* totals) {
    scan_blocks(x, totals, d.num_experts + d.num_ranks + 1);
    all_gather_counts(d, x, totals, epoch);
    const Plan plan(x.plan, d.num_experts, d.num_ranks, d.num_local);
    const int* counts = counts_of(d, d.rank, epoch);
    for (int dest = threadIdx.x / kWarp; dest < d.num_ranks; dest += kBlockWarps) place_at(d, x, counts, dest, plan);
    place_unique(d, counts, plan);
    note_words(d, x, counts, plan);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) store_release(d.epoch + 4, epoch);
}

// The next number of a counter, for the whole block.
__device__ int take_for_block(uint32_t* counter, int* word) {
    __syncthreads();
    if (threadIdx.x == 0) *word = static_cast<int>(atomicAdd(counter, 1u));
    __syncthreads();
    return *word;
}

// Takes blocks of tokens and ranks them; whoever ends the last one exchanges counts. So nobody here waits for a block of
// this rank, which may not run yet.
__device__ void settle_counts(const Domain& d, const Exchange& x, uint32_t epoch) {
    int* shared = reinterpret_cast<int*>(block_shared());
    int* word = shared + kBlockWarps * d.num_experts + 1;
    for (int block; (block = take_for_block(d.epoch + 3, word)) < x.num_blocks;) {
        rank_tokens(d, x, block, shared);
        __threadfence();
        if (take_for_block(d.epoch + 5, word) != x.num_blocks - 1) continue;
        __threadfence();
        exchange_counts(d, x, epoch, shared);
    }
    __syncthreads();  // the memory is used for rows next
}

// Until the plan of this operation is there. No time limit: the block that makes it is at work, and its waits have one.
__device__ inline void await_plan(const Domain& d, uint32_t epoch) {
    if (threadIdx.x % kWarp == 0)
        while (static_cast<int>(load_acquire(d.epoch + 4) - epoch) < 0) __nanosleep(kPause);
    __syncwarp();
}

}  // namespace
}  // namespace moe_ep

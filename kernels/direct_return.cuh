// `direct`, results on their way home.
//
// The first blocks send: a warp takes a chunk of a source's tokens, adds up each one's routes here (k ascending, in
// float32) and writes one row into the source's peer memory, at the token's place. The others, and those that have sent,
// finish: a warp takes the next token and adds up what the ranks sent for it (rank ascending, in float32, rounded once);
// this rank's own routes are read where they lie, one by one in their place of that order, and are not rounded in between.
#pragma once

#include "direct_block.cuh"

namespace moe_ep {

namespace {

template <typename T> struct Unit {  // 16 bytes
    static constexpr int kWidth = 16 / sizeof(T);
    __device__ static void add(float* total, uint4 v) {
        const T* values = reinterpret_cast<const T*>(&v);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) total[i] += widen(values[i]);
    }
    __device__ static uint4 round(const float* total) {
        uint4 v;
        T* values = reinterpret_cast<T*>(&v);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) values[i] = narrow<T>(total[i]);
        return v;
    }
};

// out = sum of `count` rows, whose addresses the warp put into shared memory: kRows x kUnits loads of a lane before the
// first add. A row that is not there adds +0, which changes no sum that began with +0.
template <typename T, int kRows, int kUnits>
__device__ __forceinline__ void sum_in_steps(const uint4* const* rows, int count, uint4* out, int units, int lane) {
#pragma unroll 1
    for (int i = lane; i < units; i += kWarp * kUnits) {
        float total[kUnits][Unit<T>::kWidth] = {};
#pragma unroll 1
        for (int j = 0; j < count; j += kRows) {
            uint4 v[kRows][kUnits];
#pragma unroll
            for (int n = 0; n < kRows; ++n) {
                const bool there = j + n < count;
                const uint4* row = rows[there ? j + n : j] + i;
#pragma unroll
                for (int m = 0; m < kUnits; ++m)
                    v[n][m] = load_l2_if(row + m * kWarp, there && i + m * kWarp < units);
            }
#pragma unroll
            for (int n = 0; n < kRows; ++n)
#pragma unroll
                for (int m = 0; m < kUnits; ++m) Unit<T>::add(total[m], v[n][m]);
        }
#pragma unroll
        for (int m = 0; m < kUnits; ++m)
            if (i + m * kWarp < units) out[i + m * kWarp] = Unit<T>::round(total[m]);
    }
}

template <typename T>
__device__ __forceinline__ void sum_rows(const uint4* const* rows, int count, uint4* out, int units, int lane) {
    if (count <= 4) sum_in_steps<T, 4, 2>(rows, count, out, units, lane);
    else sum_in_steps<T, 8, 1>(rows, count, out, units, lane);
}

// Appends the rows of a unique row's routes; returns the new count.
__device__ int append_routes(const Domain& d, const Return& r, int64_t place, const uint4** list, int count, int lane) {
    const int units = static_cast<int>(d.row_bytes / 16);
    const uint4* rows = reinterpret_cast<const uint4*>(r.rows);
    if (place >= r.unique_capacity) return count;
    if (!r.sum) {
        if (lane == 0) list[count] = rows + place * units;
        return count + 1;
    }
    for (int start = 0; start < d.top_k; start += kWarp) {
        const int k = start + lane;
        const int64_t n = k < d.top_k ? __ldg(r.positions + place * d.top_k + k) : -1;
        const unsigned found = __ballot_sync(kAll, n >= 0);
        if (n >= 0) list[count + __popc(found & ((1u << lane) - 1))] = rows + n * units;
        count += __popc(found);
    }
    return count;
}

// Tokens [first, last) of rank `to`, as far as they came here.
template <typename T>
__device__ void send_rows(const Domain& d, const Return& r, int first, int last, int to, const uint4** list) {
    const int lane = threadIdx.x % kWarp, units = static_cast<int>(d.row_bytes / 16);
    const int* places = r.places + static_cast<int64_t>(to) * d.max_tokens;
    for (int t = first; t < last; ++t) {
        const int64_t place = __ldg(places + t), at = static_cast<int64_t>(d.rank) * d.max_tokens + t;
        if (place < 0) continue;
        const int count = append_routes(d, r, place, list, 0, lane);
        __syncwarp();
        sum_rows<T>(list, count, peer_at<uint4>(d, to, d.at.back_rows) + at * units, units, lane);
        for (int k = lane; r.with_weights && k < d.top_k; k += kWarp) {
            const int n = place < r.unique_capacity ? __ldg(r.positions + place * d.top_k + k) : -1;
            peer_at<float>(d, to, d.at.back_weights)[at * d.top_k + k] = n < 0 ? 0.0f : r.row_weights[n];
        }
        __syncwarp();
    }
}

// Nobody waits for a chunk without rows, but a flag of it does no harm.
template <typename T>
__device__ void send_group(const Domain& d, const Return& r, int first, int last, int to, uint32_t epoch,
                           const uint4** list) {
    const int lane = threadIdx.x % kWarp;
    send_rows<T>(d, r, first * d.chunk_rows, min(d.max_tokens, last * d.chunk_rows), to, list);
    uint32_t* flags = peer_at<uint32_t>(d, to, d.at.back_flags) + static_cast<int64_t>(d.rank) * d.chunks;
    set_flags(flags + first + lane, epoch, lane < last - first);
}

// Until everything that ranks send for token t is here.
__device__ void await_token(const Domain& d, const int* unique, int64_t t, uint32_t epoch, int lane) {
    const uint32_t* flags = peer_at<uint32_t>(d, d.rank, d.at.back_flags) + t / d.chunk_rows;
    for (int rank = lane; rank < d.num_ranks; rank += kWarp)
        if (rank != d.rank && __ldg(unique + rank) >= 0)
            wait_epoch(d, flags + static_cast<int64_t>(rank) * d.chunks, epoch, rank);
    __syncwarp();
}

__device__ void finish_weights(const Domain& d, const Return& r, int64_t own, int64_t t, int lane) {
    for (int k = lane; k < d.top_k; k += kWarp) {
        const int64_t id = __ldg(r.ids + t * d.top_k + k);
        float value = 0.0f;
        if (id >= 0 && id < d.num_experts) {
            const int64_t rank = id / d.num_local;
            if (rank != d.rank) {
                value = __ldcg(peer_at<float>(d, d.rank, d.at.back_weights) + (rank * d.max_tokens + t) * d.top_k + k);
            } else if (own >= 0 && own < r.unique_capacity) {
                const int n = __ldg(r.positions + own * d.top_k + k);
                value = n < 0 ? 0.0f : r.row_weights[n];
            }
        }
        r.weights[t * d.top_k + k] = value;
    }
}

template <typename T>
__device__ void finish_token(const Domain& d, const Return& r, int64_t t, uint32_t epoch, const uint4** list) {
    const int lane = threadIdx.x % kWarp, units = static_cast<int>(d.row_bytes / 16);
    const int* unique = r.unique + t * d.num_ranks;
    const int64_t own = __ldg(r.places + static_cast<int64_t>(d.rank) * d.max_tokens + t);
    await_token(d, unique, t, epoch, lane);
    int count = 0;
    for (int rank = 0; rank < d.num_ranks; ++rank) {
        if (rank == d.rank) {
            if (own >= 0) count = append_routes(d, r, own, list, count, lane);
        } else if (__ldg(unique + rank) >= 0) {
            if (lane == 0)
                list[count] = peer_at<uint4>(d, d.rank, d.at.back_rows) +
                              (static_cast<int64_t>(rank) * d.max_tokens + t) * units;
            ++count;
        }
    }
    __syncwarp();
    sum_rows<T>(list, count, reinterpret_cast<uint4*>(r.out) + t * units, units, lane);
    if (r.with_weights) finish_weights(d, r, own, t, lane);
    __syncwarp();
}

// Shared memory: R + K row addresses a warp.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads, 2) return_rows(Domain d, Return r) {
    const uint4** list =
        reinterpret_cast<const uint4**>(block_shared()) + (threadIdx.x / kWarp) * (d.num_ranks + d.top_k);
    const uint32_t epoch = current_epoch(d);
    const int others = d.num_ranks - 1, warp = threadIdx.x / kWarp;
    open_memory(d, epoch);
    if (blockIdx.x < r.send_blocks) {
        await_open_memory(d, epoch);
        const int warps = r.send_blocks * kBlockWarps, group = group_of_chunks(d, warps);
        const int64_t groups = (d.chunks + group - 1) / group;
        for (int64_t i = warp * r.send_blocks + blockIdx.x; i < groups * others; i += warps) {
            const int first = static_cast<int>(i / others) * group;
            send_group<T>(d, r, first, min(d.chunks, first + group),
                          (d.rank + 1 + static_cast<int>(i % others)) % d.num_ranks, epoch, list);
        }
    }
    for (int64_t t; (t = take_item(d)) < r.num_tokens;) finish_token<T>(d, r, t, epoch, list);
    end_operation(d, epoch);
}

}  // namespace
}  // namespace moe_ep

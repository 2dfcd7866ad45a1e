// `direct`, third part: results on their way home.
//
// The first blocks send: a warp takes a chunk of a source's unique rows, adds up each one's routes here (k ascending, in
// float32) and writes one row into the source's peer memory. The others, and those that have sent, finish: a warp takes
// the next token and adds up what the ranks sent for each (rank ascending, in float32, rounded once); this rank's own routes are read where they
// lie, one by one in their place of that order, and are not rounded in between.
#include "direct.cuh"

namespace moe_ep {

namespace {

constexpr int kThreads = 512;
constexpr int kUnroll = 4;
constexpr int kWarpsHere = kThreads / kWarp;

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

// out = sum of `count` rows, whose addresses the warp put into shared memory.
template <typename T>
__device__ void sum_rows(const uint4* const* rows, int count, uint4* out, int units, int lane) {
    for (int i = lane; i < units; i += kWarp) {
        float total[Unit<T>::kWidth] = {};
        for (int j = 0; j < count; j += kUnroll) {
            uint4 v[kUnroll];
#pragma unroll
            for (int n = 0; n < kUnroll; ++n) v[n] = j + n < count ? load_l2(rows[j + n] + i) : uint4{};
#pragma unroll
            for (int n = 0; n < kUnroll; ++n)
                if (j + n < count) Unit<T>::add(total, v[n]);
        }
        out[i] = Unit<T>::round(total);
    }
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

template <typename T>
__device__ void send_rows(const Domain& d, const Return& r, const Plan& plan, int first, int last, int to,
                          const uint4** list) {
    const int lane = threadIdx.x % kWarp, units = static_cast<int>(d.row_bytes / 16);
    for (int index = first; index < last; ++index) {
        const int64_t place = plan.received_base[to] + static_cast<int64_t>(index);
        const int64_t at = static_cast<int64_t>(d.rank) * d.max_tokens + index;
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
__device__ void send_group(const Domain& d, const Return& r, const Plan& plan, int first, int last, int to,
                           uint32_t epoch, const uint4** list) {
    const int lane = threadIdx.x % kWarp;
    send_rows<T>(d, r, plan, first * d.chunk_rows, min(plan.received[to], last * d.chunk_rows), to, list);
    uint64_t* flags = peer_at<uint64_t>(d, to, d.at.back_flags) + static_cast<int64_t>(d.rank) * d.chunks;
    set_flags(flags + first + lane, static_cast<uint64_t>(epoch) << 32, lane < last - first);
}

// Until everything that ranks send for token t is here.
__device__ void await_token(const Domain& d, const int* unique, uint32_t epoch, int lane) {
    for (int rank = lane; rank < d.num_ranks; rank += kWarp) {
        const int index = __ldg(unique + rank);
        if (index < 0 || rank == d.rank) continue;
        wait_chunk(d, peer_at<uint64_t>(d, d.rank, d.at.back_flags) + static_cast<int64_t>(rank) * d.chunks +
                          index / d.chunk_rows, epoch, rank);
    }
    __syncwarp();
}

__device__ void finish_weights(const Domain& d, const Return& r, const Plan& plan, const int* unique, int64_t t, int lane) {
    for (int k = lane; k < d.top_k; k += kWarp) {
        const int64_t id = __ldg(r.ids + t * d.top_k + k);
        float value = 0.0f;
        if (id >= 0 && id < d.num_experts) {
            const int rank = static_cast<int>(id / d.num_local), index = __ldg(unique + rank);
            const int64_t place = plan.received_base[d.rank] + static_cast<int64_t>(index);
            if (rank != d.rank) {
                const int64_t at = static_cast<int64_t>(rank) * d.max_tokens + index;
                value = __ldcg(peer_at<float>(d, d.rank, d.at.back_weights) + at * d.top_k + k);
            } else if (place < r.unique_capacity) {
                const int n = __ldg(r.positions + place * d.top_k + k);
                value = n < 0 ? 0.0f : r.row_weights[n];
            }
        }
        r.weights[t * d.top_k + k] = value;
    }
}

template <typename T>
__device__ void finish_token(const Domain& d, const Return& r, const Plan& plan, int64_t t, uint32_t epoch,
                             const uint4** list) {
    const int lane = threadIdx.x % kWarp, units = static_cast<int>(d.row_bytes / 16);
    const int* unique = r.unique + t * d.num_ranks;
    await_token(d, unique, epoch, lane);
    int count = 0;
    for (int rank = 0; rank < d.num_ranks; ++rank) {
        const int index = __ldg(unique + rank);
        if (index < 0) continue;
        if (rank == d.rank) {
            count = append_routes(d, r, plan.received_base[rank] + static_cast<int64_t>(index), list, count, lane);
        } else {
            if (lane == 0)
                list[count] = peer_at<uint4>(d, d.rank, d.at.back_rows) +
                              (static_cast<int64_t>(rank) * d.max_tokens + index) * units;
            ++count;
        }
    }
    __syncwarp();
    sum_rows<T>(list, count, reinterpret_cast<uint4*>(r.out) + t * units, units, lane);
    if (r.with_weights) finish_weights(d, r, plan, unique, t, lane);
    __syncwarp();
}

// Shared memory: R + K row addresses a warp.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2) return_rows(Domain d, Return r) {
    extern __shared__ const uint4* lists[];
    const uint4** list = lists + (threadIdx.x / kWarp) * (d.num_ranks + d.top_k);
    const uint32_t epoch = current_epoch(d);
    const Plan plan(r.plan, d.num_experts, d.num_ranks, d.num_local);
    const int others = d.num_ranks - 1, warp = threadIdx.x / kWarp;
    open_memory(d, epoch);
    if (blockIdx.x < r.send_blocks) {
        await_open_memory(d, epoch);
        const int warps = r.send_blocks * kWarpsHere, group = group_of_chunks(d, warps);
        const int64_t groups = (d.chunks + group - 1) / group;
        for (int64_t i = warp * r.send_blocks + blockIdx.x; i < groups * others; i += warps) {
            const int first = static_cast<int>(i / others) * group;
            send_group<T>(d, r, plan, first, min(d.chunks, first + group),
                          (d.rank + 1 + static_cast<int>(i % others)) % d.num_ranks, epoch, list);
        }
    }
    for (int64_t t; (t = take_item(d)) < r.num_tokens;) finish_token<T>(d, r, plan, t, epoch, list);
    end_operation(d, epoch);
}

template <typename T>
int launch(const Domain& domain, const Return& r, int blocks, cudaStream_t stream) {
    const size_t bytes = sizeof(void*) * kWarpsHere * (domain.num_ranks + domain.top_k);
    if (bytes > 48 * 1024) return cudaErrorInvalidValue;
    return_rows<T><<<blocks, kThreads, bytes, stream>>>(domain, r);
    return launched();
}

}  // namespace
}  // namespace moe_ep

// Blocks [0, send_blocks) send first; all `blocks` finish. Returns a cudaError_t.
extern "C" int moe_ep_direct_return(const moe_ep::Domain* domain, const moe_ep::Return* back, int dtype, int blocks,
                                    cudaStream_t stream) {
    using namespace moe_ep;
    if (back->send_blocks < 1 || blocks < back->send_blocks) return cudaErrorInvalidValue;
    switch (dtype) {
        case kFloat32: return launch<float>(*domain, *back, blocks, stream);
        case kBFloat16: return launch<__nv_bfloat16>(*domain, *back, blocks, stream);
        case kFloat16: return launch<__half>(*domain, *back, blocks, stream);
        default: return cudaErrorInvalidValue;
    }
}

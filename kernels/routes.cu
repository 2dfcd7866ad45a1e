// The place of every route among the rows sorted by expert, by counting instead of sorting.
//
// Nothing here depends on the order in which blocks run: a route's place is the start of its expert, plus the routes of
// that expert in earlier blocks, earlier warps and earlier lanes. That is the order of a stable sort.
#include "scan.cuh"

namespace moe_ep {
namespace {

// Counts of each block's routes: [blocks, E + 1], the last for ids outside [-1, E).
__global__ void count_routes(const int64_t* ids, int num_routes, int num_experts, int per_block, int* block_counts) {
    extern __shared__ int histogram[];
    for (int e = threadIdx.x; e <= num_experts; e += blockDim.x) histogram[e] = 0;
    __syncthreads();
    const int begin = blockIdx.x * per_block, end = min(num_routes, begin + per_block);
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
        const int64_t id = __ldg(ids + i);
        if (id != -1) atomicAdd(histogram + (id >= 0 && id < num_experts ? static_cast<int>(id) : num_experts), 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e <= num_experts; e += blockDim.x)
        block_counts[static_cast<int64_t>(blockIdx.x) * (num_experts + 1) + e] = histogram[e];
}

struct Routes {
    const int64_t* ids;
    const int* block_counts;
    int num_routes, top_k, num_experts, per_block, alignment, capacity;
    int *row_token, *row_slot, *positions, *offsets;
    int64_t *counts, *num_bad;
};

// starts[e]: first row of expert e, padding included; before[e]: its first row for this block.
__device__ void find_starts(const Routes& r, int* starts, int* before) {
    const int stride = r.num_experts + 1;
    for (int e = threadIdx.x; e < r.num_experts; e += blockDim.x) {
        int total = 0, earlier = 0;
        for (int b = 0; b < gridDim.x; ++b) {
            const int count = __ldg(r.block_counts + static_cast<int64_t>(b) * stride + e);
            total += count;
            if (b < blockIdx.x) earlier += count;
        }
        before[e] = earlier;
        starts[e] = padded(total, r.alignment);
        if (blockIdx.x == 0) r.counts[e] = total;
    }
    __syncthreads();
    exclusive_scan(starts, r.num_experts);
    for (int e = threadIdx.x; e < r.num_experts; e += blockDim.x) before[e] += starts[e];
    if (blockIdx.x != 0) return;
    for (int e = threadIdx.x; e <= r.num_experts; e += blockDim.x) r.offsets[e] = starts[e];
    if (threadIdx.x == 0) {
        int64_t bad = 0;
        for (int b = 0; b < gridDim.x; ++b) bad += r.block_counts[static_cast<int64_t>(b) * stride + r.num_experts];
        *r.num_bad = bad;
    }
}

// Rows that no route fills, behind each expert and behind the last: -1.
__device__ void clear_gaps(const Routes& r, const int* starts) {
    const int stride = r.num_experts + 1;
    for (int e = blockIdx.x; r.alignment > 1 && e < r.num_experts; e += gridDim.x) {
        int total = 0;
        for (int b = 0; b < gridDim.x; ++b) total += __ldg(r.block_counts + static_cast<int64_t>(b) * stride + e);
        for (int n = starts[e] + total + threadIdx.x; n < starts[e + 1]; n += blockDim.x)
            r.row_token[n] = r.row_slot[n] = -1;
    }
    const int first = starts[r.num_experts] + blockIdx.x * blockDim.x + threadIdx.x;
    for (int n = first; n < r.capacity; n += gridDim.x * blockDim.x) r.row_token[n] = r.row_slot[n] = -1;
}

// Shared memory: starts [E + 1], before [E], then one histogram [E] a warp. Blocks may have fewer than kWarps warps.
__global__ void place_routes(Routes r) {
    extern __shared__ int shared[];
    int* starts = shared;
    int* before = starts + r.num_experts + 1;
    int* next = before + r.num_experts;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    for (int i = threadIdx.x; i < warps * r.num_experts; i += blockDim.x) next[i] = 0;
    find_starts(r, starts, before);
    __syncthreads();
    const int per_warp = r.per_block / warps;
    const int begin = blockIdx.x * r.per_block + warp * per_warp, end = min(r.num_routes, begin + per_warp);
    int* own = next + warp * r.num_experts;
    for (int i = begin + lane; i < end; i += kWarp) {
        const int64_t id = __ldg(r.ids + i);
        if (id >= 0 && id < r.num_experts) atomicAdd(own + id, 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < r.num_experts; e += blockDim.x) {
        int running = before[e];
        for (int w = 0; w < warps; ++w) {
            const int count = next[w * r.num_experts + e];
            next[w * r.num_experts + e] = running;
            running += count;
        }
    }
    __syncthreads();
    for (int first = begin; first < end; first += kWarp) {
        const int i = first + lane;
        const int64_t id = i < end ? __ldg(r.ids + i) : -1;
        const bool valid = id >= 0 && id < r.num_experts;
        const unsigned peers = __match_any_sync(kAll, valid ? static_cast<int>(id) : -1);
        const int rank = __popc(peers & ((1u << lane) - 1));
        const int place = valid ? own[id] + rank : -1;
        __syncwarp();
        if (valid && rank == 0) own[id] += __popc(peers);
        __syncwarp();
        if (i < end) r.positions[i] = place;
        if (valid) {
            r.row_token[place] = i / r.top_k;
            r.row_slot[place] = i;
        }
    }
    clear_gaps(r, starts);
}

}  // namespace
}  // namespace moe_ep

// Ints that moe_ep_sort_routes needs as workspace.
extern "C" int64_t moe_ep_sort_workspace(int64_t num_routes, int num_experts) {
    return static_cast<int64_t>(moe_ep::scan_blocks(num_routes)) * (num_experts + 1);
}

// ids int64 [num_routes]; row_token, row_slot int32 [capacity]; positions int32 [num_routes]; counts int64 [E];
// offsets int32 [E + 1]; num_bad int64 []: ids outside [-1, E). Returns a cudaError_t.
extern "C" int moe_ep_sort_routes(const int64_t* ids, int* workspace, int* row_token, int* row_slot, int* positions,
                                  int64_t* counts, int* offsets, int64_t* num_bad, int64_t num_routes, int top_k,
                                  int num_experts, int alignment, int64_t capacity, cudaStream_t stream) {
    using namespace moe_ep;
    if (num_experts < 1 || num_experts > kMaxGroups || capacity > INT32_MAX) return cudaErrorInvalidValue;
    const int blocks = scan_blocks(num_routes);
    const int per_block = static_cast<int>(ceil_div(ceil_div(num_routes, blocks), kThreads) * kThreads);
    const size_t count_bytes = sizeof(int) * (num_experts + 1);
    count_routes<<<blocks, kThreads, count_bytes, stream>>>(ids, static_cast<int>(num_routes), num_experts, per_block,
                                                            workspace);
    if (const auto error = launched()) return error;
    int warps = kWarps;
    while (warps > 1 && (warps + 2) * num_experts > 2 * kMaxGroups) warps /= 2;
    const size_t bytes = sizeof(int) * (static_cast<size_t>(warps + 2) * num_experts + 1);
    if (const auto error = allow_shared(place_routes, bytes)) return error;
    const Routes routes{ids, workspace, static_cast<int>(num_routes), top_k, num_experts, per_block, alignment,
                        static_cast<int>(capacity), row_token, row_slot, positions, offsets, counts, num_bad};
    place_routes<<<blocks, warps * kWarp, bytes, stream>>>(routes);
    return launched();
}

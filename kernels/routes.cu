// Integers of a dispatch, by counting instead of sorting: the place of every route, and how received rows are regrouped.
//
// Nothing here depends on the order in which blocks run: a route's place is the start of its expert, plus the routes of
// that expert in earlier blocks, earlier warps and earlier lanes. That is the order of a stable sort.
#include "common.cuh"

namespace moe_ep {
namespace {

constexpr int kThreads = kWarp * kWarps;
constexpr int kMaxBlocks = 128;
constexpr int kRoutesPerBlock = 1024;
constexpr int kMaxFaults = 4;

// In place, exclusive; a[n] becomes the total. All threads of the block take part.
__device__ void exclusive_scan(int* a, int n) {
    __shared__ int sums[kThreads];
    const int share = (n + blockDim.x - 1) / blockDim.x;
    const int begin = min(n, static_cast<int>(threadIdx.x) * share), end = min(n, begin + share);
    int own = 0;
    for (int i = begin; i < end; ++i) own += a[i];
    sums[threadIdx.x] = own;
    __syncthreads();
    for (int step = 1; step < blockDim.x; step *= 2) {
        const int before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += before;
        __syncthreads();
    }
    int running = sums[threadIdx.x] - own;
    for (int i = begin; i < end; ++i) {
        const int value = a[i];
        a[i] = running;
        running += value;
    }
    if (threadIdx.x == 0) a[n] = sums[blockDim.x - 1];
    __syncthreads();
}

__device__ __forceinline__ int padded(int count, int alignment) {
    return (count + alignment - 1) / alignment * alignment;
}

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

struct Regroup {
    const int64_t* counts;  // [R, L], rows counts_stride apart
    int64_t counts_stride;
    int num_ranks, num_local, alignment, num_rows, capacity;
    int *order, *places, *offsets, *tokens;
};

// Where each (rank, expert) begins among the received rows, and where (expert, rank) begins among the expert rows.
__device__ void find_segments(const Regroup& g, int* from, int* to) {
    const int segments = g.num_ranks * g.num_local;
    for (int s = threadIdx.x; s < segments; s += blockDim.x) {
        const int rank = s / g.num_local, expert = s % g.num_local;
        const int count = static_cast<int>(g.counts[rank * g.counts_stride + expert]);
        from[s] = count;
        to[expert * g.num_ranks + rank] = count;
    }
    __syncthreads();
    for (int l = threadIdx.x; l < g.num_local; l += blockDim.x) {
        int total = 0;
        for (int r = 0; r < g.num_ranks; ++r) total += to[l * g.num_ranks + r];
        const int whole = padded(total, g.alignment);
        to[l * g.num_ranks + g.num_ranks - 1] += whole - total;
        if (blockIdx.x == 0) g.tokens[l] = whole;
    }
    __syncthreads();
    exclusive_scan(from, segments);
    exclusive_scan(to, segments);
    if (blockIdx.x != 0) return;
    for (int l = threadIdx.x; l <= g.num_local; l += blockDim.x) g.offsets[l] = to[l * g.num_ranks];
}

__device__ void clear_padding(const Regroup& g, const int* from, const int* to) {
    for (int l = blockIdx.x; g.alignment > 1 && l < g.num_local; l += gridDim.x) {
        const int last = (g.num_ranks - 1) * g.num_local + l;  // the expert's last segment, before its padding
        const int filled = to[l * g.num_ranks + g.num_ranks - 1] + from[last + 1] - from[last];
        for (int n = filled + threadIdx.x; n < to[(l + 1) * g.num_ranks]; n += blockDim.x) g.order[n] = -1;
    }
    const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    const int segments = g.num_ranks * g.num_local;
    for (int n = to[segments] + first; n < g.capacity; n += step) g.order[n] = -1;
    for (int n = from[segments] + first; n < g.num_rows; n += step) g.places[n] = -1;
}

// Shared memory: from [R*L + 1], to [R*L + 1].
__global__ void regroup_rows(Regroup g) {
    extern __shared__ int shared[];
    const int segments = g.num_ranks * g.num_local;
    int* from = shared;
    int* to = from + segments + 1;
    find_segments(g, from, to);
    const int total = min(from[segments], g.num_rows);
    for (int u = blockIdx.x * blockDim.x + threadIdx.x; u < total; u += gridDim.x * blockDim.x) {
        int low = 0, high = segments - 1;  // the last segment that begins at or before u has rows
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (from[middle] <= u) low = middle;
            else high = middle - 1;
        }
        const int place = to[low % g.num_local * g.num_ranks + low / g.num_local] + u - from[low];
        g.places[u] = place;
        g.order[place] = u;
    }
    clear_padding(g, from, to);
}

struct Faults {
    const int64_t* counts[kMaxFaults];
    int64_t codes[kMaxFaults];
    int num;
};

// message[r] = the counts of rank r's experts, then code and value of the last fault that was met, then the place.
__global__ void write_message(const int64_t* counts, Faults faults, int64_t value, int64_t place, int num_ranks,
                              int num_local, int64_t* message) {
    int64_t code = 0;
    for (int f = 0; f < faults.num; ++f) {
        const int64_t count = *faults.counts[f];
        if (count > 0) {
            code = faults.codes[f];
            value = count;
        }
    }
    const int width = num_local + 3;
    for (int i = threadIdx.x; i < num_ranks * width; i += blockDim.x) {
        const int rank = i / width, column = i % width - num_local;
        message[i] = column < 0 ? counts[rank * num_local + column + num_local]
                                : (column == 0 ? code : (column == 1 ? value : place));
    }
}

template <typename Kernel>
cudaError_t allow_shared(Kernel kernel, size_t bytes) {
    if (bytes <= 48 * 1024) return cudaSuccess;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

int sort_blocks(int64_t num_routes) {
    const int64_t blocks = ceil_div(num_routes, kRoutesPerBlock);
    return static_cast<int>(blocks < 1 ? 1 : (blocks > kMaxBlocks ? kMaxBlocks : blocks));
}

}  // namespace
}  // namespace moe_ep

// Ints that moe_ep_sort_routes needs as workspace.
extern "C" int64_t moe_ep_sort_workspace(int64_t num_routes, int num_experts) {
    return static_cast<int64_t>(moe_ep::sort_blocks(num_routes)) * (num_experts + 1);
}

// ids int64 [num_routes]; row_token, row_slot int32 [capacity]; positions int32 [num_routes]; counts int64 [E];
// offsets int32 [E + 1]; num_bad int64 []: ids outside [-1, E). Returns a cudaError_t.
extern "C" int moe_ep_sort_routes(const int64_t* ids, int* workspace, int* row_token, int* row_slot, int* positions,
                                  int64_t* counts, int* offsets, int64_t* num_bad, int64_t num_routes, int top_k,
                                  int num_experts, int alignment, int64_t capacity, cudaStream_t stream) {
    using namespace moe_ep;
    if (num_experts < 1 || num_experts > kMaxGroups || capacity > INT32_MAX) return cudaErrorInvalidValue;
    const int blocks = sort_blocks(num_routes);
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

// counts int64 [R, L] with rows counts_stride apart; order int32 [capacity], places int32 [num_rows], offsets int32
// [L + 1], tokens int32 [L]. Returns a cudaError_t.
extern "C" int moe_ep_regroup_rows(const int64_t* counts, int64_t counts_stride, int num_ranks, int num_local,
                                   int alignment, int* order, int* places, int* offsets, int* tokens,
                                   int64_t num_rows, int64_t capacity, cudaStream_t stream) {
    using namespace moe_ep;
    const int64_t segments = static_cast<int64_t>(num_ranks) * num_local;
    if (segments < 1 || segments > kMaxGroups || capacity > INT32_MAX) return cudaErrorInvalidValue;
    const size_t bytes = sizeof(int) * 2 * (segments + 1);
    if (const auto error = allow_shared(regroup_rows, bytes)) return error;
    const Regroup regroup{counts, counts_stride, num_ranks, num_local, alignment, static_cast<int>(num_rows),
                          static_cast<int>(capacity), order, places, offsets, tokens};
    regroup_rows<<<sort_blocks(capacity), kThreads, bytes, stream>>>(regroup);
    return launched();
}

// counts int64 [R*L], fault_counts and codes of num_faults <= 4 faults in rising order of precedence, message int64
// [R, L + 3]. `value` is sent where no fault was met. Returns a cudaError_t.
extern "C" int moe_ep_write_message(const int64_t* counts, int num_faults, const int64_t* fault_0,
                                    const int64_t* fault_1, const int64_t* fault_2, const int64_t* fault_3,
                                    int64_t code_0, int64_t code_1, int64_t code_2, int64_t code_3, int64_t value,
                                    int64_t place, int num_ranks, int num_local, int64_t* message,
                                    cudaStream_t stream) {
    using namespace moe_ep;
    if (num_faults < 0 || num_faults > kMaxFaults) return cudaErrorInvalidValue;
    const Faults faults{{fault_0, fault_1, fault_2, fault_3}, {code_0, code_1, code_2, code_3}, num_faults};
    write_message<<<1, kThreads, 0, stream>>>(counts, faults, value, place, num_ranks, num_local, message);
    return launched();
}

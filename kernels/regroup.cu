// How received rows (source rank, local expert) become expert rows (local expert, source rank).
#include "scan.cuh"

namespace moe_ep {
namespace {

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

}  // namespace
}  // namespace moe_ep

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
    regroup_rows<<<scan_blocks(capacity), kThreads, bytes, stream>>>(regroup);
    return launched();
}

// rows[n] = x[row_index[n]], zero where the index is -1.
//
// Told from the side of the source: a warp reads a piece of a row once and stores it at each of the row's places, so
// x is read once however often a row is wanted. Rows without a source are zeroed by further warps of the same launch.
#include "common.cuh"

namespace moe_ep {
namespace {

constexpr int kUnroll = 4;     // vectors of a lane, all loaded before the first store
constexpr int kZeroRows = 8;   // rows that one warp looks at for a missing source

template <typename V>
__device__ __forceinline__ void copy_piece(const V* x, V* rows, const int* places, int num_places, int64_t limit,
                                           int64_t width, int64_t first) {
    const int lane = threadIdx.x % kWarp;
    V piece[kUnroll];
    bool loaded = false;
    for (int j = 0; j < num_places; j += kWarp) {
        const int own = j + lane < num_places ? __ldg(places + j + lane) : -1;
        unsigned wanted = __ballot_sync(kAll, own >= 0 && own < limit);
        if (wanted != 0 && !loaded) {
            loaded = true;
#pragma unroll
            for (int i = 0; i < kUnroll; ++i) piece[i] = load_if(x + first + i * kWarp, first + i * kWarp < width);
        }
        for (; wanted != 0; wanted &= wanted - 1) {
            const int place = __shfl_sync(kAll, own, __ffs(wanted) - 1);
            V* row = rows + place * width;
#pragma unroll
            for (int i = 0; i < kUnroll; ++i)
                if (first + i * kWarp < width) __stcs(row + first + i * kWarp, piece[i]);
        }
    }
}

template <typename V>
__device__ __forceinline__ void zero_missing(V* rows, const int* row_index, int64_t first_row, int64_t limit,
                                             int64_t width) {
    const int lane = threadIdx.x % kWarp;
    const int64_t own = first_row + lane;
    unsigned missing = __ballot_sync(kAll, lane < kZeroRows && own < limit && __ldg(row_index + own) < 0);
    for (; missing != 0; missing &= missing - 1) {
        V* row = rows + (first_row + __ffs(missing) - 1) * width;
        for (int64_t v = lane; v < width; v += kWarp) __stcs(row + v, V{});
    }
}

// One tile a warp: (source row, piece of it), then groups of rows to look at for a missing source.
template <typename V>
__global__ void __launch_bounds__(kWarp* kWarps)
    gather_wide(const V* x, V* rows, const int* row_index, const int* positions, const int* bound, int64_t num_source,
                int num_places, int64_t num_rows, int64_t width, int64_t pieces) {
    const int64_t tile = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    const int64_t limit = row_limit(num_rows, bound);
    const int64_t copies = num_source * pieces;
    if (tile < copies) {
        int64_t source, piece;
        divide(tile, pieces, source, piece);
        const int64_t first = piece * (kWarp * kUnroll) + threadIdx.x % kWarp;
        copy_piece(x + source * width, rows, positions + source * num_places, num_places, limit, width, first);
    } else if ((tile - copies) * kZeroRows < limit) {
        zero_missing(rows, row_index, (tile - copies) * kZeroRows, limit, width);
    }
}

// Rows of a few bytes (the routing weights): one thread a vector, from the side of the destination.
template <typename V>
__global__ void __launch_bounds__(kWarp* kWarps)
    gather_narrow(const V* x, V* rows, const int* row_index, const int* bound, int64_t num_rows, int64_t width) {
    const int64_t place = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    int64_t row, v;
    divide(place, width, row, v);
    if (row >= row_limit(num_rows, bound)) return;
    const int source = __ldg(row_index + row);
    rows[place] = source < 0 ? V{} : __ldg(x + source * width + v);
}

template <typename V>
cudaError_t launch(const void* x, void* rows, const int* row_index, const int* positions, const int* bound,
                   int64_t num_source, int num_places, int64_t num_rows, int64_t row_bytes, cudaStream_t stream) {
    const int64_t width = row_bytes / static_cast<int64_t>(sizeof(V));
    const auto* in = static_cast<const V*>(x);
    auto* out = static_cast<V*>(rows);
    constexpr int kThreads = kWarp * kWarps;
    if (width < kWarp) {
        const auto blocks = static_cast<unsigned>(ceil_div(num_rows * width, kThreads));
        gather_narrow<<<blocks, kThreads, 0, stream>>>(in, out, row_index, bound, num_rows, width);
        return launched();
    }
    const int64_t pieces = ceil_div(width, kWarp * kUnroll);
    const int64_t tiles = num_source * pieces + ceil_div(num_rows, kZeroRows);
    gather_wide<<<static_cast<unsigned>(ceil_div(tiles, kWarps)), kThreads, 0, stream>>>(
        in, out, row_index, positions, bound, num_source, num_places, num_rows, width, pieces);
    return launched();
}

}  // namespace
}  // namespace moe_ep

// x [num_source, row_bytes], rows [num_rows, row_bytes], row_index int32 [num_rows], positions int32
// [num_source, num_places], bound int32 [] on the device or null. Returns a cudaError_t.
extern "C" int moe_ep_gather_rows(const void* x, void* rows, const int* row_index, const int* positions,
                                  const int* bound, int64_t num_source, int num_places, int64_t num_rows,
                                  int64_t row_bytes, cudaStream_t stream) {
    using namespace moe_ep;
    if (num_rows == 0 || row_bytes == 0) return cudaSuccess;
    auto go = [&](auto vector) {
        return launch<decltype(vector)>(x, rows, row_index, positions, bound, num_source, num_places, num_rows,
                                        row_bytes, stream);
    };
    switch (access_bytes(bits(x) | bits(rows) | static_cast<uintptr_t>(row_bytes))) {
        case 16: return go(uint4{});
        case 8: return go(uint2{});
        case 4: return go(0u);
        case 2: return go(static_cast<unsigned short>(0));
        default: return go(static_cast<unsigned char>(0));
    }
}

extern "C" const char* moe_ep_error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

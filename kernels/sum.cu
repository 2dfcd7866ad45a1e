// y[t] = sum over j of rows[positions[t, j]], in float32 with j ascending, rounded once; -1 adds nothing.
//
// Every element is summed by one thread from +0 in that order, so results repeat bit for bit and equal the reference.
#include "common.cuh"

namespace moe_ep {
namespace {

// kVectors vectors a thread, kWarp apart; kAhead rows are loaded before the first is added.
template <typename T, typename V, int kVectors, int kAhead>
__device__ __forceinline__ void sum_piece(const V* rows, V* y, const int* places, int num_places, int64_t limit,
                                          int64_t width, int64_t first) {
    constexpr int kElements = sizeof(V) / sizeof(T);
    using Sum = typename Wide<T>::type;
    Sum total[kVectors][kElements] = {};
    for (int j = 0; j < num_places; j += kAhead) {
        int place[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) place[a] = j + a < num_places ? __ldg(places + j + a) : -1;
        V value[kAhead][kVectors];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            const bool wanted = place[a] >= 0 && place[a] < limit;
            const V* row = rows + place[a] * width;
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                const int64_t v = first + i * kWarp;
                value[a][i] = load_if(row + v, wanted && v < width);  // +0 changes no sum that began with +0
            }
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a)
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                const T* element = reinterpret_cast<const T*>(&value[a][i]);
#pragma unroll
                for (int e = 0; e < kElements; ++e) total[i][e] += widen(element[e]);
            }
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int64_t v = first + i * kWarp;
        if (v >= width) continue;
        alignas(sizeof(V)) T element[kElements];
#pragma unroll
        for (int e = 0; e < kElements; ++e) element[e] = narrow<T>(total[i][e]);
        __stcs(y + v, *reinterpret_cast<const V*>(element));
    }
}

// One tile (token, piece of its row) a warp. Asked for four blocks an SM, the compiler takes the registers that it needs to
// have all loads of a step in flight; unasked it saves them and waits for each load.
template <typename T, typename V, int kVectors, int kAhead>
__global__ void __launch_bounds__(kWarp* kWarps, 4)
    sum_wide(const V* rows, V* y, const int* positions, const int* bound, int64_t num_tokens, int num_places,
             int64_t num_rows, int64_t width, int64_t pieces) {
    const int64_t tile = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    int64_t token, piece;
    divide(tile, pieces, token, piece);
    if (token >= num_tokens) return;
    const int64_t first = piece * (kWarp * kVectors) + threadIdx.x % kWarp;
    sum_piece<T, V, kVectors, kAhead>(rows, y + token * width, positions + token * num_places, num_places,
                                      row_limit(num_rows, bound), width, first);
}

// Rows of a few vectors: one thread a vector.
template <typename T, typename V>
__global__ void __launch_bounds__(kWarp* kWarps)
    sum_narrow(const V* rows, V* y, const int* positions, const int* bound, int64_t num_tokens, int num_places,
               int64_t num_rows, int64_t width) {
    const int64_t place = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    int64_t token, v;
    divide(place, width, token, v);
    if (token >= num_tokens) return;
    sum_piece<T, V, 1, 4>(rows, y + token * width, positions + token * num_places, num_places,
                          row_limit(num_rows, bound), width, v);
}

struct Arguments {
    const void* rows;
    void* y;
    const int* positions;
    const int* bound;
    int64_t num_tokens;
    int num_places;
    int64_t num_rows, hidden;
    cudaStream_t stream;
};

template <typename T, typename V, int kVectors, int kAhead>
cudaError_t launch_wide(const Arguments& a, int64_t width) {
    const int64_t pieces = ceil_div(width, kWarp * kVectors);
    const auto blocks = static_cast<unsigned>(ceil_div(a.num_tokens * pieces, kWarps));
    sum_wide<T, V, kVectors, kAhead><<<blocks, kWarp * kWarps, 0, a.stream>>>(
        static_cast<const V*>(a.rows), static_cast<V*>(a.y), a.positions, a.bound, a.num_tokens, a.num_places,
        a.num_rows, width, pieces);
    return launched();
}

template <typename T, typename V>
cudaError_t launch(const Arguments& a) {
    const int64_t width = a.hidden * static_cast<int64_t>(sizeof(T)) / static_cast<int64_t>(sizeof(V));
    if (width < kWarp) {
        const auto blocks = static_cast<unsigned>(ceil_div(a.num_tokens * width, kWarp * kWarps));
        sum_narrow<T, V><<<blocks, kWarp * kWarps, 0, a.stream>>>(
            static_cast<const V*>(a.rows), static_cast<V*>(a.y), a.positions, a.bound, a.num_tokens, a.num_places,
            a.num_rows, width);
        return launched();
    }
    if (a.num_places <= 2) return launch_wide<T, V, 2, 2>(a, width);  // few rows: more of each, to keep loads in flight
    return launch_wide<T, V, 1, 8>(a, width);
}

template <typename T>
cudaError_t launch_aligned(const Arguments& a) {
    const auto row_bytes = static_cast<uintptr_t>(a.hidden) * sizeof(T);
    if (access_bytes(bits(a.rows) | bits(a.y) | row_bytes) == 16) return launch<T, uint4>(a);
    if constexpr (sizeof(T) == 8) {
        return launch<T, uint2>(a);
    } else if constexpr (sizeof(T) == 4) {
        return launch<T, unsigned>(a);
    } else {
        return launch<T, unsigned short>(a);
    }
}

}  // namespace
}  // namespace moe_ep

// rows [num_rows, hidden] and y [num_tokens, hidden] of one dtype, positions int32 [num_tokens, num_places], bound
// int32 [] on the device or null. Returns a cudaError_t.
extern "C" int moe_ep_sum_rows(int dtype, const void* rows, void* y, const int* positions, const int* bound,
                               int64_t num_tokens, int num_places, int64_t num_rows, int64_t hidden,
                               cudaStream_t stream) {
    using namespace moe_ep;
    if (num_tokens == 0 || hidden == 0) return cudaSuccess;
    const Arguments a{rows, y, positions, bound, num_tokens, num_places, num_rows, hidden, stream};
    switch (dtype) {
        case kFloat32: return launch_aligned<float>(a);
        case kBFloat16: return launch_aligned<__nv_bfloat16>(a);
        case kFloat16: return launch_aligned<__half>(a);
        case kFloat64: return launch_aligned<double>(a);
        default: return cudaErrorInvalidValue;
    }
}

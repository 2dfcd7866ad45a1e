// The elementwise part of the experts: SwiGLU with a weight a row, its backward, and the rows behind the last expert.
//
// Everything is computed in float32 from what is stored and rounded once. Rows from the device's bound on are neither
// read nor written (but for zero_tail, which is for them).
#include "common.cuh"

namespace moe_ep {
namespace {

// 1 / (1 + exp(-x)). Two-byte types are rounded so much coarser that the fast functions' 2 ulp do not show.
template <typename T>
__device__ __forceinline__ float sigmoid(float x) {
    if constexpr (sizeof(T) == 2) return __fdividef(1.0f, 1.0f + __expf(-x));
    else return 1.0f / (1.0f + expf(-x));
}

template <typename T, typename V>
struct Piece {
    static constexpr int kElements = sizeof(V) / sizeof(T);
    alignas(sizeof(V)) T element[kElements];

    __device__ __forceinline__ void load(const V* at) { *reinterpret_cast<V*>(element) = __ldcs(at); }
    __device__ __forceinline__ void store(V* at) const { *at = *reinterpret_cast<const V*>(element); }
    __device__ __forceinline__ float operator[](int e) const { return widen(element[e]); }
    __device__ __forceinline__ void set(int e, float x) { element[e] = narrow<T>(x); }
};

struct Rows {
    int64_t num_rows, width;  // vectors of one half (or one row, for scale)
    const float* weights;     // one a row, or null
    const int* bound;         // or null
};

constexpr int kVectors = 2;  // of a lane
constexpr int kTile = kWarp * kVectors;

// A warp's tile: (row, first vector). False where there is none.
__device__ __forceinline__ bool find_tile(const Rows& r, int64_t pieces, int64_t& row, int64_t& first) {
    const int64_t tile = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    int64_t piece;
    divide(tile, pieces, row, piece);
    first = piece * kTile + threadIdx.x % kWarp;
    return row < row_limit(r.num_rows, r.bound);
}

// act[n] = silu(gate) * up * weight
template <typename T, typename V>
__global__ void __launch_bounds__(kWarp* kWarps, 6) swiglu(const V* h, V* act, Rows r, int64_t pieces) {
    int64_t row, first;
    if (!find_tile(r, pieces, row, first)) return;
    const float weight = r.weights == nullptr ? 1.0f : __ldg(r.weights + row);
    const V* gates = h + 2 * row * r.width;
    Piece<T, V> gate[kVectors], up[kVectors], out;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int64_t v = first + i * kWarp;
        if (v >= r.width) continue;
        gate[i].load(gates + v);
        up[i].load(gates + r.width + v);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int64_t v = first + i * kWarp;
        if (v >= r.width) continue;
#pragma unroll
        for (int e = 0; e < out.kElements; ++e)
            out.set(e, gate[i][e] * sigmoid<T>(gate[i][e]) * up[i][e] * weight);
        out.store(act + row * r.width + v);
    }
}

__device__ __forceinline__ float block_sum(float own) {
    __shared__ float sums[kWarp];
    for (int step = kWarp / 2; step > 0; step /= 2) own += __shfl_xor_sync(kAll, own, step);
    if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = own;
    __syncthreads();
    float total = 0.0f;
    if (threadIdx.x == 0)
        for (int w = 0; w < blockDim.x / kWarp; ++w) total += sums[w];
    return total;  // of the block, in its first thread
}

// One block a row, so that the inner product <q, act> is summed in an order of its own, the same every time.
template <typename T, typename V>
__global__ void __launch_bounds__(kWarp* kWarps, 4)
    swiglu_backward(const V* q, const V* h, V* dh, V* act, float* dweights, Rows r) {
    const int64_t row = blockIdx.x;
    if (row >= row_limit(r.num_rows, r.bound)) return;
    const float weight = __ldg(r.weights + row);
    const V* gates = h + 2 * row * r.width;
    V* dgates = dh + 2 * row * r.width;
    float dot = 0.0f;
    for (int64_t v = threadIdx.x; v < r.width; v += blockDim.x) {
        Piece<T, V> gate, up, dact, dgate, dup, scaled;
        gate.load(gates + v);
        up.load(gates + r.width + v);
        dact.load(q + row * r.width + v);
#pragma unroll
        for (int e = 0; e < gate.kElements; ++e) {
            const float s = sigmoid<T>(gate[e]), silu = gate[e] * s, value = silu * up[e], d = weight * dact[e];
            dot += dact[e] * value;
            scaled.set(e, weight * value);
            dup.set(e, d * silu);
            dgate.set(e, d * up[e] * s * (1.0f + gate[e] * (1.0f - s)));
        }
        if (dh != nullptr) {
            dgate.store(dgates + v);
            dup.store(dgates + r.width + v);
        }
        if (act != nullptr) scaled.store(act + row * r.width + v);
    }
    dot = block_sum(dot);
    if (threadIdx.x == 0) dweights[row] = dot;
}

// rows[n] *= weight[n]
template <typename T, typename V>
__global__ void __launch_bounds__(kWarp* kWarps, 6) scale_rows(V* rows, Rows r, int64_t pieces) {
    int64_t row, first;
    if (!find_tile(r, pieces, row, first)) return;
    const float weight = __ldg(r.weights + row);
    V* own = rows + row * r.width;
    Piece<T, V> value[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
        if (first + i * kWarp < r.width) value[i].load(own + first + i * kWarp);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        if (first + i * kWarp >= r.width) continue;
#pragma unroll
        for (int e = 0; e < value[i].kElements; ++e) value[i].set(e, value[i][e] * weight);
        value[i].store(own + first + i * kWarp);
    }
}

// Bytes from row bound[0] on, in vectors.
template <typename V>
__global__ void __launch_bounds__(kWarp* kWarps) zero_tail(V* rows, const int* bound, int64_t num_rows, int64_t width) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    int64_t i = row_limit(num_rows, bound) * width + static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i < num_rows * width; i += step) rows[i] = V{};
}

unsigned tile_blocks(const Rows& r) {
    return static_cast<unsigned>(ceil_div(r.num_rows * ceil_div(r.width, kTile), kWarps));
}

enum class Op { kForward, kBackward, kScale };

struct Buffers {
    const void *q, *h;
    void *dh, *act;
    float* dweights;
};

template <typename T, typename V>
cudaError_t launch(Op op, const Buffers& b, Rows r, cudaStream_t stream) {
    r.width = r.width * static_cast<int64_t>(sizeof(T)) / static_cast<int64_t>(sizeof(V));
    const int64_t pieces = ceil_div(r.width, kTile);
    const auto* h = static_cast<const V*>(b.h);
    auto* act = static_cast<V*>(b.act);
    if (op == Op::kForward) {
        swiglu<T, V><<<tile_blocks(r), kWarp * kWarps, 0, stream>>>(h, act, r, pieces);
    } else if (op == Op::kScale) {
        scale_rows<T, V><<<tile_blocks(r), kWarp * kWarps, 0, stream>>>(act, r, pieces);
    } else {
        const int64_t warps = ceil_div(r.width, kWarp);
        const int threads = kWarp * static_cast<int>(warps < kWarps ? warps : kWarps);
        swiglu_backward<T, V><<<static_cast<unsigned>(r.num_rows), threads, 0, stream>>>(
            static_cast<const V*>(b.q), h, static_cast<V*>(b.dh), act, b.dweights, r);
    }
    return launched();
}

template <typename T>
cudaError_t launch_aligned(Op op, const Buffers& b, const Rows& r, cudaStream_t stream) {
    const auto row_bytes = static_cast<uintptr_t>(r.width) * sizeof(T);
    if (access_bytes(bits(b.q) | bits(b.h) | bits(b.dh) | bits(b.act) | row_bytes) == 16)
        return launch<T, uint4>(op, b, r, stream);
    if constexpr (sizeof(T) == 4) {
        return launch<T, unsigned>(op, b, r, stream);
    } else {
        return launch<T, unsigned short>(op, b, r, stream);
    }
}

cudaError_t launch_typed(int dtype, Op op, const Buffers& b, const Rows& r, cudaStream_t stream) {
    if (r.num_rows == 0 || r.width == 0) return cudaSuccess;
    switch (dtype) {
        case kFloat32: return launch_aligned<float>(op, b, r, stream);
        case kBFloat16: return launch_aligned<__nv_bfloat16>(op, b, r, stream);
        case kFloat16: return launch_aligned<__half>(op, b, r, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace
}  // namespace moe_ep

// h [num_rows, 2 * inner], the gate half first; act [num_rows, inner]; weights float32 [num_rows] or null; bound int32
// [] on the device or null. Returns a cudaError_t, as all of these do.
extern "C" int moe_ep_swiglu(int dtype, const void* h, void* act, const float* weights, const int* bound,
                             int64_t num_rows, int64_t inner, cudaStream_t stream) {
    using namespace moe_ep;
    const Buffers buffers{nullptr, h, nullptr, act, nullptr};
    return launch_typed(dtype, Op::kForward, buffers, Rows{num_rows, inner, weights, bound}, stream);
}

// q [num_rows, inner] is the gradient of the weighted activation; dh like h, or null; act, scaled by the weights, or null.
extern "C" int moe_ep_swiglu_backward(int dtype, const void* q, const void* h, void* dh, void* act, float* dweights,
                                      const float* weights, const int* bound, int64_t num_rows, int64_t inner,
                                      cudaStream_t stream) {
    using namespace moe_ep;
    const Buffers buffers{q, h, dh, act, dweights};
    return launch_typed(dtype, Op::kBackward, buffers, Rows{num_rows, inner, weights, bound}, stream);
}

extern "C" int moe_ep_scale_rows(int dtype, void* rows, const float* weights, const int* bound, int64_t num_rows,
                                 int64_t hidden, cudaStream_t stream) {
    using namespace moe_ep;
    const Buffers buffers{nullptr, nullptr, nullptr, rows, nullptr};
    return launch_typed(dtype, Op::kScale, buffers, Rows{num_rows, hidden, weights, bound}, stream);
}

// The rows from bound[0] on become zero.
extern "C" int moe_ep_zero_tail(void* rows, const int* bound, int64_t num_rows, int64_t row_bytes,
                                cudaStream_t stream) {
    using namespace moe_ep;
    if (num_rows == 0 || row_bytes == 0) return cudaSuccess;
    constexpr int kThreads = kWarp * kWarps, kBlocks = 1024;
    if (access_bytes(bits(rows) | static_cast<uintptr_t>(row_bytes)) == 16) {
        zero_tail<<<kBlocks, kThreads, 0, stream>>>(static_cast<uint4*>(rows), bound, num_rows, row_bytes / 16);
    } else {
        zero_tail<<<kBlocks, kThreads, 0, stream>>>(static_cast<unsigned char*>(rows), bound, num_rows, row_bytes);
    }
    return launched();
}

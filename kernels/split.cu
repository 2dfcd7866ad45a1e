// float32 as a sum of bfloat16 numbers, for products in the tensor cores that are nearly as exact as float32's.
//
// A number's 24 significant bits are three times 8, which is what bfloat16 has: parts are cut off, not rounded, so that
// the three of them add up to the number exactly, and none is too large.
#include "common.cuh"

namespace moe_ep {
namespace {

constexpr int kThreads = 256;
constexpr int kParts = 3;

// Which part each copy of the matrix holds, two bits a copy, and how far copies are apart.
struct Copies {
    int pattern, count;
    int64_t row_stride, copy_stride;  // in elements of the result
};

__device__ __forceinline__ void cut(float x, __nv_bfloat16 (&parts)[kParts]) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
        parts[p] = __float2bfloat16_rz(x);
        x = isfinite(x) ? x - __bfloat162float(parts[p]) : 0.0f;  // an infinity is its own first part
    }
}

// V consecutive columns a thread.
template <int V>
__global__ void __launch_bounds__(kThreads)
    split_bfloat16(const float* x, __nv_bfloat16* out, Copies copies, int64_t units, int units_of_row) {
    struct alignas(sizeof(__nv_bfloat16) * V) Narrow { __nv_bfloat16 at[V]; };
    struct alignas(sizeof(float) * V) Full { float at[V]; };
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < units; i += step) {
        int64_t row, unit;
        divide(i, units_of_row, row, unit);
        const Full given = *reinterpret_cast<const Full*>(x + i * V);
        Narrow cuts[kParts];
#pragma unroll
        for (int v = 0; v < V; ++v) {
            __nv_bfloat16 parts[kParts];
            cut(given.at[v], parts);
#pragma unroll
            for (int p = 0; p < kParts; ++p) cuts[p].at[v] = parts[p];
        }
        __nv_bfloat16* to = out + row * copies.row_stride + unit * V;
        for (int c = 0; c < copies.count; ++c) {
            const int part = copies.pattern >> 2 * c & 3;
            const Narrow& chosen = part == 0 ? cuts[0] : part == 1 ? cuts[1] : cuts[2];
            *reinterpret_cast<Narrow*>(to + c * copies.copy_stride) = chosen;
        }
    }
}

template <int V>
int run(const float* x, __nv_bfloat16* out, const Copies& copies, int64_t rows, int64_t columns, cudaStream_t stream) {
    const int64_t units = rows * (columns / V), blocks = ceil_div(units, kThreads);
    split_bfloat16<V><<<static_cast<unsigned>(blocks < 4096 ? blocks : 4096), kThreads, 0, stream>>>(
        x, out, copies, units, static_cast<int>(columns / V));
    return launched();
}

}  // namespace
}  // namespace moe_ep

// x float32 [rows, columns]; out bfloat16, `count` copies of it below or beside each other, of which copy c holds part
// (pattern >> 2c) & 3. Returns a cudaError_t.
extern "C" int moe_ep_split_bfloat16(const float* x, void* out, int64_t rows, int64_t columns, int pattern, int count,
                                     int beside, cudaStream_t stream) {
    using namespace moe_ep;
    if (count < 1 || count > 8 || columns > INT32_MAX) return cudaErrorInvalidValue;
    if (rows == 0 || columns == 0) return cudaSuccess;
    auto* to = static_cast<__nv_bfloat16*>(out);
    const Copies copies{pattern, count, beside ? columns * count : columns, beside ? columns : rows * columns};
    const bool aligned = reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(out) % 8 == 0;
    if (columns % 4 == 0 && aligned) return run<4>(x, to, copies, rows, columns, stream);
    return run<1>(x, to, copies, rows, columns, stream);
}

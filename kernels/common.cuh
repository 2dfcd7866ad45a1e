// What all kernels share: vector widths, conversions, limits, launch arithmetic.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace moe_ep {

constexpr int kWarp = 32;
constexpr int kWarps = 8;  // of a block, in kernels whose warps work alone
constexpr unsigned kAll = 0xffffffffu;
constexpr int kMaxGroups = 8192;  // experts of a sort, (rank, expert) pairs of a regroup: two int arrays in shared memory

// Codes of the C interface, as the Python side passes them.
enum Dtype : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ double widen(double x) { return x; }

template <typename T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ __half narrow<__half>(float x) { return __float2half_rn(x); }
template <typename T> __device__ __forceinline__ T narrow(double x) { return static_cast<T>(x); }

// The type that sums are taken in.
template <typename T> struct Wide { using type = float; };
template <> struct Wide<double> { using type = double; };

// Rows that may be touched: all of them, or as many as the device says. Rows behind are never read or written.
__device__ __forceinline__ int64_t row_limit(int64_t num_rows, const int* bound) {
    if (bound == nullptr) return num_rows;
    const int64_t limit = __ldg(bound);
    return limit < 0 ? 0 : (limit < num_rows ? limit : num_rows);
}

// Division is cheap in 32 bits and needed in 64: which one is the same for a whole launch.
__device__ __forceinline__ void divide(int64_t value, int64_t by, int64_t& quotient, int64_t& rest) {
    if ((static_cast<uint64_t>(value | by) >> 32) == 0) {
        const uint32_t q = static_cast<uint32_t>(value) / static_cast<uint32_t>(by);
        quotient = q;
        rest = static_cast<uint32_t>(value) - q * static_cast<uint32_t>(by);
    } else {
        quotient = value / by;
        rest = value - quotient * by;
    }
}

// Loads where `wanted`, else zero. Volatile, so that a row of them stays together in front of the first use: left to
// itself the compiler saves registers and waits for one load after the other. Past L1: nothing is read twice.
__device__ __forceinline__ uint4 load_if(const uint4* at, bool wanted) {
    uint4 v;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n"
        "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
        "@p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at), "r"(static_cast<int>(wanted)));
    return v;
}
// Narrower accesses are for rows that no 16-byte unit divides.
template <typename V>
__device__ __forceinline__ V load_if(const V* at, bool wanted) {
    return wanted ? __ldg(at) : V{};
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The widest access, in bytes and a power of two up to 16, that fits everything or-ed into `addresses_and_sizes`.
inline int access_bytes(uintptr_t addresses_and_sizes) {
    for (int bytes = 16; bytes > 1; bytes /= 2)
        if (addresses_and_sizes % bytes == 0) return bytes;
    return 1;
}

inline uintptr_t bits(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

inline cudaError_t launched() { return cudaPeekAtLastError() == cudaSuccess ? cudaSuccess : cudaGetLastError(); }

}  // namespace moe_ep

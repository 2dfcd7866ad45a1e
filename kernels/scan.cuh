// What the integer kernels of a dispatch share: prefix sums in one block's shared memory, and how many blocks to launch.
#pragma once

#include "common.cuh"

namespace moe_ep {

constexpr int kThreads = kWarp * kWarps;
constexpr int kMaxBlocks = 128;
constexpr int kItemsPerBlock = 1024;

// In place, exclusive; a[n] becomes the total. All threads of the block take part.
__device__ inline void exclusive_scan(int* a, int n) {
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

template <typename Kernel>
cudaError_t allow_shared(Kernel kernel, size_t bytes) {
    if (bytes <= 48 * 1024) return cudaSuccess;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

inline int scan_blocks(int64_t num_items) {
    const int64_t blocks = ceil_div(num_items, kItemsPerBlock);
    return static_cast<int>(blocks < 1 ? 1 : (blocks > kMaxBlocks ? kMaxBlocks : blocks));
}

}  // namespace moe_ep

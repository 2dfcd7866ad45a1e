// Words for a cluster: blocks that run at the same time on SMs beside each other, meet at a barrier and write into each
// other's shared memory (sm_90 and newer). Before, and where a launch asks for none, a block is a cluster of its own.
#pragma once

#include "common.cuh"

namespace moe_ep {
namespace {

__device__ int* block_memory() {
    extern __shared__ __align__(16) int shared[];
    return shared;
}

__device__ int cluster_blocks() {
    int blocks = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
#endif
    return blocks;
}

__device__ int block_in_cluster() {
    int block = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(block));
#endif
    return block;
}

// All threads of all blocks; what they wrote before, to whatever memory, can be read behind it.
__device__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#else
    __syncthreads();
#endif
}

// Writes a value where `at` is in the shared memory of another block, or of this one.
__device__ void cluster_put(int2* at, int2 value, int block) {
#if __CUDA_ARCH__ >= 900
    const auto here = static_cast<uint32_t>(__cvta_generic_to_shared(at));
    asm volatile(
        "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "st.shared::cluster.v2.s32 [there], {%2, %3};\n}" ::"r"(here), "r"(block), "r"(value.x), "r"(value.y)
        : "memory");
#else
    *at = value;
#endif
}

}  // namespace
}  // namespace moe_ep

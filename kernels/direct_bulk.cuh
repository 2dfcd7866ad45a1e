// What `direct` says in PTX beside its flags: bulk copies between device memory and a block's shared memory, and loads past
// L1. Addresses in shared memory are 32 bits wide.
#pragma once

#include "direct.cuh"

namespace moe_ep {
namespace {

extern __shared__ __align__(128) char block_memory[];
__device__ __forceinline__ char* block_shared() { return block_memory; }

// Past L1, where `wanted`, else zero. Volatile for the reason given at load_if.
__device__ __forceinline__ uint4 load_l2_if(const uint4* at, bool wanted) {
    uint4 v;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n"
        "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
        "@p ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at), "r"(static_cast<int>(wanted))
        : "memory");
    return v;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ uint32_t shared_address(const char* at) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// A barrier that ends a phase when the bytes of one load have come.
__device__ __forceinline__ void init_barrier(uint32_t barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
// Barriers are seen by the units that copy.
__device__ __forceinline__ void fence_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void load_bulk(uint32_t stage, const char* from, uint32_t bytes, uint32_t barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(stage),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
// Until the phase of that parity has ended.
__device__ __forceinline__ void await_load(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void store_bulk(char* to, uint32_t stage, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(stage), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until all stores of this thread but the last have read their stages.
__device__ __forceinline__ void await_reads_but_last() {
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
}
// Until all stores of this thread are where they belong, before everything that it and its warp say next.
__device__ __forceinline__ void await_stores() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
}

#endif

}  // namespace
}  // namespace moe_ep

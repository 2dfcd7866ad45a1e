// Launches of the planners of plan.cuh and fixed_rows.cuh.
#include "fixed_rows.cuh"
#include "plan.cuh"

extern "C" int64_t moe_ep_plan_shared_bytes(int ranks, int experts, int slots) {
    return sizeof(int) * moe_ep::plan_ints(ranks, experts, slots);
}

// load int32 [sources, E]; quota int32 [E, sources]; instances int32 [sources, S]; peak, bound int32 [domains].
extern "C" int moe_ep_plan_replicas(const int* load, int* quota, int* instances, int* peak, int* bound, int sources,
                                    int experts, int ranks, int slots, int min_quota, int tolerance,
                                    cudaStream_t stream) {
    using namespace moe_ep;
    if (ranks < 1 || sources % ranks != 0 || experts % sources != 0 || slots < 0) return cudaErrorInvalidValue;
    const int domains = sources / ranks;
    const int64_t bytes = moe_ep_plan_shared_bytes(ranks, experts / domains, slots);
    const auto error = cudaFuncSetAttribute(plan_replicas, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
    const Plan p{load, sources, experts, ranks, slots, min_quota, tolerance, quota, instances, peak, bound};
    plan_replicas<<<domains, kPlanThreads, bytes, stream>>>(p);
    return launched();
}

// The same of equal rows, with S >= E / sources.
extern "C" int moe_ep_plan_fixed_rows(const int* load, int* quota, int* instances, int* peak, int* bound, int sources,
                                      int experts, int ranks, int slots, cudaStream_t stream) {
    using namespace moe_ep;
    if (ranks < 1 || sources % ranks != 0 || experts % sources != 0 || slots < experts / sources)
        return cudaErrorInvalidValue;
    const int domains = sources / ranks;
    const int64_t bytes = sizeof(int) * fixed_ints(ranks, experts / domains);
    const auto error = cudaFuncSetAttribute(plan_fixed_rows, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
    const Plan p{load, sources, experts, ranks, slots, 1, 0, quota, instances, peak, bound};
    plan_fixed_rows<<<domains, kFixedThreads, bytes, stream>>>(p);
    return launched();
}

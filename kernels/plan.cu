// Launches of the planners of plan_search.cuh and fixed_rows.cuh.
#include "fixed_rows.cuh"
#include "plan_search.cuh"

namespace moe_ep {
namespace {

bool sizes_fit(const Plan& p) {
    const bool ranks = p.ranks >= 1 && p.ranks <= kMostRanks && p.slots >= 0;
    return ranks && p.sources % p.ranks == 0 && p.experts % p.sources == 0;
}

// Blocks of a domain: a cluster where this GPU has them, which the library's own code then knows, too.
cudaError_t find_blocks(int& blocks) {
    int device = 0, major = 0;
    if (const auto error = cudaGetDevice(&device); error != cudaSuccess) return error;
    const auto error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    blocks = major >= 9 ? kPlanBlocks : 1;
    return error;
}

cudaError_t launch(void (*kernel)(Plan), const Plan& p, int blocks, int64_t bytes, cudaStream_t stream) {
    const auto error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = blocks;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(p.sources / p.ranks * blocks);
    config.blockDim = dim3(kPlanThreads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = blocks > 1 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace
}  // namespace moe_ep

extern "C" int64_t moe_ep_plan_shared_bytes(int ranks, int experts, int slots) {
    return sizeof(int) * moe_ep::plan_ints(ranks, experts, slots);
}

extern "C" int moe_ep_plan_most_ranks() { return moe_ep::kMostRanks; }

// load int32 [sources, E]; quota int32 [E, sources]; instances int32 [sources, S]; peak, bound int64 [domains].
extern "C" int moe_ep_plan_replicas(const int* load, int* quota, int* instances, int64_t* peak, int64_t* bound,
                                    int sources, int experts, int ranks, int slots, int min_quota, int tolerance,
                                    cudaStream_t stream) {
    using namespace moe_ep;
    const Plan p{load, sources, experts, ranks, slots, min_quota, tolerance, quota, instances, peak, bound};
    if (!sizes_fit(p)) return cudaErrorInvalidValue;
    int blocks = 1;
    if (const auto error = find_blocks(blocks); error != cudaSuccess) return error;
    const int64_t bytes = moe_ep_plan_shared_bytes(ranks, experts / (sources / ranks), slots);
    const auto kernel = ranks <= 64 ? plan_replicas<2> : ranks <= 256 ? plan_replicas<8> : plan_replicas<16>;
    return launch(kernel, p, blocks, bytes, stream);
}

// The same of equal rows, with S >= E / sources.
extern "C" int moe_ep_plan_fixed_rows(const int* load, int* quota, int* instances, int64_t* peak, int64_t* bound,
                                      int sources, int experts, int ranks, int slots, cudaStream_t stream) {
    using namespace moe_ep;
    const Plan p{load, sources, experts, ranks, slots, 1, 0, quota, instances, peak, bound};
    if (!sizes_fit(p) || slots < experts / sources) return cudaErrorInvalidValue;
    const int64_t bytes = sizeof(int) * fixed_ints(ranks, experts / (sources / ranks));
    const auto kernel = ranks <= 64 ? plan_fixed_rows<2> : ranks <= 256 ? plan_fixed_rows<8> : plan_fixed_rows<16>;
    return launch(kernel, p, 1, bytes, stream);
}

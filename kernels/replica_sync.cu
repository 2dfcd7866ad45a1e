// Launches of replica_sync.cuh.
#include "replica_sync.cuh"

namespace moe_ep {
namespace {

int bytes_of_list(const Domain& d, const Slots& s) {
    return static_cast<int>(sizeof(int)) * (kSharedWords + 2 * d.num_ranks * s.num_slots);
}

bool fits(const Domain& d, const Slots& s, int blocks) {
    return blocks >= 1 && s.num_parts >= 0 && s.num_parts <= kMaxParts && s.num_slots >= 0 && d.num_local < 1 << 15 &&
           static_cast<int64_t>(d.num_ranks) * s.num_slots <= kMaxInstances;
}

template <typename Kernel>
cudaError_t start(Kernel kernel, const Domain& d, const Slots& s, int blocks, cudaStream_t stream) {
    if (!fits(d, s, blocks)) return cudaErrorInvalidValue;
    const int bytes = bytes_of_list(d, s);
    if (bytes > 48 * 1024)
        if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
            return error;
    kernel<<<blocks, kSyncThreads, bytes, stream>>>(d, s);
    return launched();
}

}  // namespace
}  // namespace moe_ep

// Masters into the slots of all ranks. Returns a cudaError_t.
extern "C" int moe_ep_replica_push(const moe_ep::Domain* domain, const moe_ep::Slots* slots, int blocks,
                                   cudaStream_t stream) {
    using namespace moe_ep;
    return start(push_weights, *domain, *slots, blocks, stream);
}

// Float32 slots of all ranks onto their masters, and zero. Returns a cudaError_t.
extern "C" int moe_ep_replica_pull(const moe_ep::Domain* domain, const moe_ep::Slots* slots, int blocks,
                                   cudaStream_t stream) {
    using namespace moe_ep;
    return start(pull_gradients, *domain, *slots, blocks, stream);
}

// Bytes of the struct that crosses the C interface and units of a piece, so that the caller can check its own.
extern "C" void moe_ep_replica_sizes(int* sizes) {
    sizes[0] = sizeof(moe_ep::Slots);
    sizes[1] = moe_ep::kPieceUnits;
}

// Launches of direct_return.cuh.
#include "direct_return.cuh"

namespace moe_ep {
namespace {

template <typename T>
int launch(const Domain& domain, const Return& r, int blocks, cudaStream_t stream) {
    const size_t bytes = sizeof(void*) * kBlockWarps * (domain.num_ranks + domain.top_k);
    if (bytes > 48 * 1024) return cudaErrorInvalidValue;
    return_rows<T><<<blocks, kBlockThreads, bytes, stream>>>(domain, r);
    return launched();
}

}  // namespace
}  // namespace moe_ep

// Blocks [0, send_blocks) send first; all `blocks` finish. Returns a cudaError_t.
extern "C" int moe_ep_direct_return(const moe_ep::Domain* domain, const moe_ep::Return* back, int dtype, int blocks,
                                    cudaStream_t stream) {
    using namespace moe_ep;
    if (back->send_blocks < 1 || blocks < back->send_blocks) return cudaErrorInvalidValue;
    switch (dtype) {
        case kFloat32: return launch<float>(*domain, *back, blocks, stream);
        case kBFloat16: return launch<__nv_bfloat16>(*domain, *back, blocks, stream);
        case kFloat16: return launch<__half>(*domain, *back, blocks, stream);
        default: return cudaErrorInvalidValue;
    }
}

// Launches of direct_move.cuh.
#include "direct_move.cuh"

namespace moe_ep {
namespace {

// Starts `kernel` with at most as many blocks as are resident at once: more would only wait for the others.
template <typename Kernel, typename... Arguments>
cudaError_t start(Kernel kernel, int bytes, int blocks, int least, cudaStream_t stream, const Arguments&... arguments) {
    int device = 0, sms = 0, of_sm = 0;
    if (const auto error = cudaGetDevice(&device)) return error;
    if (const auto error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return error;
    if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;
    if (const auto error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_sm, kernel, kBlockThreads, bytes))
        return error;
    const int most = sms * of_sm;
    if (most < least) return cudaErrorCooperativeLaunchTooLarge;
    kernel<<<blocks < most ? blocks : most, kBlockThreads, bytes, stream>>>(arguments...);
    return launched();
}

// Shared memory of ranking a block's tokens and of adding up all blocks' counts.
int settle_bytes(const Domain& d) {
    const int rank = kBlockWarps * d.num_experts + 2, sum = d.num_experts + d.num_ranks + 1;
    return static_cast<int>(sizeof(int)) * (rank > sum ? rank : sum);
}

}  // namespace
}  // namespace moe_ep

// Fills the plan, int32 [E + 7R + 2L + 3], and what is ranked. Returns a cudaError_t.
extern "C" int moe_ep_direct_exchange(const moe_ep::Domain* domain, const moe_ep::Exchange* exchange, int blocks,
                                      cudaStream_t stream) {
    using namespace moe_ep;
    if (blocks < 1) return cudaErrorInvalidValue;
    return start(settle_plan, settle_bytes(*domain), blocks, 1, stream, *domain, *exchange);
}

// Blocks [0, send_blocks) send first; all `blocks` move. `exchange` counts where push->settle. Returns a cudaError_t.
extern "C" int moe_ep_direct_push(const moe_ep::Domain* domain, const moe_ep::Exchange* exchange,
                                  const moe_ep::Push* push, int blocks, cudaStream_t stream) {
    using namespace moe_ep;
    if (push->send_blocks < 1 || blocks < push->send_blocks) return cudaErrorInvalidValue;
    int device = 0, major = 0;
    if (const auto error = cudaGetDevice(&device)) return error;
    if (const auto error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return error;
    const int settle = push->settle ? settle_bytes(*domain) : 0, bulk = major >= 9 ? kBulkBytes : 0;
    return start(push_rows, settle > bulk ? settle : bulk, blocks, push->send_blocks, stream, *domain, *exchange, *push);
}

// Bytes of the structs that cross the C interface, so that the caller can check its own.
extern "C" void moe_ep_direct_sizes(int* sizes) {
    sizes[0] = sizeof(moe_ep::Domain);
    sizes[1] = sizeof(moe_ep::Exchange);
    sizes[2] = sizeof(moe_ep::Push);
    sizes[3] = sizeof(moe_ep::Return);
}

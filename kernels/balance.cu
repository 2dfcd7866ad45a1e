// The balancing loss of one micro-batch, E / K * sum over e of load[e] * mass[e] / n^2, and its gradient.
//
// mass[e] sums the probabilities of expert e over the n tokens that count. A warp takes consecutive tokens, lane l
// holds columns l, l + 32, ... in registers; warps and then blocks are added in their order, by the block that ends
// last, so that every run gives the same bits. Both passes read or write [T, E] once.
#include <algorithm>
#include <type_traits>

#include "common.cuh"

namespace moe_ep {
namespace {

constexpr int kMaxColumns = 32;  // of a lane
constexpr int kThreads = kWarp * kWarps;
constexpr int kBlocks = 64;

struct Balance {
    const float* probs;   // [T, E]
    const int64_t* load;  // [E]
    const bool* alive;    // [T]
    float* partial;       // [blocks, E]
    int* tokens;          // [blocks]
    unsigned* done;       // blocks that are through, 0 at first
    float *loss, *slope;  // [], [E]
    int64_t num_tokens;
    int num_experts, top_k;
};

// The block's share of `partial` and `tokens`; sums: [warps, E] in shared memory.
template <int C>
__device__ void add_tokens(const Balance& b, float* sums) {
    __shared__ int counts[kWarps];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
    const int64_t own = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
    const int64_t each = (b.num_tokens + warps - 1) / warps;
    const int64_t first = min(own * each, b.num_tokens), last = min(first + each, b.num_tokens);
    float mass[C] = {};
    int count = 0;
#pragma unroll 4
    for (int64_t token = first; token < last; ++token) {
        const bool counts_in = b.alive[token];
        const float* row = b.probs + token * b.num_experts;
#pragma unroll
        for (int i = 0; i < C; ++i) {
            const int column = lane + i * kWarp;
            if (counts_in && column < b.num_experts) mass[i] += __ldg(row + column);
        }
        count += counts_in;
    }
#pragma unroll
    for (int i = 0; i < C; ++i)
        if (lane + i * kWarp < b.num_experts) sums[warp * b.num_experts + lane + i * kWarp] = mass[i];
    if (lane == 0) counts[warp] = count;
    __syncthreads();
    for (int e = threadIdx.x; e < b.num_experts; e += kThreads) {
        float total = 0.0f;
        for (int w = 0; w < kWarps; ++w) total += sums[w * b.num_experts + e];
        b.partial[static_cast<int64_t>(blockIdx.x) * b.num_experts + e] = total;
    }
    if (threadIdx.x != 0) return;
    int total = 0;
    for (int w = 0; w < kWarps; ++w) total += counts[w];
    b.tokens[blockIdx.x] = total;
}

// Adds what all blocks have found, in their order. Every thread of one block.
__device__ void add_blocks(const Balance& b, float* terms) {
    int64_t tokens = 0;
#pragma unroll 8
    for (unsigned i = 0; i < gridDim.x; ++i) tokens += __ldcg(b.tokens + i);
    const double counted = static_cast<double>(tokens > 0 ? tokens : 1);
    const double scale = static_cast<double>(b.num_experts) / b.top_k / counted / counted;
    float own = 0.0f;
    for (int e = threadIdx.x; e < b.num_experts; e += kThreads) {
        float mass = 0.0f;
        const float* column = b.partial + e;
#pragma unroll 8
        for (unsigned i = 0; i < gridDim.x; ++i) mass += __ldcg(column + static_cast<int64_t>(i) * b.num_experts);
        const float slope = static_cast<float>(static_cast<double>(b.load[e]) * scale);
        b.slope[e] = slope;
        own += slope * mass;
    }
    terms[threadIdx.x] = own;
    __syncthreads();
    for (int step = kThreads / 2; step > 0; step /= 2) {
        if (threadIdx.x < step) terms[threadIdx.x] += terms[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) *b.loss = terms[0];
}

// Shared memory: max([warps, E], threads) floats.
template <int C>
__global__ void __launch_bounds__(kThreads) balance_loss(Balance b) {
    extern __shared__ float shared[];
    __shared__ bool is_last;
    add_tokens<C>(b, shared);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(b.done, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    add_blocks(b, shared);
}

__global__ void __launch_bounds__(kThreads)
    balance_backward(const float* slope, const bool* alive, const float* grad, float* d_probs, int64_t num_tokens,
                     int num_experts) {
    const float given = *grad;
    const int lane = threadIdx.x % kWarp;
    const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    if (token >= num_tokens) return;
    const bool counts_in = alive[token];
    for (int e = lane; e < num_experts; e += kWarp)
        d_probs[token * num_experts + e] = counts_in ? __ldg(slope + e) * given : 0.0f;
}

int blocks_of(int64_t num_tokens) {
    return static_cast<int>(std::clamp<int64_t>(ceil_div(num_tokens, kWarps), 1, kBlocks));
}

template <int C> int run(const Balance& b, int blocks, cudaStream_t stream) {
    const size_t bytes = sizeof(float) * std::max(kWarps * b.num_experts, kThreads);
    balance_loss<C><<<blocks, kThreads, bytes, stream>>>(b);
    return launched();
}

}  // namespace
}  // namespace moe_ep

// Words of 4 bytes that moe_ep_balance_loss works in.
extern "C" int64_t moe_ep_balance_workspace(int num_experts) {
    return static_cast<int64_t>(moe_ep::kBlocks) * (num_experts + 1) + 1;
}

// probs float32 [T, E]; load int64 [E]; alive bool [T]; workspace of as many words as the function above says; loss
// float32 []; slope float32 [E]. Returns a cudaError_t.
extern "C" int moe_ep_balance_loss(const float* probs, const int64_t* load, const bool* alive, float* workspace,
                                   float* loss, float* slope, int64_t num_tokens, int num_experts, int top_k,
                                   cudaStream_t stream) {
    using namespace moe_ep;
    if (num_experts < 1 || num_experts > kMaxColumns * kWarp || top_k < 1) return cudaErrorInvalidValue;
    const int blocks = blocks_of(num_tokens);
    auto* words = reinterpret_cast<unsigned*>(workspace);
    if (const auto error = cudaMemsetAsync(words, 0, sizeof(unsigned), stream)) return error;
    const Balance b{probs, load, alive, workspace + 1 + kBlocks, reinterpret_cast<int*>(words + 1),
                    words, loss, slope, num_tokens, num_experts, top_k};
    if (num_experts <= 2 * kWarp) return run<2>(b, blocks, stream);
    if (num_experts <= 4 * kWarp) return run<4>(b, blocks, stream);
    if (num_experts <= 8 * kWarp) return run<8>(b, blocks, stream);
    return run<kMaxColumns>(b, blocks, stream);
}

// slope float32 [E]; alive bool [T]; grad float32 []; d_probs float32 [T, E]. Returns a cudaError_t.
extern "C" int moe_ep_balance_backward(const float* slope, const bool* alive, const float* grad, float* d_probs,
                                       int64_t num_tokens, int num_experts, cudaStream_t stream) {
    using namespace moe_ep;
    if (num_tokens == 0) return cudaSuccess;
    balance_backward<<<static_cast<unsigned>(ceil_div(num_tokens, kWarps)), kThreads, 0, stream>>>(
        slope, alive, grad, d_probs, num_tokens, num_experts);
    return launched();
}

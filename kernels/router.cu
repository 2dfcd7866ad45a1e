// What a router does with one token's E logits or scores: the elementwise part around softmax and the matrix product.
//
// One warp a token; lane l holds columns l, l + 32, ... in registers, so a row is read once. Sums over a token are taken
// in the order of its routes by every lane alike, hence the same on every run.
#include <algorithm>
#include <type_traits>

#include "common.cuh"

namespace moe_ep {
namespace {

constexpr int kMaxColumns = 32;  // of a lane, a bit each in its mask of what has been chosen

__device__ __forceinline__ int64_t own_token() {
    return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
}

unsigned token_blocks(int64_t num_tokens) { return static_cast<unsigned>(ceil_div(num_tokens, kWarps)); }

// A logit is the sum of its parts, the last and smallest first.
__device__ __forceinline__ float logit_of(const float* row, int expert, int num_experts, int parts) {
    float sum = row[(parts - 1) * num_experts + expert];
    for (int p = parts - 2; p >= 0; --p) sum += row[p * num_experts + expert];
    return sum;
}

// masked = logits where the token is valid and all its logits are finite, else 0. counts: (not finite but valid, valid).
__global__ void __launch_bounds__(kWarp* kWarps)
    mask_logits(const float* logits, const bool* valid, float* masked, bool* alive, unsigned long long* counts,
                int64_t num_tokens, int num_experts, int parts) {
    __shared__ int bad_tokens, valid_tokens;
    if (threadIdx.x == 0) bad_tokens = valid_tokens = 0;
    __syncthreads();
    const int64_t token = own_token();
    const int lane = threadIdx.x % kWarp;
    if (token < num_tokens) {
        const float* row = logits + token * num_experts * parts;
        bool finite = true;
        for (int e = lane; e < num_experts; e += kWarp) finite &= isfinite(logit_of(row, e, num_experts, parts));
        finite = __all_sync(kAll, finite);
        const bool counted = valid == nullptr || valid[token], lives = finite && counted;
        for (int e = lane; e < num_experts; e += kWarp)
            masked[token * num_experts + e] = lives ? logit_of(row, e, num_experts, parts) : 0.0f;
        if (lane == 0) {
            alive[token] = lives;
            if (counted) atomicAdd(&valid_tokens, 1);
            if (counted && !finite) atomicAdd(&bad_tokens, 1);
        }
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (bad_tokens > 0) atomicAdd(counts, static_cast<unsigned long long>(bad_tokens));
    if (valid_tokens > 0) atomicAdd(counts + 1, static_cast<unsigned long long>(valid_tokens));
}

// Unsigned integers in the order of the floats, both zeros alike.
__device__ __forceinline__ unsigned ordered(float x) {
    const unsigned word = __float_as_uint(x + 0.0f);
    return (word & 0x80000000u) != 0 ? ~word : word | 0x80000000u;
}

// The next of the columns [first, first + size) by falling score, the lower one where two are equal; marks it as taken.
template <int C>
__device__ __forceinline__ int take_best(const unsigned (&score)[C], unsigned& taken, int first, int size) {
    const int lane = threadIdx.x % kWarp;
    unsigned best = 0;
    int own = INT32_MAX;
#pragma unroll
    for (int i = 0; i < C; ++i) {
        const int column = lane + i * kWarp;
        const bool open = column >= first && column < first + size && (taken >> i & 1u) == 0;
        if (open && (own == INT32_MAX || score[i] > best)) best = score[i], own = column;
    }
    const unsigned most = __reduce_max_sync(kAll, own == INT32_MAX ? 0u : best);
    const bool equal = own != INT32_MAX && best == most;
    const int winner = static_cast<int>(__reduce_min_sync(kAll, equal ? static_cast<unsigned>(own) : 0x7fffffffu));
    if (winner == own) taken |= 1u << (own / kWarp);
    return winner;
}

template <int C>
__global__ void __launch_bounds__(kWarp* kWarps)
    top_experts(const float* scores, const bool* alive, int64_t* ids, int64_t num_tokens, int num_experts, int top_k,
                   int num_groups) {
    const int64_t token = own_token();
    if (token >= num_tokens) return;
    const int lane = threadIdx.x % kWarp, size = num_experts / num_groups, each = top_k / num_groups;
    int64_t* own = ids + token * top_k;
    if (!alive[token]) {
        for (int k = lane; k < top_k; k += kWarp) own[k] = -1;
        return;
    }
    unsigned score[C], taken = 0;
#pragma unroll
    for (int i = 0; i < C; ++i) {
        const int column = lane + i * kWarp;
        score[i] = column < num_experts ? ordered(scores[token * num_experts + column]) : 0u;
    }
    for (int k = 0; k < top_k; ++k) {
        const int winner = take_best<C>(score, taken, k / each * size, size);
        if (lane == 0) own[k] = winner;
    }
}

struct Weigh {
    const float* scores;  // [T, E]
    const int64_t* ids;   // [T, K]
    int64_t num_tokens;
    int num_experts, top_k, normalize;
    float smallest, scale;
};

__device__ __forceinline__ bool is_route(const Weigh& w, int64_t id) { return id >= 0 && id < w.num_experts; }

// Sum of a token's chosen scores in the order of its routes, by a whole warp: each lane loads one.
__device__ __forceinline__ float score_sum(const Weigh& w, int64_t token) {
    float sum = 0.0f;
    for (int first = 0; first < w.top_k; first += kWarp) {
        const int k = first + static_cast<int>(threadIdx.x) % kWarp;
        const int64_t id = k < w.top_k ? w.ids[token * w.top_k + k] : -1;
        const float score = is_route(w, id) ? w.scores[token * w.num_experts + id] : 0.0f;
        for (int lane = 0; lane < kWarp && first + lane < w.top_k; ++lane) sum += __shfl_sync(kAll, score, lane);
    }
    return sum;
}

// weights[t, k] = scale * score / sum of the token's scores; load[e] counts routes. Few blocks of many tokens, because
// each adds its counts to the same E words.
constexpr unsigned kWeighBlocks = 256;

__global__ void __launch_bounds__(kWarp* kWarps) weigh_routes(Weigh w, float* weights, unsigned long long* load) {
    extern __shared__ int routes[];  // of each expert, in this block
    for (int e = threadIdx.x; e < w.num_experts; e += blockDim.x) routes[e] = 0;
    __syncthreads();
    const int lane = threadIdx.x % kWarp;
    for (int64_t token = own_token(); token < w.num_tokens; token += static_cast<int64_t>(gridDim.x) * kWarps) {
        const float divisor = w.normalize ? fmaxf(score_sum(w, token), w.smallest) : 1.0f;
        for (int k = lane; k < w.top_k; k += kWarp) {
            const int64_t id = w.ids[token * w.top_k + k];
            const bool route = is_route(w, id);
            weights[token * w.top_k + k] = route ? w.scores[token * w.num_experts + id] / divisor * w.scale : 0.0f;
            if (route) atomicAdd(routes + id, 1);
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < w.num_experts; e += blockDim.x)
        if (routes[e] > 0) atomicAdd(load + e, static_cast<unsigned long long>(routes[e]));
}

// d_scores[t, e] = sum over k with ids[t, k] == e of scale / S * (d_k - sum_j d_j s_j / S), S the sum of scores; the
// second term only where weights are normalised and S is above the smallest. 0 for experts that were not chosen.
__global__ void __launch_bounds__(kWarp* kWarps) weigh_backward(Weigh w, const float* d_weights, float* d_scores) {
    const int64_t token = own_token();
    if (token >= w.num_tokens) return;
    const int64_t* ids = w.ids + token * w.top_k;
    const float* d = d_weights + token * w.top_k;
    float divisor = 1.0f, shared = 0.0f;
    if (w.normalize) {
        const float sum = score_sum(w, token);
        divisor = fmaxf(sum, w.smallest);
        for (int k = 0; k < w.top_k && sum > w.smallest; ++k)
            if (is_route(w, ids[k])) shared += d[k] * (w.scores[token * w.num_experts + ids[k]] / divisor);
    }
    for (int e = threadIdx.x % kWarp; e < w.num_experts; e += kWarp) {
        float own = 0.0f;
        for (int k = 0; k < w.top_k; ++k)
            if (ids[k] == e) own += (d[k] - shared) / divisor * w.scale;
        d_scores[token * w.num_experts + e] = own;
    }
}

}  // namespace
}  // namespace moe_ep

// logits float32 [T, parts * E]; valid bool [T] or null; masked float32 [T, E]; alive bool [T]; counts int64 [2].
extern "C" int moe_ep_mask_logits(const float* logits, const bool* valid, float* masked, bool* alive, int64_t* counts,
                                  int64_t num_tokens, int num_experts, int parts, cudaStream_t stream) {
    using namespace moe_ep;
    if (parts < 1) return cudaErrorInvalidValue;
    if (const auto error = cudaMemsetAsync(counts, 0, 2 * sizeof(int64_t), stream)) return error;
    if (num_tokens == 0) return cudaSuccess;
    mask_logits<<<token_blocks(num_tokens), kWarp * kWarps, 0, stream>>>(
        logits, valid, masked, alive, reinterpret_cast<unsigned long long*>(counts), num_tokens, num_experts,
        parts);
    return launched();
}

// scores float32 [T, E]; alive bool [T]; ids int64 [T, K]. Returns a cudaError_t.
extern "C" int moe_ep_top_experts(const float* scores, const bool* alive, int64_t* ids, int64_t num_tokens,
                                     int num_experts, int top_k, int num_groups, cudaStream_t stream) {
    using namespace moe_ep;
    if (num_experts > kMaxColumns * kWarp || num_groups < 1 || num_experts % num_groups || top_k % num_groups ||
        top_k > num_experts)
        return cudaErrorInvalidValue;
    if (num_tokens == 0 || top_k == 0) return cudaSuccess;
    const auto run = [&](auto columns) {
        top_experts<decltype(columns)::value><<<token_blocks(num_tokens), kWarp * kWarps, 0, stream>>>(
            scores, alive, ids, num_tokens, num_experts, top_k, num_groups);
        return launched();
    };
    if (num_experts <= 2 * kWarp) return run(std::integral_constant<int, 2>{});
    if (num_experts <= 4 * kWarp) return run(std::integral_constant<int, 4>{});
    if (num_experts <= 8 * kWarp) return run(std::integral_constant<int, 8>{});
    if (num_experts <= 16 * kWarp) return run(std::integral_constant<int, 16>{});
    return run(std::integral_constant<int, kMaxColumns>{});
}

// scores float32 [T, E]; ids int64 [T, K]; weights float32 [T, K]; load int64 [E]. Returns a cudaError_t.
extern "C" int moe_ep_weigh_routes(const float* scores, const int64_t* ids, float* weights, int64_t* load,
                                   int64_t num_tokens, int num_experts, int top_k, int normalize, double smallest,
                                   double scale, cudaStream_t stream) {
    using namespace moe_ep;
    if (num_experts < 1 || num_experts > kMaxGroups) return cudaErrorInvalidValue;
    if (const auto error = cudaMemsetAsync(load, 0, num_experts * sizeof(int64_t), stream)) return error;
    if (num_tokens == 0 || top_k == 0) return cudaSuccess;
    const Weigh w{scores, ids, num_tokens, num_experts, top_k, normalize,
                  static_cast<float>(smallest), static_cast<float>(scale)};
    const unsigned blocks = std::min(token_blocks(num_tokens), kWeighBlocks);
    weigh_routes<<<blocks, kWarp * kWarps, sizeof(int) * num_experts, stream>>>(
        w, weights, reinterpret_cast<unsigned long long*>(load));
    return launched();
}

// d_weights float32 [T, K]; d_scores float32 [T, E]. Returns a cudaError_t.
extern "C" int moe_ep_weigh_backward(const float* scores, const int64_t* ids, const float* d_weights, float* d_scores,
                                     int64_t num_tokens, int num_experts, int top_k, int normalize, double smallest,
                                     double scale, cudaStream_t stream) {
    using namespace moe_ep;
    if (num_tokens == 0) return cudaSuccess;
    const Weigh w{scores, ids, num_tokens, num_experts, top_k, normalize,
                  static_cast<float>(smallest), static_cast<float>(scale)};
    weigh_backward<<<token_blocks(num_tokens), kWarp * kWarps, 0, stream>>>(w, d_weights, d_scores);
    return launched();
}

// What a rank tells every other one ahead of the rows: counts, and what is wrong with its routing.
#include "common.cuh"

namespace moe_ep {
namespace {

constexpr int kThreads = kWarp * kWarps;
constexpr int kMaxFaults = 4;

struct Faults {
    const int64_t* counts[kMaxFaults];
    int64_t codes[kMaxFaults];
    int num;
};

// message[r] = the counts of rank r's experts, then code and value of the last fault that was met, then the place.
__global__ void write_message(const int64_t* counts, Faults faults, int64_t value, int64_t place, int num_ranks,
                              int num_local, int64_t* message) {
    int64_t code = 0;
    for (int f = 0; f < faults.num; ++f) {
        const int64_t count = *faults.counts[f];
        if (count > 0) {
            code = faults.codes[f];
            value = count;
        }
    }
    const int width = num_local + 3;
    for (int i = threadIdx.x; i < num_ranks * width; i += blockDim.x) {
        const int rank = i / width, column = i % width - num_local;
        message[i] = column < 0 ? counts[rank * num_local + column + num_local]
                                : (column == 0 ? code : (column == 1 ? value : place));
    }
}

}  // namespace
}  // namespace moe_ep

// counts int64 [R*L], fault_counts and codes of num_faults <= 4 faults in rising order of precedence, message int64
// [R, L + 3]. `value` is sent where no fault was met. Returns a cudaError_t.
extern "C" int moe_ep_write_message(const int64_t* counts, int num_faults, const int64_t* fault_0,
                                    const int64_t* fault_1, const int64_t* fault_2, const int64_t* fault_3,
                                    int64_t code_0, int64_t code_1, int64_t code_2, int64_t code_3, int64_t value,
                                    int64_t place, int num_ranks, int num_local, int64_t* message,
                                    cudaStream_t stream) {
    using namespace moe_ep;
    if (num_faults < 0 || num_faults > kMaxFaults) return cudaErrorInvalidValue;
    const Faults faults{{fault_0, fault_1, fault_2, fault_3}, {code_0, code_1, code_2, code_3}, num_faults};
    write_message<<<1, kThreads, 0, stream>>>(counts, faults, value, place, num_ranks, num_local, message);
    return launched();
}

// Launches of reroute.cuh.
#include "reroute.cuh"

// load int32 [R, E], quota int32 [E, R], instances int32 [R, S]; scratch: kept, start int32 [E], ends, physical int32
// [E, R]; ids, out int64 [N]; of a stable sort: positions int32 [N], offsets int32 [E + 1], counts int64 [E]; wrong int64.
extern "C" int moe_ep_reroute(const int* load, const int* quota, const int* instances, int* kept, int* start, int* ends,
                              int* physical, const int64_t* ids, const int* positions, const int* offsets,
                              const int64_t* counts, int64_t* out, int64_t* wrong, int64_t num_routes, int ranks,
                              int experts, int slots, int rank, cudaStream_t stream) {
    using namespace moe_ep;
    constexpr int kThreads = kWarp * kWarps;
    if (ranks < 1 || experts % ranks != 0 || rank < 0 || rank >= ranks) return cudaErrorInvalidValue;
    const Lines lines{load, quota, instances, ranks, experts, slots, rank, kept, start, ends, physical};
    make_lines<<<static_cast<int>(ceil_div(experts, kWarps)), kThreads, 0, stream>>>(lines);
    const Routing routing{ids, positions, offsets, counts, num_routes, out, wrong};
    const int64_t wanted = ceil_div(num_routes, kThreads);
    const int blocks = static_cast<int>(wanted < 1 ? 1 : wanted > 2048 ? 2048 : wanted);
    place_rows<<<blocks, kThreads, 0, stream>>>(lines, routing);
    return launched();
}

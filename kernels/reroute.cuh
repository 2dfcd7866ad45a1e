// Routes to instances of experts: moe_ep/replica/reroute.py on the device, with the same integers.
//
// A table of each expert's line is made first: where the places of each rank's instance end, where this rank's rows
// begin, and the physical id of each instance. A route then needs its number among the rank's routes of its expert,
// which is its place in a stable sort by expert, and a binary search in the expert's line.
#pragma once

#include "common.cuh"

namespace moe_ep {
namespace {

struct Lines {
    const int *load, *quota, *instances;  // [R, E], [E, R], [R, S]
    int R, E, S, rank;
    int *kept, *start;  // [E]
    int *ends, *physical;  // [E, R]
};

// One warp an expert, lanes along the ranks.
__global__ void make_lines(Lines t) {
    const int lane = threadIdx.x % kWarp, L = t.E / t.R;
    const int e = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    if (e >= t.E) return;
    int before = 0, room_so_far = 0;
    for (int first = 0; first < t.R; first += kWarp) {
        const int r = first + lane;
        const bool real = r < t.R;
        const int load = real ? __ldg(t.load + static_cast<int64_t>(r) * t.E + e) : 0;
        const int quota = real ? __ldg(t.quota + static_cast<int64_t>(e) * t.R + r) : 0;
        const int kept = min(load, quota);
        // sources take turns in coming first, by the expert's number
        const int turn = (r + t.R - e % t.R) % t.R, own_turn = (t.rank + t.R - e % t.R) % t.R;
        if (real && turn < own_turn) before += load - kept;
        int upto = quota - kept;
        for (int step = 1; step < kWarp; step *= 2) {
            const int other = __shfl_up_sync(kAll, upto, step);
            if (lane >= step) upto += other;
        }
        if (real) {
            int id = r == e / L ? r * (L + t.S) + e % L : -1;
            for (int k = 0; k < t.S; ++k)
                if (__ldg(t.instances + static_cast<int64_t>(r) * t.S + k) == e) id = r * (L + t.S) + L + k;
            t.ends[static_cast<int64_t>(e) * t.R + r] = room_so_far + upto;
            t.physical[static_cast<int64_t>(e) * t.R + r] = id;
            if (r == t.rank) t.kept[e] = kept;
        }
        room_so_far += __shfl_sync(kAll, upto, kWarp - 1);
    }
    const int sum = static_cast<int>(__reduce_add_sync(kAll, static_cast<unsigned>(before)));
    if (lane == 0) t.start[e] = sum;
}

struct Routing {
    const int64_t* ids;  // [N]
    const int *positions, *offsets;  // [N], [E + 1]: of a stable sort by expert
    const int64_t* counts;  // [E]
    int64_t num_routes;
    int64_t* out;  // [N]
    int64_t* wrong;  // []: experts whose rows the plan counts otherwise
};

__global__ void place_rows(Lines t, Routing r) {
    const int P = t.E + t.R * t.S;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < r.num_routes; i += stride) {
        const int64_t id = __ldg(r.ids + i);
        if (id < 0 || id >= t.E) {
            r.out[i] = id < 0 ? id : id - t.E + P;  // a bad id stays one
            continue;
        }
        const int e = static_cast<int>(id), place = __ldg(r.positions + i) - __ldg(r.offsets + e) - __ldg(t.kept + e);
        int dest = t.rank;
        if (place >= 0) {
            const int at = __ldg(t.start + e) + place;
            const int* ends = t.ends + static_cast<int64_t>(e) * t.R;
            int low = 0, high = t.R - 1;  // the first instance that ends behind the place
            while (low < high) {
                const int middle = (low + high) / 2;
                if (__ldg(ends + middle) > at) high = middle;
                else low = middle + 1;
            }
            dest = low;
        }
        r.out[i] = __ldg(t.physical + static_cast<int64_t>(e) * t.R + dest);
    }
    if (blockIdx.x != 0) return;
    const int* planned = t.load + static_cast<int64_t>(t.rank) * t.E;
    int wrong = 0;
    for (int first = 0; first < t.E; first += blockDim.x) {
        const int e = first + threadIdx.x;
        wrong += __syncthreads_count(e < t.E && __ldg(r.counts + e) != __ldg(planned + e));
    }
    if (threadIdx.x == 0) *r.wrong = wrong;
}

}  // namespace
}  // namespace moe_ep

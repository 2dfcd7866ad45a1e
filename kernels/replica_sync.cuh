// Weights of masters into replicas' slots, and gradients of slots to their masters, over the peer memory of direct.cuh.
//
// Both kernels find their work in the plan's `instances` on the device: each block lists the replicas of its rank's
// masters by (master, rank), then warps take pieces of them in turn. A piece is part of one parameter of one expert.
//
//   push   waits until a destination opened its memory, writes there; the last block tells every rank that this rank's
//          writes are done, and waits for the same of all: then this rank's slots are filled.
//   pull   waits until a source opened its memory, reads there, adds to the master by rank, and tells the source of each
//          piece that it has read. The source zeroes a piece when that is told, beside what is still on the link.
//
// `ready` is the entry fence, `arrived` the exit fence of a push; that of a pull is told piece by piece. A warp waits for
// others' reads only when all reads of its own rank are taken, so ranks that wait for each other all get on. The order of
// a sum is the master's own part first, then its replicas by rank, each element by one thread: the bits of
// moe_ep/replica/transport.py.
#pragma once

#include "direct.cuh"

namespace moe_ep {
namespace {

constexpr int kMaxParts = 8;       // parameters of an expert
constexpr int kMaxInstances = 8192;  // R * S: a list of as many words in shared memory
constexpr int kSyncThreads = 384;
constexpr int kInFlight = 4;  // 16-byte loads of a lane before its first store
constexpr int kPieceUnits = kWarp * kInFlight * 8;  // 16 KiB

}  // namespace

// One operation. Part p of an expert has part_units[p] units of 16 bytes.
struct Slots {
    char* masters[kMaxParts];       // [L, units] on this rank
    int64_t slots_at[kMaxParts];    // byte offset of [S, units] in every rank's peer memory
    int64_t part_units[kMaxParts];
    int64_t read_at;                // uint32 [S, pieces] in peer memory: the epoch in which each was read last
    const int* instances;           // [R, S], the expert in each slot or -1
    int num_parts, num_slots;
};

namespace {

struct Copies {
    int* list;  // replicas of this rank's masters: local << 16 | index into instances, ascending
    int num, masters;  // replicas, and how many masters they have
};

// A copy in front of which another master ends.
__device__ __forceinline__ bool begins(const int* list, int c) { return c == 0 || list[c] >> 16 != list[c - 1] >> 16; }

constexpr int kSharedWords = 3;  // beside the list: its length, its masters, and whether the block is its rank's last

// Shared memory: those words, list [R*S], scratch [R*S]. All threads of the block take part.
__device__ Copies list_copies(const Domain& d, const Slots& s, int* shared) {
    const int all = d.num_ranks * s.num_slots;
    int *num = shared, *list = shared + kSharedWords, *found = list + all;
    if (threadIdx.x == 0) num[0] = num[1] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < all; i += blockDim.x) {
        const int expert = __ldg(s.instances + i);
        if (expert >= 0 && expert / d.num_local == d.rank)
            found[atomicAdd(num, 1)] = (expert % d.num_local) << 16 | i;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < *num; i += blockDim.x) {
        int before = 0;
        for (int j = 0; j < *num; ++j) before += found[j] < found[i];
        list[before] = found[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < *num; i += blockDim.x)
        if (begins(list, i)) atomicAdd(num + 1, 1);
    __syncthreads();
    return {list, num[0], num[1]};
}

// Piece `index` of an expert: which parameter, where it begins there, and its units of 16 bytes.
struct Piece {
    int part;
    int64_t first;
    int units;
};

__device__ __forceinline__ int64_t pieces_of(int64_t units) { return (units + kPieceUnits - 1) / kPieceUnits; }

__device__ int64_t pieces_of_expert(const Slots& s) {
    int64_t pieces = 0;
    for (int p = 0; p < s.num_parts; ++p) pieces += pieces_of(s.part_units[p]);
    return pieces;
}

__device__ Piece find_piece(const Slots& s, int64_t index) {
    int part = 0;
    while (index >= pieces_of(s.part_units[part])) index -= pieces_of(s.part_units[part++]);
    const int64_t first = index * kPieceUnits;
    return {part, first, static_cast<int>(min(s.part_units[part] - first, static_cast<int64_t>(kPieceUnits)))};
}

__device__ __forceinline__ uint4* slot_at(const Domain& d, const Slots& s, int instance, int part) {
    const int64_t slot = instance % s.num_slots;
    return peer_at<uint4>(d, instance / s.num_slots, s.slots_at[part]) + slot * s.part_units[part];
}

// Behind a block's last access: the last block of this rank tells all ranks, and waits until all have told.
__device__ void pass_exit_fence(const Domain& d, uint32_t epoch, int* shared) {
    int* last = shared + 2;
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) *last = atomicAdd(d.epoch + 1, 1u) == gridDim.x - 1;
    __syncthreads();
    if (*last == 0) return;
    __threadfence_system();
    for (int r = threadIdx.x; r < d.num_ranks; r += blockDim.x)
        store_release(peer_at<uint32_t>(d, r, d.at.arrived) + d.rank, epoch);
    for (int r = threadIdx.x; r < d.num_ranks; r += blockDim.x)
        wait_epoch(d, peer_at<uint32_t>(d, d.rank, d.at.arrived) + r, epoch, r);
    __syncthreads();
    if (threadIdx.x != 0) return;
    d.epoch[1] = d.epoch[2] = 0;
    __threadfence();
    *reinterpret_cast<volatile uint32_t*>(d.epoch) = epoch;
}

// Whether `rank` has opened its memory; asked once a piece, which is far longer.
__device__ bool is_open(const Domain& d, int rank, uint32_t epoch) {
    const int lane = threadIdx.x % kWarp;
    const bool open = lane != 0 || wait_epoch(d, peer_at<uint32_t>(d, d.rank, d.at.ready) + rank, epoch, rank);
    const bool all = __ballot_sync(kAll, open) == kAll;
    __syncwarp();  // what lane 0 has acquired holds for all of them
    return all;
}

// One piece of a master to one slot; the lanes take every 32nd unit.
__device__ __forceinline__ void copy_piece(const uint4* from, uint4* to, int units) {
    for (int at = threadIdx.x % kWarp; at < units; at += kWarp * kInFlight) {
        uint4 v[kInFlight];
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) v[j] = load_if(from + at + j * kWarp, at + j * kWarp < units);
#pragma unroll
        for (int j = 0; j < kInFlight; ++j)
            if (at + j * kWarp < units) to[at + j * kWarp] = v[j];
    }
}

__global__ void __launch_bounds__(kSyncThreads, 2) push_weights(Domain d, Slots s) {
    extern __shared__ int shared[];
    const uint32_t epoch = current_epoch(d);
    open_memory(d, epoch);
    const Copies copies = list_copies(d, s, shared);
    const int64_t items = pieces_of_expert(s) * copies.num;
    const int64_t warps = static_cast<int64_t>(gridDim.x) * (kSyncThreads / kWarp);
    for (int64_t i = threadIdx.x / kWarp * gridDim.x + blockIdx.x; i < items; i += warps) {
        const int copy = copies.list[i % copies.num], instance = copy & 0xffff;  // all destinations at once
        if (!is_open(d, instance / s.num_slots, epoch)) break;
        const Piece piece = find_piece(s, i / copies.num);
        const char* master = s.masters[piece.part] + (copy >> 16) * s.part_units[piece.part] * 16;
        copy_piece(reinterpret_cast<const uint4*>(master) + piece.first,
                   slot_at(d, s, instance, piece.part) + piece.first, piece.units);
    }
    pass_exit_fence(d, epoch, shared);
}

__device__ __forceinline__ void add(float4& total, const uint4& part) {
    total.x += __uint_as_float(part.x);
    total.y += __uint_as_float(part.y);
    total.z += __uint_as_float(part.z);
    total.w += __uint_as_float(part.w);
}

// Adds the replicas list[first, last) of one master to a piece of it, in this order.
__device__ void add_piece(const Domain& d, const Slots& s, const Copies& copies, int first, int last,
                          const Piece& piece) {
    const int local = copies.list[first] >> 16;
    float4* master = reinterpret_cast<float4*>(s.masters[piece.part]) + local * s.part_units[piece.part] + piece.first;
    for (int at = threadIdx.x % kWarp; at < piece.units; at += kWarp * kInFlight) {
        float4 total[kInFlight];
#pragma unroll
        for (int j = 0; j < kInFlight; ++j)
            if (at + j * kWarp < piece.units) total[j] = master[at + j * kWarp];
        for (int c = first; c < last; ++c) {
            const uint4* slot = slot_at(d, s, copies.list[c] & 0xffff, piece.part) + piece.first;
            uint4 v[kInFlight];
#pragma unroll
            for (int j = 0; j < kInFlight; ++j)
                if (at + j * kWarp < piece.units) v[j] = load_l2(slot + at + j * kWarp);
#pragma unroll
            for (int j = 0; j < kInFlight; ++j)
                if (at + j * kWarp < piece.units) add(total[j], v[j]);
        }
#pragma unroll
        for (int j = 0; j < kInFlight; ++j)
            if (at + j * kWarp < piece.units) master[at + j * kWarp] = total[j];
    }
}

// Where the owner of a slot looks whether a piece of it has been read.
__device__ __forceinline__ uint32_t* read_flag(const Domain& d, const Slots& s, int instance, int64_t piece,
                                               int64_t pieces) {
    return peer_at<uint32_t>(d, instance / s.num_slots, s.read_at) + instance % s.num_slots * pieces + piece;
}

// Adds a piece of all replicas of the rank's n-th master that has some; false where a rank never came.
__device__ bool pull_piece(const Domain& d, const Slots& s, const Copies& copies, int n, int64_t piece, int64_t pieces,
                           uint32_t epoch) {
    int first = -1, last;
    while (n >= 0) n -= begins(copies.list, ++first);
    for (last = first + 1; last < copies.num && !begins(copies.list, last);) ++last;
    for (int c = first; c < last; ++c)
        if (!is_open(d, (copies.list[c] & 0xffff) / s.num_slots, epoch)) return false;
    add_piece(d, s, copies, first, last, find_piece(s, piece));
    __syncwarp();
    __threadfence_system();
    for (int c = first + threadIdx.x % kWarp; c < last; c += kWarp)
        store_release(read_flag(d, s, copies.list[c] & 0xffff, piece, pieces), epoch);
    return true;
}

// Zeroes a piece of one of this rank's slots as soon as it has been read; false where a rank never came.
__device__ bool zero_piece(const Domain& d, const Slots& s, int slot, int64_t piece, int64_t pieces, uint32_t epoch) {
    const int instance = d.rank * s.num_slots + slot, expert = __ldg(s.instances + instance), lane = threadIdx.x % kWarp;
    if (expert < 0) return true;
    const uint32_t* flag = read_flag(d, s, instance, piece, pieces);
    const bool read = lane != 0 || wait_epoch(d, flag, epoch, expert / d.num_local);
    if (__ballot_sync(kAll, read) != kAll) return false;
    __syncwarp();
    const Piece at = find_piece(s, piece);
    uint4* to = slot_at(d, s, instance, at.part) + at.first;
    for (int i = lane; i < at.units; i += kWarp) to[i] = make_uint4(0, 0, 0, 0);
    return true;
}

__global__ void __launch_bounds__(kSyncThreads, 2) pull_gradients(Domain d, Slots s) {
    extern __shared__ int shared[];
    const uint32_t epoch = current_epoch(d);
    open_memory(d, epoch);
    const Copies copies = list_copies(d, s, shared);
    const int64_t pieces = pieces_of_expert(s), reads = pieces * copies.masters, items = reads + pieces * s.num_slots;
    bool going = true;
    for (int64_t i; going && (i = take_item(d)) < items;) {
        const int64_t n = (i < reads ? i : i - reads) / pieces, piece = (i < reads ? i : i - reads) % pieces;
        going = i < reads ? pull_piece(d, s, copies, static_cast<int>(n), piece, pieces, epoch)
                          : zero_piece(d, s, static_cast<int>(n), piece, pieces, epoch);
    }
    end_operation(d, epoch);
}

}  // namespace
}  // namespace moe_ep

// Peer memory of one NVLink domain: what lies where, flags with their memory order, epochs.
//
// Every operation is one kernel a rank, and all ranks run the same operations in the same order on one stream each. An
// operation's epoch is the number of operations before it, plus one; it is kept on the device, so that a captured
// graph can be replayed. A flag that carries the epoch is set; nobody ever has to clear one.
#pragma once

#include "common.cuh"

namespace moe_ep {

constexpr int kMaxRanks = 72;     // GPUs of the largest NVLink domain
constexpr int kMaxChunkRows = 32;  // a lane for each row of a chunk
constexpr int64_t kGroupBytes = 32 * 1024;
constexpr unsigned kPause = 100;   // ns between two looks at a flag: thousands of warps look, and rows need the way too
constexpr int kWords = 4;          // behind a rank's counts: code and value of a fault, no_grad, place

// Byte offsets in the peer memory of a rank, the same on all ranks. `back` is what returns from the experts' ranks.
struct PeerLayout {
    int64_t ready;       // uint32 [R]
    int64_t arrived;     // uint32 [R]
    int64_t counts;      // int32 [2, R, E + R + kWords], by the epoch's parity: a rank can be one exchange ahead
    int64_t push_flags;  // uint64 [R, chunks]: epoch << 32 | first row << 8 | rows
    int64_t back_flags;  // uint64 [R, chunks]: epoch
    int64_t push_routes;  // Route [R, max_tokens, K]
    int64_t back_weights;  // float [R, max_tokens, K]
    int64_t push_rows;   // [R, max_tokens, row_bytes]
    int64_t back_rows;   // [R, max_tokens, row_bytes]
    int64_t stop;        // uint32: not 0 once a rank has given up, which the hosts write; whoever waits leaves
};

struct Route {
    int row;  // expert row at the destination, -1: none there
    float weight;
};

struct Domain {
    char* memory[kMaxRanks];  // peer memory of every rank, as mapped here
    PeerLayout at;
    int rank, num_ranks, num_experts, num_local, top_k, max_tokens, chunk_rows, chunks;
    int64_t row_bytes;
    int64_t timeout_ns;
    uint32_t* epoch;        // [0]: operations that ended; of the running one, [1]: blocks that ended, [2]: items taken
    unsigned long long* fault;  // sticky record, code << 56 | layer << 40 | micro-batch << 32 | value
    int64_t where;          // layer << 40 | micro-batch << 32
    int code_lost;          // code of a rank that did not come in time
};

// What the exchange of counts leaves for all later operations of a micro-batch: int32, in this order.
//   base [E]: where this rank's rows of an expert begin at the expert's rank
//   sent_base [R]: where its unique rows begin at each rank         received_base [R]: where those of each rank begin here
//   received [R]: unique rows from each rank                        offsets [L + 1], tokens [L]: of the local experts
//   rows, unique: totals here                       words [R, kWords]: what each rank said of itself
struct Plan {
    int *base, *sent_base, *received_base, *received, *offsets, *tokens, *totals, *words;

    __host__ __device__ Plan(int* at, int num_experts, int num_ranks, int num_local) {
        base = at;
        sent_base = base + num_experts;
        received_base = sent_base + num_ranks;
        received = received_base + num_ranks;
        offsets = received + num_ranks;
        tokens = offsets + num_local + 1;
        totals = tokens + num_local;
        words = totals + 2;
    }
};

struct Exchange {
    int* block_counts;          // [blocks, E + R + 1]: becomes the counts of earlier blocks
    const int64_t* bad_tokens;  // int64 [], may be null: tokens with non-finite logits
    int* plan;
    int num_blocks, host_code, host_value, no_grad, place;
    int64_t row_capacity;
    int code_bad_ids, code_non_finite, code_overflow, code_place, code_no_grad;
};

struct Push {
    const char* x;         // [T, row_bytes]
    const int64_t* ids;    // [T, K]           first pass
    const float* weights;  // [T, K]           first pass
    const int* route_rank;  // [T, K]          first pass
    const int* block_counts;  // [blocks, E + R + 1], counts of earlier blocks: first pass
    int* unique;           // [T, R]: rank inside its block of tokens (first pass, then made the next), or in all T
    int* plan;
    char* out;             // [unique_capacity or row_capacity, row_bytes]
    int* row_index;        // [row_capacity]   first pass
    int* positions;        // [unique_capacity, K]
    float* row_weights;    // [row_capacity]   first pass
    int64_t row_capacity, unique_capacity;  // of this rank
    int64_t row_bound;  // at every destination: rows beyond it have no place
    int num_tokens, tokens_per_block, send_blocks, first, expand;
};

struct Return {
    const char* rows;      // [row_capacity, row_bytes] to be added up by `positions`, or [unique_capacity, row_bytes]
    const int* positions;  // [unique_capacity, K]
    const int* unique;     // [T, R]
    int* plan;
    const int64_t* ids;      // [T, K], with weights
    const float* row_weights;  // [row_capacity] gradients of the row weights, where they travel
    float* weights;        // [T, K]
    char* out;             // [T, row_bytes]
    int64_t unique_capacity;
    int num_tokens, send_blocks, sum, with_weights;
};

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* at) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* at) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ void store_release(uint32_t* at, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void store_release(uint64_t* at, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ int64_t nanoseconds() {
    int64_t value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
    return value;
}

__device__ __forceinline__ void note_fault(const Domain& d, int code, uint32_t value) {
    atomicMax(d.fault, static_cast<unsigned long long>(code) << 56 | static_cast<unsigned long long>(d.where) | value);
}

template <typename T>
__device__ __forceinline__ T* peer_at(const Domain& d, int rank, int64_t offset) {
    return reinterpret_cast<T*>(d.memory[rank] + offset);
}

// Whether a rank did not come in time, or was told to stop: nobody waits any more.
__device__ __forceinline__ bool is_lost(const Domain& d) {
    return *reinterpret_cast<volatile unsigned long long*>(d.fault) >> 56 == static_cast<unsigned>(d.code_lost) ||
           load_acquire(peer_at<uint32_t>(d, d.rank, d.at.stop)) != 0;
}

// Waits until the flag of `peer` carries the epoch, and returns it. A rank that does not come in time, or was told to
// stop, is a fault, and from then on nobody waits: results are defined by nothing but their shape, and the host raises.
__device__ inline uint64_t wait_chunk(const Domain& d, const uint64_t* flag, uint32_t epoch, int peer) {
    uint64_t value = load_acquire(flag);
    if (static_cast<uint32_t>(value >> 32) == epoch) return value;
    const int64_t end = nanoseconds() + d.timeout_ns;
    for (int turn = 1;; ++turn) {
        __nanosleep(kPause);
        value = load_acquire(flag);
        if (static_cast<uint32_t>(value >> 32) == epoch) return value;
        if (turn % 64 == 0 && (is_lost(d) || nanoseconds() > end)) {
            note_fault(d, d.code_lost, peer);
            return static_cast<uint64_t>(epoch) << 32;  // no rows
        }
    }
}
// Until `peer` is at the epoch, or further on; false where it never came.
__device__ inline bool wait_epoch(const Domain& d, const uint32_t* flag, uint32_t epoch, int peer) {
    if (static_cast<int>(load_acquire(flag) - epoch) >= 0) return true;
    const int64_t end = nanoseconds() + d.timeout_ns;
    for (int turn = 1; static_cast<int>(load_acquire(flag) - epoch) < 0; ++turn) {
        __nanosleep(kPause);
        if (turn % 64 == 0 && (is_lost(d) || nanoseconds() > end)) {
            note_fault(d, d.code_lost, peer);
            return false;
        }
    }
    return true;
}

__device__ __forceinline__ uint32_t current_epoch(const Domain& d) {
    return *reinterpret_cast<volatile uint32_t*>(d.epoch) + 1;
}

// The last block that comes here ends the operation. All threads of the block take part.
__device__ inline void end_operation(const Domain& d, uint32_t epoch) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(d.epoch + 1, 1u) == gridDim.x - 1) {
        d.epoch[1] = d.epoch[2] = 0;
        __threadfence();
        *reinterpret_cast<volatile uint32_t*>(d.epoch) = epoch;
    }
}

// The next item of work for the warp; which warp does what changes no result.
__device__ __forceinline__ int64_t take_item(const Domain& d) {
    const uint32_t item = threadIdx.x % kWarp == 0 ? atomicAdd(d.epoch + 2, 1u) : 0;
    return __shfl_sync(kAll, item, 0);
}

// "My memory may be written": said by block 0 to all, awaited by every block that writes. Whatever read that memory
// before ran in an earlier kernel of the stream.
__device__ inline void open_memory(const Domain& d, uint32_t epoch) {
    if (blockIdx.x == 0)
        for (int r = threadIdx.x; r < d.num_ranks; r += blockDim.x)
            store_release(peer_at<uint32_t>(d, r, d.at.ready) + d.rank, epoch);
}
__device__ inline void await_open_memory(const Domain& d, uint32_t epoch) {
    for (int r = threadIdx.x; r < d.num_ranks; r += blockDim.x)
        wait_epoch(d, peer_at<uint32_t>(d, d.rank, d.at.ready) + r, epoch, r);
    __syncthreads();
}

// Chunks that a warp sends before it waits for them to have arrived: few where there are enough warps for all chunks,
// so that the other side can begin early; else up to about 32 KiB, beside which a fence of the whole system is short.
__device__ __forceinline__ int group_of_chunks(const Domain& d, int warps) {
    const int64_t share = static_cast<int64_t>(d.chunks) * (d.num_ranks - 1) / max(warps, 1);
    const int64_t most = kGroupBytes / (d.chunk_rows * d.row_bytes);
    return static_cast<int>(max(static_cast<int64_t>(1), min(min(share, most), static_cast<int64_t>(kWarp))));
}

// Sets one flag a lane, behind everything that the warp has written.
__device__ __forceinline__ void set_flags(uint64_t* flag, uint64_t value, bool mine) {
    __syncwarp();
    __threadfence_system();
    if (mine) store_release(flag, value);
}

// Rows that other ranks wrote are read past L1.
__device__ __forceinline__ uint4 load_l2(const uint4* at) { return __ldcg(at); }

}  // namespace moe_ep

// What a block of `direct` has: its size, its shared memory, and how its warps copy rows into peer memory.
//
// From sm_90 on a few warps keep bulk copies in flight, device memory to shared memory to peer memory, so that a few
// SMs fill the link and no register holds a row. Before, all warps load and store 16 bytes a lane.
#pragma once

#include "direct_bulk.cuh"

namespace moe_ep {
namespace {

constexpr int kBlockThreads = 384;
constexpr int kBlockWarps = kBlockThreads / kWarp;
constexpr int kUnroll = 4;  // 16-byte loads in flight a lane

constexpr int kStages = 3;  // pieces of a warp: two are loaded while one is stored
constexpr int kStageBytes = 8 * 1024;
constexpr int kBulkWarps = 4;
constexpr int kBulkBytes = kBulkWarps * (kStages * kStageBytes + 128);  // of shared memory

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

constexpr int kSendWarps = kBulkWarps;

// One warp's pipeline. Lane 0 does everything; all lanes call with the same arguments.
class Sender {
  public:
    __device__ Sender(char* shared, int warp) {
        const uint32_t base = shared_address(shared);
        stages_ = base + warp * kStages * kStageBytes;
        barriers_ = base + kBulkWarps * kStages * kStageBytes + warp * 128;
        if (lane() != 0) return;
        for (int i = 0; i < kStages; ++i) init_barrier(barriers_ + 8 * i);
        fence_barriers();
    }

    __device__ void copy(const char* from, char* to, int64_t bytes) {
        if (lane() != 0) return;
        for (int64_t at = 0; at < bytes; at += kStageBytes)
            put(from + at, to + at, static_cast<uint32_t>(min(bytes - at, static_cast<int64_t>(kStageBytes))));
    }

    // Everything handed to copy has arrived.
    __device__ void drain() {
        if (lane() != 0) return;
        while (stored_ != loaded_) store_oldest();
        await_stores();
    }

  private:
    __device__ static int lane() { return threadIdx.x % kWarp; }

    __device__ void put(const char* from, char* to, uint32_t bytes) {
        if (loaded_ - stored_ == kStages - 1) store_oldest();
        await_reads_but_last();  // the store before the last has read this stage
        const uint32_t stage = loaded_ % kStages;
        load_bulk(stages_ + stage * kStageBytes, from, bytes, barriers_ + 8 * stage);
#pragma unroll
        for (int i = 0; i < kStages; ++i)
            if (stage == i) to_[i] = to, bytes_[i] = bytes;
        ++loaded_;
    }

    __device__ void store_oldest() {
        const uint32_t stage = stored_ % kStages;
        await_load(barriers_ + 8 * stage, stored_ / kStages & 1);
        char* to = to_[0];
        uint32_t bytes = bytes_[0];
#pragma unroll
        for (int i = 1; i < kStages; ++i)
            if (stage == i) to = to_[i], bytes = bytes_[i];
        store_bulk(to, stages_ + stage * kStageBytes, bytes);
        ++stored_;
    }

    uint32_t stages_, barriers_, loaded_ = 0, stored_ = 0;
    char* to_[kStages];
    uint32_t bytes_[kStages];
};

#else

constexpr int kSendWarps = kBlockWarps;

class Sender {
  public:
    __device__ Sender(char*, int) {}
    __device__ void copy(const char* from, char* to, int64_t bytes) {
        const int64_t units = bytes / 16;
        const uint4* source = reinterpret_cast<const uint4*>(from);
        uint4* target = reinterpret_cast<uint4*>(to);
        for (int64_t i = threadIdx.x % kWarp; i < units; i += kWarp * kUnroll) {
            uint4 v[kUnroll];
#pragma unroll
            for (int j = 0; j < kUnroll; ++j)
                if (i + j * kWarp < units) v[j] = __ldg(source + i + j * kWarp);
#pragma unroll
            for (int j = 0; j < kUnroll; ++j)
                if (i + j * kWarp < units) target[i + j * kWarp] = v[j];
        }
    }
    __device__ void drain() {}
};

#endif

}  // namespace
}  // namespace moe_ep

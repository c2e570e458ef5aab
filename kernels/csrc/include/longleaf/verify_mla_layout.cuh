// Shared memory, barriers and roles of the verify-attention kernel.
//
// Twelve warps: four compute scores (two pairs, each pair every second tile, each warp of a pair
// half of the 576 dimensions), four compute values (each 128 of the 512 columns), four load. All
// meet in a ring of slots that carries, segment by segment, the row tile's queries and then the
// tiles of tokens.
#pragma once

#include "longleaf/ptx.cuh"
#include "longleaf/verify_mla_params.h"

namespace longleaf {

constexpr int kScoreWarps = 4, kValueWarps = 4, kLoadWarps = 4;
constexpr int kThreads = 32 * (kScoreWarps + kValueWarps + kLoadWarps);
// The launch gives each of the 384 threads 168 registers; the roles share them out again.
constexpr int kLoadRegisters = 32, kScoreRegisters = 240, kValueRegisters = 232;
static_assert(kLoadRegisters + kScoreRegisters + kValueRegisters <= 3 * 168);

// Rows are padded by 16 bytes: an odd number of 16-byte columns makes ldmatrix conflict-free.
constexpr int kBf16RowBytes = kRowDim * 2, kBf16Stride = kBf16RowBytes + 16;
constexpr int kE4m3RowBytes = kRowDim, kE4m3Stride = kE4m3RowBytes + 16;
constexpr int kSlotBytes = kTileTokens * kBf16Stride;

template <int RowGroups>
struct Layout {
  static constexpr int kRows = RowGroups * kRowsPerGroup;
  static constexpr int kSlots = 5;
  static constexpr int kQuerySlots = (RowGroups + 1) / 2;
  static constexpr int kOwned = (RowGroups + 1) / 2;  // row groups that a score warp normalises
  // A pair's exchange area: per row group one warp's partial scores, then the probabilities.
  static constexpr int kGroupBytes = 512;
  static constexpr int kPairBytes = RowGroups * kGroupBytes;

  static constexpr int kRing = 0;
  static constexpr int kExchange = kRing + kSlots * kSlotBytes;
  static constexpr int kReference = kExchange + 2 * kPairBytes;  // float [2][rows], by segment
  static constexpr int kRescale = kReference + 2 * kRows * 4;    // float [2][rows], by pair
  static constexpr int kSums = kRescale + 2 * kRows * 4;         // float [2][rows], by pair
  static constexpr int kFlags = kSums + 2 * kRows * 4;           // int [2][2], by pair and half
  static constexpr int kFull = kFlags + 16;
  static constexpr int kEmpty = kFull + 8 * kSlots;
  static constexpr int kProbsFull = kEmpty + 8 * kSlots;
  static constexpr int kProbsEmpty = kProbsFull + 16;
  static constexpr int kStatsFull = kProbsEmpty + 16;
  static constexpr int kStatsEmpty = kStatsFull + 8;
  static constexpr int kPlan = kStatsEmpty + 8;     // PlanStart, 7 ints
  static constexpr int kMerges = kPlan + 32;        // PendingMerge [2]
  static constexpr int kBytes = kMerges + 2 * 32;
  static_assert(kBytes <= kSharedLimit);
  static_assert(kFull % 8 == 0 && kFlags % 8 == 0 && kReference % 8 == 0);
};

// Arrivals that free a slot: the two warps of the pair that owns the tile and all value warps.
// A slot of queries is read by all four score warps, so there only two value warps arrive.
constexpr int kEmptyArrivals = 2 + kValueWarps;

// A position in the ring: advances in step in every role.
template <int Slots>
struct RingCursor {
  int slot = 0;
  int parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == Slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

template <class L>
__device__ __forceinline__ void init_barriers(uint32_t shared) {
  for (int i = 0; i < L::kSlots; ++i) {
    ptx::mbar_init(shared + L::kFull + 8 * i, kLoadWarps);
    ptx::mbar_init(shared + L::kEmpty + 8 * i, kEmptyArrivals);
  }
  for (int i = 0; i < 2; ++i) {
    ptx::mbar_init(shared + L::kProbsFull + 8 * i, 2);
    ptx::mbar_init(shared + L::kProbsEmpty + 8 * i, kValueWarps);
  }
  ptx::mbar_init(shared + L::kStatsFull, kScoreWarps);
  ptx::mbar_init(shared + L::kStatsEmpty, kValueWarps);
  ptx::mbar_init_fence();
}

// bf16 cache: bf16 mma. Probabilities share bf16's range with float, so the reference of the
// softmax may lag the true maximum by 2^64 before sums must be rescaled.
struct Bf16Cache {
  static constexpr bool kIsE4m3 = false;
  static constexpr int kRowBytes = kBf16RowBytes, kStride = kBf16Stride;
  static constexpr float kHeadroom = 64.f;
  __device__ static __forceinline__ void mma(float (&c)[4], const uint32_t* a, const uint32_t* b) {
    ptx::mma_bf16(c, a, b);
  }
  __device__ static __forceinline__ uint32_t pack(float low, float high) {
    return ptx::pack_bf16(low, high);
  }
};

// e4m3 cache: unpacked to f16 in registers (exact), f16 mma. The step's own rows come as bf16 and
// are divided by kv_scale on the way, so that everything accumulates in the cache's units.
struct E4m3Cache {
  static constexpr bool kIsE4m3 = true;
  static constexpr int kRowBytes = kE4m3RowBytes, kStride = kE4m3Stride;
  static constexpr float kHeadroom = 8.f;
  __device__ static __forceinline__ void mma(float (&c)[4], const uint32_t* a, const uint32_t* b) {
    ptx::mma_f16(c, a, b);
  }
  __device__ static __forceinline__ uint32_t pack(float low, float high) {
    return ptx::pack_f16(low, high);
  }
};

// Two bf16 to two f16, scaled.
__device__ __forceinline__ uint32_t bf16_to_f16(uint32_t x, float scale) {
  return ptx::pack_f16(ptx::bf16_low(x) * scale, ptx::bf16_high(x) * scale);
}

}  // namespace longleaf

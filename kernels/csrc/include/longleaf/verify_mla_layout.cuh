// Shared memory, barriers and roles of the verify-attention kernel.
//
// Twelve warps, three on each quarter of a multiprocessor. Four compute scores: two pairs, each pair
// every second tile, each warp of a pair half of the 576 dimensions. Two turn scores into
// probabilities, each for half of the row groups. Four compute values, each 128 of the 512 columns.
// Two load. All meet in a ring of slots that carries, segment by segment, the row tile's queries and
// then the tiles of tokens.
#pragma once

#include "longleaf/ptx.cuh"
#include "longleaf/verify_mla_params.h"

namespace longleaf {

constexpr int kScoreWarps = 4, kValueWarps = 4, kSoftmaxWarps = 2, kLoadWarps = 2;
constexpr int kThreads = 32 * (kScoreWarps + kValueWarps + kSoftmaxWarps + kLoadWarps);
// The launch gives each of the 384 threads 168 registers; the three warpgroups share them out again.
constexpr int kScoreRegisters = 232, kValueRegisters = 216, kOtherRegisters = 56;
static_assert(kScoreRegisters + kValueRegisters + kOtherRegisters <= 3 * 168);

// bf16 rows lie in nine lines of 128 bytes, the 16-byte columns of a line exchanged as the copy
// engine's 128-byte swizzle does it: column j of line i of the slot is in place j ^ (i % 8). As nine
// is odd, eight rows have a column in eight different places: no bank conflicts. (Padded rows would
// do, but copies to places that are not aligned to a line run at half the speed.)
constexpr int kBf16RowBytes = kRowDim * 2, kLineBytes = 128;
// e4m3 rows are padded by 16 bytes instead; half the bytes, so their copies are fast enough.
constexpr int kE4m3RowBytes = kRowDim, kE4m3Stride = kE4m3RowBytes + 16;

// Where byte `byte` of bf16 row `row` of a slot is.
__device__ __forceinline__ uint32_t swizzled(int row, int byte) {
  return row * kBf16RowBytes + (byte ^ (((row + byte / kLineBytes) & 7) << 4));
}

// bf16 cache: bf16 mma. Probabilities share bf16's range with float, so the reference of the
// softmax may lag the true maximum by 2^64 before sums must be rescaled.
struct Bf16Cache {
  static constexpr bool kIsE4m3 = false;
  static constexpr int kSlots = 5, kSlotRows = 1 << tree_tile_log2(false);  // bf16 rows that a slot holds
  static constexpr int kSlotBytes = kSlotRows * kBf16RowBytes;
  static constexpr float kHeadroom = 64.f;
  __device__ static __forceinline__ void mma(float (&c)[4], const uint32_t* a, const uint32_t* b) {
    ptx::mma_bf16(c, a, b);
  }
  __device__ static __forceinline__ uint32_t pack(float low, float high) {
    return ptx::pack_bf16(low, high);
  }
};

// e4m3 cache: unpacked to f16 in registers (exact), f16 mma. The step's own rows come as bf16 and
// are divided by kv_scale on the way, so that everything accumulates in the cache's units. A slot has
// room for only half as many of them: a tile of the tree is eight tokens.
struct E4m3Cache {
  static constexpr bool kIsE4m3 = true;
  static constexpr int kSlots = 9, kSlotRows = 1 << tree_tile_log2(true);
  static constexpr int kSlotBytes = 10 * 8 * kLineBytes;
  static_assert(kTileTokens * kE4m3Stride <= kSlotBytes && kSlotRows * kBf16RowBytes <= kSlotBytes);
  static constexpr float kHeadroom = 8.f;
  __device__ static __forceinline__ void mma(float (&c)[4], const uint32_t* a, const uint32_t* b) {
    ptx::mma_f16(c, a, b);
  }
  __device__ static __forceinline__ uint32_t pack(float low, float high) {
    return ptx::pack_f16(low, high);
  }
};

template <int RowGroups, class Cache>
struct Layout {
  static constexpr int kRows = RowGroups * kRowsPerGroup;
  static constexpr int kSlots = Cache::kSlots, kSlotBytes = Cache::kSlotBytes;
  static_assert(kSlotBytes % (8 * kLineBytes) == 0);
  static constexpr int kSlotGroups = Cache::kSlotRows / kRowsPerGroup;  // of queries
  static constexpr int kQuerySlots = (RowGroups + kSlotGroups - 1) / kSlotGroups;
  static constexpr int kOwned = (RowGroups + 1) / 2;  // row groups of a softmax warp

  // Partial scores of a tile, 512 bytes a row group. Those of the first half of the dimensions have
  // a buffer for each pair, those of the second half one for both. The probabilities, 256 bytes a
  // group, replace the first half's scores.
  static constexpr int kGroupBytes = 512;
  static constexpr int kRing = 0;  // aligned to eight lines
  static constexpr int kFirstHalf = kRing + kSlots * kSlotBytes;
  static constexpr int kSecondHalf = kFirstHalf + 2 * RowGroups * kGroupBytes;
  // After the probabilities of groups 0 and 1: whether the reference of any row of an even, of an
  // odd group moved. uint32.
  static constexpr int kMoved = 256;

  // Floats by row: the factors by which a tile of a pair rescales what was summed before, and the
  // softmax's reference (log2 units) and sum of a segment.
  static constexpr int kRescale = kSecondHalf + RowGroups * kGroupBytes;  // [2][rows]
  static constexpr int kReference = kRescale + 2 * kRows * 4;
  static constexpr int kSum = kReference + kRows * 4;

  static constexpr int kFull = kSum + kRows * 4;
  static constexpr int kEmpty = kFull + 8 * kSlots;
  static constexpr int kScoresFull = kEmpty + 8 * kSlots;
  static constexpr int kSecondHalfEmpty = kScoresFull + 16;
  static constexpr int kProbsFull = kSecondHalfEmpty + 16;
  static constexpr int kProbsEmpty = kProbsFull + 16;
  static constexpr int kStatsFull = kProbsEmpty + 16;
  static constexpr int kStatsEmpty = kStatsFull + 8;
  static constexpr int kPlan = kStatsEmpty + 8;  // PlanStart, 7 ints
  static constexpr int kMerges = kPlan + 28;     // PendingMerges, 13 ints
  static constexpr int kBytes = kMerges + 52;
  static_assert(kBytes <= kSharedLimit);
  static_assert(kFull % 8 == 0);
};

// Arrivals that free a slot: the two warps of the pair that owns the tile and all value warps.
// A slot of queries is read by all four score warps, so there only two value warps arrive.
constexpr int kEmptyArrivals = 2 + kValueWarps;

// A position in the ring: advances in step in every role.
//
// A barrier tells only the parity of its phase. A warp that skips a phase can take it for the one
// after the next, when copies overtake each other, and read a slot too soon; one that does not count
// for freeing a slot can miss a phase and wait for ever. So a score warp waits for every position to
// be full, and for those of the other pair at a moment when they cannot be free yet.
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
    ptx::mbar_init(shared + L::kScoresFull + 8 * i, 2);
    ptx::mbar_init(shared + L::kSecondHalfEmpty + 8 * i, kSoftmaxWarps);
    ptx::mbar_init(shared + L::kProbsFull + 8 * i, kSoftmaxWarps);
    ptx::mbar_init(shared + L::kProbsEmpty + 8 * i, kValueWarps);
  }
  ptx::mbar_init(shared + L::kStatsFull, kSoftmaxWarps);
  ptx::mbar_init(shared + L::kStatsEmpty, kValueWarps);
  ptx::mbar_init_fence();
}

// Two bf16 to two f16, scaled.
__device__ __forceinline__ uint32_t bf16_to_f16(uint32_t x, float scale) {
  return ptx::pack_f16(ptx::bf16_low(x) * scale, ptx::bf16_high(x) * scale);
}

}  // namespace longleaf

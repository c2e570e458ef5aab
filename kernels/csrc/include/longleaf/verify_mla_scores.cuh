// The score warps: S^T = K Q^T, tokens x rows.
//
// A pair of warps owns every second tile. Each warp holds the queries of its half of the 576
// dimensions in registers, and leaves its half of the scores to the softmax warps: between two tiles
// the tensor cores wait for little more than the stores.
#pragma once

#include "longleaf/plan.cuh"
#include "longleaf/verify_mla_layout.cuh"

namespace longleaf {

constexpr int kSteps = kRowDim / 2 / 16;  // 16-deep steps of a warp's half of the dimensions

template <int RowGroups, class Cache>
class ScoreWarp {
  using L = Layout<RowGroups>;

 public:
  __device__ __forceinline__ ScoreWarp(const VerifyMlaParams& p, uint32_t shared, int warp, int lane)
      : p_(p), shared_(shared), lane_(lane), pair_(warp >> 1), half_(warp & 1) {}

  __device__ __forceinline__ void run(const PlanStart& plan, int member) {
    const uint32_t scores_to =
        shared_ + lane_ * 16 +
        (half_ ? L::kSecondHalf : L::kFirstHalf + pair_ * RowGroups * L::kGroupBytes);
    Cursor<RowGroups> segment(p_, plan, member);
    int count = 0;  // tiles so far, of both pairs: tile n belongs to pair n % 2
    while (segment.next()) {
      load_queries();
      // This pair's tiles: every second one, from the first that its turn comes.
      int left = segment.end_tile - segment.first_tile;
      int tile = segment.first_tile;
      if ((count & 1) != pair_) skip(tile, left, count);
      Keys keys;
      if (left > 0) wait_slot(keys);
      while (left > 0) {
        Scores s;
        if (Cache::kIsE4m3 && tile >= segment.item.prefix_tiles) {
          score_tree_e4m3(s);
        } else {
          score(s, keys);
        }
        __syncwarp();
        if (lane_ == 0) ptx::mbar_arrive(shared_ + L::kEmpty + 8 * ring_.slot);
        const int done = count;
        skip(tile, left, count);
        if (left > 0) skip(tile, left, count);
        if (left > 0) wait_slot(keys);  // of the next tile: its loads overlap these stores
        // The first half's place holds probabilities of two tiles ago, the second half's scores of
        // the tile before.
        if (half_ == 0) {
          ptx::mbar_wait(shared_ + L::kProbsEmpty + 8 * pair_, ((done >> 1) & 1) ^ 1);
        } else if (done > 0) {
          ptx::mbar_wait(shared_ + L::kSecondHalfEmpty + 8 * (pair_ ^ 1), ((done - 1) >> 1) & 1);
        }
#pragma unroll
        for (int g = 0; g < RowGroups; ++g)
          ptx::store_shared_f4(scores_to + g * L::kGroupBytes, s[g]);
        __syncwarp();
        if (lane_ == 0) ptx::mbar_arrive(shared_ + L::kScoresFull + 8 * pair_);
      }
    }
  }

 private:
  using Scores = float[RowGroups][4];
  static constexpr int kAhead = 2;  // steps whose keys are read ahead
  using Keys = uint32_t[kAhead + 1][4];

  __device__ __forceinline__ void skip(int& tile, int& left, int& count) {
    ++tile;
    --left;
    ++count;
    ring_.advance();
  }
  // Waits for this pair's next tile and starts to read it.
  __device__ __forceinline__ void wait_slot(Keys& keys) {
    ptx::mbar_wait(shared_ + L::kFull + 8 * ring_.slot, ring_.parity);
    if constexpr (!Cache::kIsE4m3) {
#pragma unroll
      for (int k = 0; k < kAhead; ++k) load_keys(keys, k);
    }
  }

  __device__ __forceinline__ void load_queries() {
#pragma unroll
    for (int s = 0; s < L::kQuerySlots; ++s) {
      ptx::mbar_wait(shared_ + L::kFull + 8 * ring_.slot, ring_.parity);
      const uint32_t slot = shared_ + L::kRing + ring_.slot * kSlotBytes;
      const int lane = ptx::recompute(lane_);  // addresses of a part that runs once a segment
#pragma unroll
      for (int g = 2 * s; g < 2 * s + 2 && g < RowGroups; ++g) {
#pragma unroll
        for (int k = 0; k < kSteps; k += 2) {
          if (Cache::kIsE4m3) {
            // Four consecutive dimensions a lane: the order in which unpacked e4m3 keys come.
            const int row = (g & 1) * kRowsPerGroup + (lane >> 2);
            for (int i = 0; i < 2; ++i) {
              const uint2 x = ptx::load_shared2(
                  slot + swizzled(row, (half_ * kSteps + k + i) * 32 + (lane & 3) * 8));
              queries_[k + i][g][0] = bf16_to_f16(x.x, 1.f);
              queries_[k + i][g][1] = bf16_to_f16(x.y, 1.f);
            }
          } else {
            uint32_t x[4];
            const int row = (g & 1) * kRowsPerGroup + (lane & 7);
            ptx::ldmatrix_x4(x, slot + swizzled(row, step_byte(k) + (lane >> 3) * 16));
            queries_[k][g][0] = x[0];
            queries_[k][g][1] = x[1];
            queries_[k + 1][g][0] = x[2];
            queries_[k + 1][g][1] = x[3];
          }
        }
      }
      __syncwarp();
      if (lane_ == 0) ptx::mbar_arrive(shared_ + L::kEmpty + 8 * ring_.slot);
      ring_.advance();
    }
  }

  __device__ __forceinline__ void multiply(Scores& s, const uint32_t* keys, int k) {
    if (k == 0) {
#pragma unroll
      for (int g = 0; g < RowGroups; ++g) s[g][0] = s[g][1] = s[g][2] = s[g][3] = 0.f;
    }
#pragma unroll
    for (int g = 0; g < RowGroups; ++g) Cache::mma(s[g], keys, queries_[k][g]);
  }

  // Byte of a bf16 row at which step k of this half begins. A half has four whole lines, and half
  // of the last one.
  __device__ __forceinline__ int step_byte(int k) const {
    return k < 16 ? half_ * 4 * kLineBytes + k * 32 : 8 * kLineBytes + half_ * 64 + (k - 16) * 32;
  }

  __device__ __forceinline__ void load_keys(Keys& keys, int k) const {
    // The slot's and the row's part of the address are multiples of a line: the rest is or-ed in.
    const int row = lane_ & 15, column = lane_ >> 4;
    const int line = k < 16 ? half_ * 4 + k / 4 : 8;
    const int within = k < 16 ? k % 4 * 2 : half_ * 4 + (k - 16) * 2;
    const uint32_t from = shared_ + L::kRing + ring_.slot * kSlotBytes + row * kBf16RowBytes +
                          line * kLineBytes;
    const uint32_t place = (((row + line) & 7) ^ column) << 4;
    ptx::ldmatrix_x4(keys[k % (kAhead + 1)], from | (place ^ (within << 4)));
  }

  // The tile of the ring's slot; bf16 keys of the first kAhead steps are there.
  __device__ __forceinline__ void score(Scores& s, Keys& keys) {
    if constexpr (Cache::kIsE4m3) {
      // Two steps come with one ldmatrix: rows 0-7 and 8-15 of 16 bytes, then of the next 16.
      const uint32_t from = shared_ + L::kRing + ring_.slot * kSlotBytes +
                            (lane_ & 15) * kE4m3Stride + (lane_ >> 4) * 16 + half_ * kSteps * 16;
      uint32_t raw[2][4];
      ptx::ldmatrix_x4(raw[0], from);
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        if (k + 2 < kSteps) ptx::ldmatrix_x4(raw[(k / 2 + 1) & 1], from + (k + 2) * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t low = raw[(k / 2) & 1][2 * i], high = raw[(k / 2) & 1][2 * i + 1];
          const uint32_t pair[4] = {ptx::e4m3_low_to_f16(low), ptx::e4m3_low_to_f16(high),
                                    ptx::e4m3_high_to_f16(low), ptx::e4m3_high_to_f16(high)};
          multiply(s, pair, k + i);
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (k + kAhead < kSteps) load_keys(keys, k + kAhead);
        ptx::pin_loads(ring_.slot > L::kSlots);
        multiply(s, keys[k % (kAhead + 1)], k);
      }
    }
  }

  // The step's own rows under an e4m3 cache: bf16 to f16, dimensions in the queries' order.
  __device__ __forceinline__ void score_tree_e4m3(Scores& s) {
    const float scale = __fdividef(1.f, p_.value_scale);
    const uint32_t slot = shared_ + L::kRing + ring_.slot * kSlotBytes;
    const int lane = ptx::recompute(lane_);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int row = lane >> 2, byte = (half_ * kSteps + k) * 32 + (lane & 3) * 8;
      const uint2 low = ptx::load_shared2(slot + swizzled(row, byte));
      const uint2 high = ptx::load_shared2(slot + swizzled(row + 8, byte));
      const uint32_t keys[4] = {bf16_to_f16(low.x, scale), bf16_to_f16(high.x, scale),
                                bf16_to_f16(low.y, scale), bf16_to_f16(high.y, scale)};
      multiply(s, keys, k);
    }
  }

  const VerifyMlaParams& p_;
  const uint32_t shared_;
  const int lane_, pair_, half_;
  RingCursor<L::kSlots> ring_;
  uint32_t queries_[kSteps][RowGroups][2];
};

}  // namespace longleaf

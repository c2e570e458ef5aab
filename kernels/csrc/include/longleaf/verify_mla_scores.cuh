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
  using L = Layout<RowGroups, Cache>;

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
      Keys keys;
      if ((count & 1) != pair_) step(tile, left, count);  // load_queries has waited for it
      if (left > 0) begin_tile(keys);
      while (left > 0) {
        Scores s;
        if (Cache::kIsE4m3 && tile >= segment.item.prefix_tiles) {
          score_tree_e4m3(s);
          release_slot(__float_as_uint(s[RowGroups - 1][0]));
        } else {
          score(s, keys);
          uint32_t read = 0;
#pragma unroll
          for (int k = 0; k <= kAhead; ++k) read ^= keys[k][0];
          release_slot(read);
        }
        const int done = count;
        step(tile, left, count);
        // The other pair's tile, which cannot be free before these scores are stored.
        if (left > 0) {
          wait_slot();
          step(tile, left, count);
        }
        if (left > 0) begin_tile(keys);  // its loads overlap these stores
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
  // Products of a single row group would wait for each other: they form two sums.
  static constexpr int kChains = RowGroups == 1 ? 2 : 1;
  using Scores = float[kChains * RowGroups][4];
  // One ldmatrix brings the keys of a step, or of two of e4m3.
  static constexpr int kLoads = Cache::kIsE4m3 ? kSteps / 2 : kSteps;
  static constexpr int kAhead = Cache::kIsE4m3 ? 1 : 2;  // loads ahead of their products
  using Keys = uint32_t[kAhead + 1][4];

  __device__ __forceinline__ void wait_slot() {
    ptx::mbar_wait(shared_ + L::kFull + 8 * ring_.slot, ring_.parity);
  }
  // Once `read`, which depends on all that was read, is there.
  __device__ __forceinline__ void release_slot(uint32_t read) {
    __syncwarp();
    if (lane_ == 0) ptx::mbar_arrive_after(shared_ + L::kEmpty + 8 * ring_.slot, read);
  }
  __device__ __forceinline__ void step(int& tile, int& left, int& count) {
    ++tile;
    --left;
    ++count;
    ring_.advance();
  }
  // Waits for a tile of this pair and starts to read it.
  __device__ __forceinline__ void begin_tile(Keys& keys) {
    wait_slot();
#pragma unroll
    for (int k = 0; k < kAhead; ++k) load_keys(keys, k);
  }

  __device__ __forceinline__ void load_queries() {
#pragma unroll
    for (int s = 0; s < L::kQuerySlots; ++s) {
      wait_slot();
      const uint32_t slot = shared_ + L::kRing + ring_.slot * L::kSlotBytes;
      const int lane = ptx::recompute(lane_);  // addresses of a part that runs once a segment
      uint32_t read = 0;
#pragma unroll
      for (int g = L::kSlotGroups * s; g < L::kSlotGroups * (s + 1) && g < RowGroups; ++g) {
        const int first_row = (g % L::kSlotGroups) * kRowsPerGroup;
#pragma unroll
        for (int k = 0; k < kSteps; k += 2) {
          if (Cache::kIsE4m3) {
            // Four consecutive dimensions a lane: the order in which unpacked e4m3 keys come.
            const int row = first_row + (lane >> 2);
            for (int i = 0; i < 2; ++i) {
              const uint2 x = ptx::load_shared2(
                  slot + swizzled(row, (half_ * kSteps + k + i) * 32 + (lane & 3) * 8));
              queries_[k + i][g][0] = bf16_to_f16(x.x, 1.f);
              queries_[k + i][g][1] = bf16_to_f16(x.y, 1.f);
            }
          } else {
            uint32_t x[4];
            const int row = first_row + (lane & 7);
            ptx::ldmatrix_x4(x, slot + swizzled(row, step_byte(k) + (lane >> 3) * 16));
            queries_[k][g][0] = x[0];
            queries_[k][g][1] = x[1];
            queries_[k + 1][g][0] = x[2];
            queries_[k + 1][g][1] = x[3];
          }
          read ^= queries_[k][g][0] ^ queries_[k + 1][g][0];
        }
      }
      if (s + 1 == L::kQuerySlots) {
        // The first tile, perhaps the other pair's: while this slot is taken, none can come after it.
        RingCursor<L::kSlots> first_tile = ring_;
        first_tile.advance();
        ptx::mbar_wait(shared_ + L::kFull + 8 * first_tile.slot, first_tile.parity);
      }
      release_slot(read);
      ring_.advance();
    }
  }

  __device__ __forceinline__ void multiply(Scores& s, const uint32_t* keys, int k) {
    if (k < kChains) {
#pragma unroll
      for (int g = 0; g < RowGroups; ++g)
        s[k * RowGroups + g][0] = s[k * RowGroups + g][1] = s[k * RowGroups + g][2] =
            s[k * RowGroups + g][3] = 0.f;
    }
#pragma unroll
    for (int g = 0; g < RowGroups; ++g)
      Cache::mma(s[k % kChains * RowGroups + g], keys, queries_[k][g]);
    if (k + 1 < kSteps || kChains == 1) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][i] += s[kChains - 1][i];
  }

  // Byte of a bf16 row at which step k of this half begins. A half has four whole lines, and half
  // of the last one.
  __device__ __forceinline__ int step_byte(int k) const {
    return k < 16 ? half_ * 4 * kLineBytes + k * 32 : 8 * kLineBytes + half_ * 64 + (k - 16) * 32;
  }

  __device__ __forceinline__ void load_keys(Keys& keys, int k) const {
    const uint32_t slot = shared_ + L::kRing + ring_.slot * L::kSlotBytes;
    if constexpr (Cache::kIsE4m3) {
      // Rows 0-7 and 8-15 of 16 bytes, then of the next 16.
      ptx::ldmatrix_x4(keys[k % (kAhead + 1)], slot + (lane_ & 15) * kE4m3Stride +
                                                   (lane_ >> 4) * 16 + (half_ * kSteps + 2 * k) * 16);
      return;
    }
    // The slot's and the row's part of the address are multiples of a line: the rest is or-ed in.
    const int row = lane_ & 15, column = lane_ >> 4;
    const int line = k < 16 ? half_ * 4 + k / 4 : 8;
    const int within = k < 16 ? k % 4 * 2 : half_ * 4 + (k - 16) * 2;
    const uint32_t from = slot + row * kBf16RowBytes + line * kLineBytes;
    const uint32_t place = (((row + line) & 7) ^ column) << 4;
    ptx::ldmatrix_x4(keys[k % (kAhead + 1)], from | (place ^ (within << 4)));
  }

  // The tile of the ring's slot; the keys of the first kAhead loads are there.
  __device__ __forceinline__ void score(Scores& s, Keys& keys) {
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (k + kAhead < kLoads) load_keys(keys, k + kAhead);
      ptx::pin_loads(ring_.slot > L::kSlots);
      const uint32_t(&x)[4] = keys[k % (kAhead + 1)];
      if constexpr (Cache::kIsE4m3) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t low = x[2 * i], high = x[2 * i + 1];
          const uint32_t pair[4] = {ptx::e4m3_low_to_f16(low), ptx::e4m3_low_to_f16(high),
                                    ptx::e4m3_high_to_f16(low), ptx::e4m3_high_to_f16(high)};
          multiply(s, pair, 2 * k + i);
        }
      } else {
        multiply(s, x, k);
      }
    }
  }

  // The step's own rows under an e4m3 cache, eight a tile: bf16 to f16, dimensions in the queries'
  // order.
  __device__ __forceinline__ void score_tree_e4m3(Scores& s) {
    const float scale = __fdividef(1.f, p_.value_scale);
    const uint32_t slot = shared_ + L::kRing + ring_.slot * L::kSlotBytes;
    const int lane = ptx::recompute(lane_);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int byte = (half_ * kSteps + k) * 32 + (lane & 3) * 8;
      const uint2 x = ptx::load_shared2(slot + swizzled(lane >> 2, byte));
      const uint32_t keys[4] = {bf16_to_f16(x.x, scale), 0, bf16_to_f16(x.y, scale), 0};
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

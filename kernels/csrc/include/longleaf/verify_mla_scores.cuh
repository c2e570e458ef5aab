// The score warps: S^T = K Q^T (tokens x rows), softmax, probabilities to the value warps.
//
// A pair of warps owns every second tile. Each warp holds the queries of its half of the 576
// dimensions in registers and sums its half of the scores; the halves meet in shared memory, where
// warp h of a pair takes row groups h, h + 2, ... In registers a warp keeps the groups it owns at
// even places, so `place ^ half` is the group (but the last of an odd number keeps its place).
//
// The softmax is relative to a reference that follows the maximum lazily: it moves only when a
// score exceeds it by the headroom of the probabilities' type, so the common tile needs no maximum
// over tokens. The moves of a row are ordered: a pair reads the reference, and follows the other
// pair's move, after the other pair has published the tile before.
#pragma once

#include "longleaf/plan.cuh"
#include "longleaf/verify_mla_layout.cuh"

namespace longleaf {

constexpr int kSteps = kRowDim / 2 / 16;  // 16-deep steps of a warp's half of the dimensions
constexpr float kNegInf = -__builtin_huge_valf();

template <int RowGroups, class Cache>
class ScoreWarp {
  using L = Layout<RowGroups>;

 public:
  __device__ __forceinline__ ScoreWarp(const VerifyMlaParams& p, uint32_t shared, int warp, int lane)
      : p_(p), shared_(shared), lane_(lane), pair_(warp >> 1), half_(warp & 1),
        exchange_(shared + L::kExchange + pair_ * L::kPairBytes) {}

  __device__ __forceinline__ void run(const PlanStart& plan, int member) {
    Cursor<RowGroups> segment(p_, plan, member);
    for (; segment.next(); ++segments_) {
      load_queries();
#pragma unroll
      for (int i = 0; i < L::kOwned; ++i) sum_[i][0] = sum_[i][1] = 0.f;
      // Tiles that every row sees whole, then the prefix's last one and the tree's.
      const int whole = min(segment.end_tile, segment.item.prefix_tokens / kTileTokens);
      int tile = segment.first_tile;
      for (; tile < whole; ++tile) step<false>(segment, tile);
      for (; tile < segment.end_tile; ++tile) step<true>(segment, tile);
      ptx::mbar_wait(shared_ + L::kStatsEmpty, (segments_ & 1) ^ 1);
      store_sums();
      __syncwarp();
      if (lane_ == 0) ptx::mbar_arrive(shared_ + L::kStatsFull);
    }
  }

 private:
  // Of an odd number of groups the second half owns one less; its last place is then idle.
  __device__ __forceinline__ bool owns(int i) const { return 2 * i + 1 < RowGroups || half_ == 0; }
  __device__ __forceinline__ int group(int place) const {
    return (RowGroups & 1) && place == RowGroups - 1 ? place : place ^ half_;
  }
  // Byte offset of this lane's two rows of owned group i in an array of floats by row.
  __device__ __forceinline__ int row_offset(int i) const {
    return i * 2 * kRowsPerGroup * 4 + half_ * kRowsPerGroup * 4 + (lane_ & 3) * 8;
  }
  __device__ __forceinline__ uint32_t references() const {
    return shared_ + L::kReference + (segments_ & 1) * L::kRows * 4;
  }

  __device__ __forceinline__ void load_queries() {
#pragma unroll
    for (int s = 0; s < L::kQuerySlots; ++s) {
      ptx::mbar_wait(shared_ + L::kFull + 8 * ring_.slot, ring_.parity);
      const uint32_t slot = shared_ + L::kRing + ring_.slot * kSlotBytes + half_ * kSteps * 32;
#pragma unroll
      for (int place = 2 * s; place < 2 * s + 2 && place < RowGroups; ++place) {
        const uint32_t rows = slot + (group(place) & 1) * kRowsPerGroup * kBf16Stride;
#pragma unroll
        for (int k = 0; k < kSteps; k += 2) {
          if (Cache::kIsE4m3) {
            // Four consecutive dimensions a lane: the order in which unpacked e4m3 keys come.
            const uint32_t from = rows + (lane_ >> 2) * kBf16Stride + (lane_ & 3) * 8 + k * 32;
            for (int i = 0; i < 2; ++i) {
              const uint2 x = ptx::load_shared2(from + i * 32);
              queries_[k + i][place][0] = bf16_to_f16(x.x, 1.f);
              queries_[k + i][place][1] = bf16_to_f16(x.y, 1.f);
            }
          } else {
            uint32_t x[4];
            ptx::ldmatrix_x4(x, rows + (lane_ & 7) * kBf16Stride + (lane_ >> 3) * 16 + k * 32);
            queries_[k][place][0] = x[0];
            queries_[k][place][1] = x[1];
            queries_[k + 1][place][0] = x[2];
            queries_[k + 1][place][1] = x[3];
          }
        }
      }
      __syncwarp();
      if (lane_ == 0) ptx::mbar_arrive(shared_ + L::kEmpty + 8 * ring_.slot);
      ring_.advance();
    }
  }

  using Scores = float[RowGroups][4];

  __device__ __forceinline__ void multiply(Scores& s, const uint32_t* keys, int k) {
#pragma unroll
    for (int place = 0; place < RowGroups; ++place) Cache::mma(s[place], keys, queries_[k][place]);
  }

  // Two e4m3 steps come with one ldmatrix.
  __device__ __forceinline__ void multiply_e4m3(Scores& s, const uint32_t (&raw)[4], int k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t keys[4] = {
          ptx::e4m3_low_to_f16(raw[2 * i]), ptx::e4m3_low_to_f16(raw[2 * i + 1]),
          ptx::e4m3_high_to_f16(raw[2 * i]), ptx::e4m3_high_to_f16(raw[2 * i + 1])};
      multiply(s, keys, k + i);
    }
  }

  __device__ __forceinline__ void scores(Scores& s, bool is_tree) {
#pragma unroll
    for (int place = 0; place < RowGroups; ++place)
      s[place][0] = s[place][1] = s[place][2] = s[place][3] = 0.f;
    const uint32_t slot = shared_ + L::kRing + ring_.slot * kSlotBytes;
    const int stride = Cache::kStride;
    const uint32_t from = slot + (lane_ & 15) * stride + (lane_ >> 4) * 16 +
                          half_ * (Cache::kIsE4m3 ? kSteps * 16 : kSteps * 32);
    if (!Cache::kIsE4m3) {
      constexpr int kAhead = 2;
      uint32_t keys[kAhead + 1][4];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) ptx::ldmatrix_x4(keys[k], from + k * 32);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (k + kAhead < kSteps)
          ptx::ldmatrix_x4(keys[(k + kAhead) % (kAhead + 1)], from + (k + kAhead) * 32);
        ptx::pin_loads(ring_.slot > L::kSlots);
        multiply(s, keys[k % (kAhead + 1)], k);
      }
    } else if (!is_tree) {
      uint32_t raw[2][4];
      // Matrices of x4: rows 0-7 and 8-15 of one 16-byte column, then of the next.
      ptx::ldmatrix_x4(raw[0], from);
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        if (k + 2 < kSteps) ptx::ldmatrix_x4(raw[(k / 2 + 1) & 1], from + (k + 2) * 16);
        multiply_e4m3(s, raw[(k / 2) & 1], k);
      }
    } else {
      const float scale = __fdividef(1.f, p_.value_scale);
      const uint32_t rows = slot + (lane_ >> 2) * kBf16Stride + (lane_ & 3) * 8 +
                            half_ * kSteps * 32;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const uint2 low = ptx::load_shared2(rows + k * 32);
        const uint2 high = ptx::load_shared2(rows + 8 * kBf16Stride + k * 32);
        const uint32_t keys[4] = {bf16_to_f16(low.x, scale), bf16_to_f16(high.x, scale),
                                  bf16_to_f16(low.y, scale), bf16_to_f16(high.y, scale)};
        multiply(s, keys, k);
      }
    }
  }

  // Hides what a row must not see: tokens past the prefix, and tree nodes that are no ancestors.
  __device__ __forceinline__ static void mask(const VerifyMlaParams& p, const Item item, int first_row,
                                           int tile, float (&s)[4], int row_in_tile, int lane) {
    const bool is_tree = tile >= item.prefix_tiles;
    const int first = (is_tree ? tile - item.prefix_tiles : tile) * kTileTokens + (lane >> 2);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = min(first_row + row_in_tile + j, item.nodes * p.heads - 1);
      const int node = row / p.heads;
      uint64_t bits = 0;
      if (is_tree && p.visible)
        bits = __ldg(p.visible + static_cast<size_t>(item.first_token + node) * p.visible_words +
                     (first >> 6));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = first + 8 * i;
        const bool sees = !is_tree          ? token < item.prefix_tokens
                          : token >= item.nodes ? false
                          : p.visible           ? (bits >> (token & 63)) & 1
                                                : token <= node;
        if (!sees) s[2 * i + j] = kNegInf;
      }
    }
  }

  template <bool Masked>
  __device__ __forceinline__ void step(const Cursor<RowGroups>& segment, int tile) {
    if ((count_ & 1) == pair_) own_step<Masked>(segment, tile);
    ++count_;
    ring_.advance();
  }

  template <bool Masked>
  __device__ __forceinline__ void own_step(const Cursor<RowGroups>& segment, int tile) {
    Scores s;
    ptx::mbar_wait(shared_ + L::kFull + 8 * ring_.slot, ring_.parity);
    scores(s, Masked && tile >= segment.item.prefix_tiles);
    __syncwarp();
    if (lane_ == 0) ptx::mbar_arrive(shared_ + L::kEmpty + 8 * ring_.slot);

    // Exchange the halves. The area is free once the value warps have read the probabilities.
    ptx::mbar_wait(shared_ + L::kProbsEmpty + 8 * pair_, ((count_ >> 1) & 1) ^ 1);
    const uint32_t mine = exchange_ + lane_ * 16 + half_ * L::kGroupBytes;
    const uint32_t theirs = exchange_ + lane_ * 16 - half_ * L::kGroupBytes;
#pragma unroll
    for (int place = 1; place < RowGroups; place += 2)
      ptx::store_shared_f4(theirs + place * L::kGroupBytes, s[place]);
    if ((RowGroups & 1) && half_ == 1)
      ptx::store_shared_f4(exchange_ + lane_ * 16 + (RowGroups - 1) * L::kGroupBytes,
                           s[RowGroups - 1]);
    ptx::named_barrier<64>(1 + pair_);
    float v[L::kOwned][4];
#pragma unroll
    for (int i = 0; i < L::kOwned; ++i) {
      const float4 x = ptx::load_shared_f4(mine + 2 * i * L::kGroupBytes);
      v[i][0] = s[2 * i][0] + x.x;
      v[i][1] = s[2 * i][1] + x.y;
      v[i][2] = s[2 * i][2] + x.z;
      v[i][3] = s[2 * i][3] + x.w;
    }
    if (Masked) {
#pragma unroll
      for (int i = 0; i < L::kOwned; ++i)
        mask(p_, segment.item, segment.first_row, tile, v[i], row_offset(i) / 4, lane_);
    }
    softmax(v, tile == segment.first_tile, Masked);
  }

  // Whether the other pair's last tile moved the reference of rows that this warp owns too.
  __device__ __forceinline__ uint32_t wait_other_pair() {
    if (count_ > 0)
      ptx::mbar_wait(shared_ + L::kProbsFull + 8 * (pair_ ^ 1), ((count_ - 1) >> 1) & 1);
    return ptx::load_shared(shared_ + L::kFlags + (pair_ ^ 1) * 8 + half_ * 4);
  }
  __device__ __forceinline__ void follow_other_pair() {
#pragma unroll
    for (int i = 0; i < L::kOwned; ++i) {
      const float2 f =
          ptx::load_shared_f2(shared_ + L::kRescale + (pair_ ^ 1) * L::kRows * 4 + row_offset(i));
      sum_[i][0] *= f.x;
      sum_[i][1] *= f.y;
    }
  }

  // v: this lane's scores of its owned groups: rows 2t, 2t + 1 of token g, then of token g + 8.
  __device__ __forceinline__ void softmax(float (&v)[L::kOwned][4], bool is_first, bool masked) {
    const uint32_t moved = wait_other_pair();
    float2 current[L::kOwned];
    float highest = kNegInf;
    float x[L::kOwned][4];
#pragma unroll
    for (int i = 0; i < L::kOwned; ++i) {
      current[i] = ptx::load_shared_f2(references() + row_offset(i));
      if (is_first) current[i] = {kNegInf, kNegInf};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[i][e] = fmaf(v[i][e], p_.logit_scale, e & 1 ? -current[i].y : -current[i].x);
        if (owns(i)) highest = fmaxf(highest, x[i][e]);
      }
    }
    // A reference of -inf makes any score exceed the headroom.
    const bool unusual = masked || moved != 0 || highest > Cache::kHeadroom;
    bool rescale = false;
    if (__builtin_expect(__any_sync(~0u, unusual), 0)) {
      if (moved && !is_first) follow_other_pair();
#pragma unroll
      for (int i = 0; i < L::kOwned; ++i) rescale |= move_reference(v[i], x[i], current[i], i);
      rescale = __any_sync(~0u, rescale);
    }
    // Per group 16 tokens x 8 rows, 16 bytes a token.
    const uint32_t to = exchange_ + lane_ * 4 + half_ * L::kGroupBytes;
#pragma unroll
    for (int i = 0; i < L::kOwned; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][e] = ptx::exp2_approx(x[i][e]);
      sum_[i][0] += x[i][0] + x[i][2];
      sum_[i][1] += x[i][1] + x[i][3];
      if (!owns(i)) continue;
      ptx::store_shared(to + 2 * i * L::kGroupBytes, Cache::pack(x[i][0], x[i][1]));
      ptx::store_shared(to + 2 * i * L::kGroupBytes + 128, Cache::pack(x[i][2], x[i][3]));
    }
    if (lane_ == 0) ptx::store_shared(shared_ + L::kFlags + pair_ * 8 + half_ * 4, rescale);
    __syncwarp();
    if (lane_ == 0) ptx::mbar_arrive(shared_ + L::kProbsFull + 8 * pair_);
  }

  // Raises the reference of this lane's rows of owned group i if it must; x becomes the exponents
  // under the new one. Returns whether what was summed before must be rescaled.
  __device__ __forceinline__ bool move_reference(const float (&v)[4], float (&x)[4], float2 current,
                                                 int i) {
    bool rescale = false;
    float factor[2], next[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float top = fmaxf(v[j], v[2 + j]);
#pragma unroll
      for (int step = 4; step < 32; step <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      top *= p_.logit_scale;
      const float old = j ? current.y : current.x;
      next[j] = top > old + Cache::kHeadroom ? top : old;
      // Under a reference of -inf nothing has been summed.
      const bool up = next[j] > old && old != kNegInf;
      factor[j] = up ? ptx::exp2_approx(old - next[j]) : 1.f;
      sum_[i][j] *= factor[j];
      rescale |= up && owns(i);
      const float base = next[j] == kNegInf ? 0.f : next[j];
      x[j] = fmaf(v[j], p_.logit_scale, -base);
      x[2 + j] = fmaf(v[2 + j], p_.logit_scale, -base);
    }
    if (owns(i) && lane_ < 4) {
      ptx::store_shared_f2(references() + row_offset(i), next[0], next[1]);
      ptx::store_shared_f2(shared_ + L::kRescale + pair_ * L::kRows * 4 + row_offset(i), factor[0],
                           factor[1]);
    }
    return rescale;
  }

  // This pair's sums of the segment, relative to the segment's last reference.
  __device__ __forceinline__ void store_sums() {
    if (((count_ - 1) & 1) != pair_ && wait_other_pair()) follow_other_pair();
#pragma unroll
    for (int i = 0; i < L::kOwned; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int step = 4; step < 32; step <<= 1)
          sum_[i][j] += __shfl_xor_sync(~0u, sum_[i][j], step);
      if (owns(i) && lane_ < 4)
        ptx::store_shared_f2(shared_ + L::kSums + pair_ * L::kRows * 4 + row_offset(i), sum_[i][0],
                             sum_[i][1]);
    }
  }

  const VerifyMlaParams& p_;
  const uint32_t shared_;
  const int lane_, pair_, half_;
  const uint32_t exchange_;
  RingCursor<L::kSlots> ring_;
  int count_ = 0;     // tiles so far, of both pairs: tile n belongs to pair n % 2
  int segments_ = 0;  // finished
  uint32_t queries_[kSteps][RowGroups][2];
  float sum_[L::kOwned][2];  // this lane's part, relative to the reference of this pair's last tile
};

}  // namespace longleaf

// The softmax warps: the two halves of the scores to probabilities, masked and scaled.
//
// Warp w owns row groups w, w + 2, ... of every tile. The softmax is relative to a reference that
// follows the maximum lazily: it moves only when a score exceeds it by the headroom of the
// probabilities' type, so the common tile needs no maximum over tokens.
#pragma once

#include "longleaf/plan.cuh"
#include "longleaf/verify_mla_layout.cuh"

namespace longleaf {

constexpr float kNegInf = -__builtin_huge_valf();

template <int RowGroups, class Cache>
class SoftmaxWarp {
  using L = Layout<RowGroups, Cache>;
  // This lane's scores of the owned groups: rows 2t, 2t + 1 of token g, then of token g + 8.
  using Scores = float[L::kOwned][4];

 public:
  __device__ __forceinline__ SoftmaxWarp(const VerifyMlaParams& p, uint32_t shared, int warp,
                                         int lane)
      : p_(p), shared_(shared), warp_(warp), lane_(lane) {}

  __device__ __forceinline__ void run(const PlanStart& plan, int member) {
    Cursor<RowGroups> segment(p_, plan, member);
    for (int segments = 0; segment.next(); ++segments) {
#pragma unroll
      for (int i = 0; i < L::kOwned; ++i) {
        reference_[i][0] = reference_[i][1] = kNegInf;
        sum_[i][0] = sum_[i][1] = 0.f;
      }
      // Tiles that every row sees whole, then the prefix's last one and the tree's.
      const int whole = min(segment.end_tile, segment.item.prefix_tokens / kTileTokens);
      int tile = segment.first_tile;
      Scores s;
      for (; tile < whole; ++tile, ++count_) {
        take_scores(s);
        give_probs(s, false);
      }
      for (; tile < segment.end_tile; ++tile, ++count_) {
        take_scores(s);
#pragma unroll
        for (int i = 0; i < L::kOwned; ++i) mask(segment, tile, s[i], group(i));
        give_probs(s, true);
      }
      ptx::mbar_wait(shared_ + L::kStatsEmpty, (segments & 1) ^ 1);
      store_stats();
      __syncwarp();
      if (lane_ == 0) ptx::mbar_arrive(shared_ + L::kStatsFull);
    }
  }

 private:
  __device__ __forceinline__ int group(int i) const { return 2 * i + warp_; }
  // Of an odd number of groups the second warp owns one less.
  __device__ __forceinline__ bool owns(int i) const { return 2 * i + 1 < RowGroups || warp_ == 0; }
  // Where its scores and probabilities are; of a group that it does not own, the last group's.
  __device__ __forceinline__ uint32_t group_at(int i) const {
    return (2 * i + 1 < RowGroups ? group(i) : RowGroups - 1) * L::kGroupBytes;
  }
  __device__ __forceinline__ uint32_t first_half() const {
    return shared_ + L::kFirstHalf + (count_ & 1) * RowGroups * L::kGroupBytes;
  }

  __device__ __forceinline__ void take_scores(Scores& s) {
    ptx::mbar_wait(shared_ + L::kScoresFull + 8 * (count_ & 1), (count_ >> 1) & 1);
    const uint32_t first = first_half() + lane_ * 16, second = shared_ + L::kSecondHalf + lane_ * 16;
#pragma unroll
    for (int i = 0; i < L::kOwned; ++i) {
      const float4 a = ptx::load_shared_f4(first + group_at(i));
      const float4 b = ptx::load_shared_f4(second + group_at(i));
      s[i][0] = a.x + b.x;
      s[i][1] = a.y + b.y;
      s[i][2] = a.z + b.z;
      s[i][3] = a.w + b.w;
    }
    __syncwarp();
    if (lane_ == 0) ptx::mbar_arrive(shared_ + L::kSecondHalfEmpty + 8 * (count_ & 1));
  }

  // Hides what a row must not see: tokens past the prefix, and tree nodes that are no ancestors.
  __device__ __forceinline__ void mask(const Cursor<RowGroups>& segment, int tile, float (&s)[4],
                                       int group) const {
    const Item& item = segment.item;
    const bool is_tree = tile >= item.prefix_tiles;
    const int lane = ptx::recompute(lane_);  // runs for few tiles: nothing is kept for it
    const int first = (is_tree ? (tile - item.prefix_tiles) * Cache::kSlotRows : tile * kTileTokens) +
                      (lane >> 2);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = segment.first_row() + group * kRowsPerGroup + 2 * (lane & 3) + j;
      const int node = min(row / p_.heads, item.nodes - 1);
      uint64_t bits = 0;
      if (is_tree && p_.visible)
        bits = __ldg(p_.visible + static_cast<size_t>(item.first_token + node) * p_.visible_words +
                     (first >> 6));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = first + 8 * i;
        const bool sees = !is_tree              ? token < item.prefix_tokens
                          : token >= item.nodes || 8 * i >= Cache::kSlotRows ? false
                          : p_.visible          ? (bits >> (token & 63)) & 1
                                                : token <= node;
        if (!sees) s[2 * i + j] = kNegInf;
      }
    }
  }

  __device__ __forceinline__ void give_probs(Scores& s, bool masked) {
    Scores x;
    float highest = kNegInf;
#pragma unroll
    for (int i = 0; i < L::kOwned; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[i][e] = fmaf(s[i][e], p_.logit_scale, -reference_[i][e & 1]);
        if (owns(i)) highest = fmaxf(highest, x[i][e]);
      }
    // A reference of -inf makes any score exceed the headroom. Also orders the warp's reads of the
    // scores before its writes of the probabilities.
    const bool unusual = __any_sync(~0u, masked || highest > Cache::kHeadroom);
    bool moved = false;
    if (__builtin_expect(unusual, 0)) {
#pragma unroll
      for (int i = 0; i < L::kOwned; ++i) moved |= move_reference(s[i], x[i], i);
      moved = __any_sync(~0u, moved);
    }
    // 16 tokens x 8 rows a group, 16 bytes a token.
    const uint32_t to = first_half() + lane_ * 4;
#pragma unroll
    for (int i = 0; i < L::kOwned; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][e] = ptx::exp2_approx(x[i][e]);
      sum_[i][0] += x[i][0] + x[i][2];
      sum_[i][1] += x[i][1] + x[i][3];
      if (!owns(i)) continue;
      ptx::store_shared(to + group_at(i), Cache::pack(x[i][0], x[i][1]));
      ptx::store_shared(to + group_at(i) + 128, Cache::pack(x[i][2], x[i][3]));
    }
    if (lane_ == 0 && warp_ < RowGroups)
      ptx::store_shared(first_half() + warp_ * L::kGroupBytes + L::kMoved, moved);
    __syncwarp();
    if (lane_ == 0) ptx::mbar_arrive(shared_ + L::kProbsFull + 8 * (count_ & 1));
  }

  // Raises the reference of this lane's rows of owned group i if it must; x becomes the exponents
  // under the new one. Returns whether what was summed before must be rescaled.
  __device__ __forceinline__ bool move_reference(const float (&s)[4], float (&x)[4], int i) {
    bool moved = false;
    float factor[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float top = fmaxf(s[j], s[2 + j]);
#pragma unroll
      for (int step = 4; step < 32; step <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      top *= p_.logit_scale;
      const float old = reference_[i][j];
      const float next = top > old + Cache::kHeadroom ? top : old;
      // Under a reference of -inf nothing has been summed.
      const bool up = next > old && old != kNegInf;
      factor[j] = up ? ptx::exp2_approx(old - next) : 1.f;
      sum_[i][j] *= factor[j];
      reference_[i][j] = next;
      moved |= up && owns(i);
      const float base = next == kNegInf ? 0.f : next;
      x[j] = fmaf(s[j], p_.logit_scale, -base);
      x[2 + j] = fmaf(s[2 + j], p_.logit_scale, -base);
    }
    const int lane = ptx::recompute(lane_);
    if (owns(i) && lane < 4)
      ptx::store_shared_f2(
          shared_ + L::kRescale + ((count_ & 1) * L::kRows + group(i) * kRowsPerGroup) * 4 + lane * 8,
          factor[0], factor[1]);
    return moved;
  }

  // Reference and sum of every owned row of the segment.
  __device__ __forceinline__ void store_stats() {
    const int lane = ptx::recompute(lane_);
#pragma unroll
    for (int i = 0; i < L::kOwned; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int step = 4; step < 32; step <<= 1)
          sum_[i][j] += __shfl_xor_sync(~0u, sum_[i][j], step);
      if (!owns(i) || lane >= 4) continue;
      ptx::store_shared_f2(shared_ + L::kReference + group(i) * kRowsPerGroup * 4 + lane * 8,
                           reference_[i][0], reference_[i][1]);
      ptx::store_shared_f2(shared_ + L::kSum + group(i) * kRowsPerGroup * 4 + lane * 8, sum_[i][0],
                           sum_[i][1]);
    }
  }

  const VerifyMlaParams& p_;
  const uint32_t shared_;
  const int warp_, lane_;
  int count_ = 0;  // tiles so far
  float reference_[L::kOwned][2];
  float sum_[L::kOwned][2];  // this lane's part
};

}  // namespace longleaf

// Combining the partial outputs of one row tile, in the launch that made them.
//
// The blocks that hold splits of a row tile wait for each other (the launch is cooperative, so all
// of them run) and then combine one slice of the tile each, over the splits in a fixed order.
#pragma once

#include "longleaf/ptx.cuh"
#include "longleaf/verify_mla_params.h"

namespace longleaf {

constexpr int kMergeThreads = 256;  // of the score and value warps
constexpr int kMergeBarrier = 3;    // their named barrier
constexpr float kNoScore = -__builtin_huge_valf();

struct PendingMerge {
  int first_block;  // holds split 0; its counter is the row tile's
  int splits, split;
  int first_row;  // of out
  int rows;       // valid ones
  unsigned ticket;
};
struct PendingMerges {
  int count;
  PendingMerge merges[kPartialsPerBlock];
};

// Says that this block's part of a row tile is in memory. Every round of arrivals adds exactly 2^31
// to the counter: the top bit flips and the rest returns to 0, ready for the next launch.
__device__ __forceinline__ void announce(const VerifyMlaParams& p, PendingMerge& m) {
  m.ticket = ptx::add_acq_rel(p.counters + m.first_block,
                              m.split == 0 ? 0x80000000u - (m.splits - 1) : 1u);
}
// Waits until all parts are.
__device__ __forceinline__ void await(const VerifyMlaParams& p, const PendingMerge& m) {
  const unsigned* counter = p.counters + m.first_block;
  while (((ptx::load_acquire(counter) ^ m.ticket) & 0x80000000u) == 0) {
  }
}

__device__ __forceinline__ float natural_lse(float reference, float sum) {
  return sum > 0.f ? (reference + log2f(sum)) * 0.6931471805599453f : kNoScore;
}

// Running combination of rows 2t, 2t + 1 of a unit.
struct Combined {
  float reference[2] = {kNoScore, kNoScore};
  float sum[2] = {0.f, 0.f};
  float out[8] = {};  // even: first row, odd: second row

  // Makes the references the given ones, not lower than before.
  __device__ __forceinline__ void raise(float first, float second) {
    const float next[2] = {first, second};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float w = weight(reference[j], next[j]);
      reference[j] = next[j];
      sum[j] *= w;
#pragma unroll
      for (int i = 0; i < 4; ++i) out[2 * i + j] *= w;
    }
  }
  // Adds a split whose references are not higher. stats: reference and sum of the two rows.
  __device__ __forceinline__ void add(uint4 unit, float4 stats) {
    const float w[2] = {weight(stats.x, reference[0]), weight(stats.z, reference[1])};
    sum[0] += w[0] * stats.y;
    sum[1] += w[1] * stats.w;
    const uint32_t x[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * i] += w[0] * ptx::bf16_low(x[i]);
      out[2 * i + 1] += w[1] * ptx::bf16_high(x[i]);
    }
  }
  __device__ __forceinline__ void add(const Combined& other) {
    raise(fmaxf(reference[0], other.reference[0]), fmaxf(reference[1], other.reference[1]));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float w = weight(other.reference[j], reference[j]);
      sum[j] += w * other.sum[j];
#pragma unroll
      for (int i = 0; i < 4; ++i) out[2 * i + j] += w * other.out[2 * i + j];
    }
  }

 private:
  // A split in which the row sees nothing has reference -inf: its weight is exp2(-inf) = 0.
  __device__ static __forceinline__ float weight(float of, float top) {
    return ptx::exp2_approx(of - (top == kNoScore ? 0.f : top));
  }
};

template <int RowGroups, class Cache>
__device__ __forceinline__ void store_merged(const VerifyMlaParams& p, const PendingMerge& m,
                                             int unit, const Combined& c) {
  const int lane = unit & 31, columns = (unit >> 5) % (kLatentDim / 32) * 32;
  const int row = unit / kUnitsPerGroup * kRowsPerGroup + 2 * (lane & 3);
  // A fragment's two columns: g and g + 8 of bf16 tiles, 2g and 2g + 1 of e4m3 ones.
  const int at = Cache::kIsE4m3 ? 2 * (lane >> 2) : lane >> 2, step = Cache::kIsE4m3 ? 1 : 8;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (row + j >= m.rows) continue;
    const float scale = c.sum[j] > 0.f ? __fdividef(p.value_scale, c.sum[j]) : 0.f;
    uint16_t* to = p.out + static_cast<size_t>(m.first_row + row + j) * kLatentDim + columns + at;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      to[(i >> 1) * 16 + (i & 1) * step] =
          static_cast<uint16_t>(ptx::pack_bf16(c.out[2 * i + j] * scale, 0.f));
    if (p.lse && columns == 0 && at == 0)
      p.lse[m.first_row + row + j] = natural_lse(c.reference[j], c.sum[j]);
  }
}

// Combines slice `split` of the row tile; run by kMergeThreads threads. First all splits' parts of
// the slice come to shared memory at `scratch`; the code stays short, because every block runs it
// once, from a cold instruction cache.
template <int RowGroups, class Cache>
__device__ __forceinline__ void merge_slice(const VerifyMlaParams& p, const PendingMerge& m,
                                            uint32_t scratch, int thread) {
  constexpr int kUnits = RowGroups * kUnitsPerGroup, kRows = RowGroups * kRowsPerGroup;
  constexpr int kWarps = kMergeThreads / 32, kMaxParts = 16;
  const int begin = m.split * kUnits / m.splits, end = (m.split + 1) * kUnits / m.splits;
  const int units = end - begin;
  const int first_group = begin / kUnitsPerGroup;
  const int row_pairs = ((end - 1) / kUnitsPerGroup - first_group + 1) * (kRowsPerGroup / 2);
  const uint32_t stats = scratch + m.splits * units * 16;
  const uint32_t cells = stats + m.splits * row_pairs * 16;

  const int lane = thread % 32;
#pragma unroll 1
  for (int split = thread / 32; split < m.splits; split += kWarps) {
    // Split 0 lies in its block's second place, all others in their block's first.
    const size_t place =
        static_cast<size_t>(m.first_block + split * p.gang) * kPartialsPerBlock + (split == 0);
    const uint4* from = p.partials + place * kUnits + begin;
#pragma unroll 1
    for (int u = lane; u < units; u += 32) ptx::copy_16(scratch + (split * units + u) * 16, from + u);
    if (lane < row_pairs)
      ptx::copy_16(stats + (split * row_pairs + lane) * 16,
                   p.stats + place * kRows + first_group * kRowsPerGroup + 2 * lane);
  }
  ptx::wait_copies();
  ptx::named_barrier<kMergeThreads>(kMergeBarrier);

  // Small slices give several threads a part of the splits each.
  const int parts =
      units >= kMergeThreads ? 1 : min(min(kMergeThreads / units, kMaxParts), m.splits);
  const int part = parts == 1 ? 0 : thread / units;
#pragma unroll 1
  for (int first_unit = 0; first_unit < units; first_unit += kMergeThreads) {
    const int offset = parts == 1 ? first_unit + thread : thread % units;
    const bool works = offset < units && part < parts;
    const int unit = begin + min(offset, units - 1);
    Combined c;
    if (works) {
      const uint32_t pair_stats =
          stats + ((unit / kUnitsPerGroup - first_group) * (kRowsPerGroup / 2) + (unit & 3)) * 16;
      float top[2] = {kNoScore, kNoScore};
#pragma unroll 2
      for (int split = part; split < m.splits; split += parts) {
        const float4 x = ptx::load_shared_f4(pair_stats + split * row_pairs * 16);
        top[0] = fmaxf(top[0], x.x);
        top[1] = fmaxf(top[1], x.z);
      }
      c.raise(top[0], top[1]);
#pragma unroll 2
      for (int split = part; split < m.splits; split += parts)
        c.add(ptx::load_shared4(scratch + (split * units + offset) * 16),
              ptx::load_shared_f4(pair_stats + split * row_pairs * 16));
    }
    if (parts > 1) {
      auto cell = [&](int i, int t) { return cells + (i * kMergeThreads + t) * 4; };
      if (works && part > 0) {
#pragma unroll
        for (int i = 0; i < 8; ++i) ptx::store_shared(cell(i, thread), __float_as_uint(c.out[i]));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          ptx::store_shared(cell(8 + j, thread), __float_as_uint(c.sum[j]));
          ptx::store_shared(cell(10 + j, thread), __float_as_uint(c.reference[j]));
        }
      }
      ptx::named_barrier<kMergeThreads>(kMergeBarrier);
      if (works && part == 0) {
#pragma unroll 1
        for (int other = 1; other < parts; ++other) {
          const int from = other * units + thread;
          Combined o;
#pragma unroll
          for (int i = 0; i < 8; ++i) o.out[i] = __uint_as_float(ptx::load_shared(cell(i, from)));
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            o.sum[j] = __uint_as_float(ptx::load_shared(cell(8 + j, from)));
            o.reference[j] = __uint_as_float(ptx::load_shared(cell(10 + j, from)));
          }
          c.add(o);
        }
      }
    }
    if (works && part == 0) store_merged<RowGroups, Cache>(p, m, unit, c);
  }
}

// Finishes the block's merges; run by the score and value warps after their last tile.
template <int RowGroups, class Cache>
__device__ __forceinline__ void merge_pending(const VerifyMlaParams& p,
                                              const PendingMerges& pending, uint32_t scratch,
                                              int thread) {
  constexpr int kWaiter = kMergeThreads - 1;  // in a value warp: those write the list
  int i = 0;
  do {
    if (thread == kWaiter && i < pending.count) await(p, pending.merges[i]);
    ptx::named_barrier<kMergeThreads>(kMergeBarrier);
    if (i < pending.count) merge_slice<RowGroups, Cache>(p, pending.merges[i], scratch, thread);
  } while (++i < pending.count);
}

}  // namespace longleaf

// Combining the partial outputs of one row tile, in the launch that made them.
//
// The blocks that hold splits of a row tile wait for each other (the launch is cooperative, so all
// of them run) and then combine one slice of the tile each, over the splits in a fixed order.
#pragma once

#include "longleaf/ptx.cuh"
#include "longleaf/verify_mla_params.h"

namespace longleaf {

constexpr int kMergeThreads = 128;
constexpr int kMergeBarrier = 3;  // named barrier of the merging threads
constexpr float kNoScore = -__builtin_huge_valf();

struct PendingMerge {
  int first_block;  // holds split 0; its counter is the row tile's
  int splits, split;
  int first_row;  // of out
  int rows;       // valid ones
};

__device__ __forceinline__ float natural_lse(float reference, float sum) {
  return sum > 0.f ? (reference + log2f(sum)) * 0.6931471805599453f : kNoScore;
}

// Running combination of rows 2t, 2t + 1 of a unit.
struct Combined {
  float reference[2] = {kNoScore, kNoScore};
  float sum[2] = {0.f, 0.f};
  float out[8] = {};  // even: first row, odd: second row

  template <int N>
  __device__ __forceinline__ void add(const uint4 (&unit)[N], const float4 (&stats)[N]) {
    float top[2] = {reference[0], reference[1]};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      top[0] = fmaxf(top[0], stats[i].x);
      top[1] = fmaxf(top[1], stats[i].z);
    }
    rebase(top);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float w0 = weight(stats[i].x, top[0]), w1 = weight(stats[i].z, top[1]);
      sum[0] += w0 * stats[i].y;
      sum[1] += w1 * stats[i].w;
      const uint32_t x[4] = {unit[i].x, unit[i].y, unit[i].z, unit[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        out[2 * j] += w0 * ptx::bf16_low(x[j]);
        out[2 * j + 1] += w1 * ptx::bf16_high(x[j]);
      }
    }
  }
  __device__ __forceinline__ void add(const Combined& other) {
    const float top[2] = {fmaxf(reference[0], other.reference[0]),
                          fmaxf(reference[1], other.reference[1])};
    rebase(top);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float w = weight(other.reference[j], top[j]);
      sum[j] += w * other.sum[j];
#pragma unroll
      for (int i = 0; i < 4; ++i) out[2 * i + j] += w * other.out[2 * i + j];
    }
  }

 private:
  // A split in which the row sees nothing has reference -inf and weight 0.
  __device__ static __forceinline__ float weight(float of, float top) {
    return of == kNoScore ? 0.f : ptx::exp2_approx(of - top);
  }
  __device__ __forceinline__ void rebase(const float (&top)[2]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float w = weight(reference[j], top[j]);
      reference[j] = top[j];
      sum[j] *= w;
#pragma unroll
      for (int i = 0; i < 4; ++i) out[2 * i + j] *= w;
    }
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

// Combines slice `split` of the row tile; run by kMergeThreads threads with 32 bytes of scratch
// each. Small slices give several threads a part of the splits each.
template <int RowGroups, class Cache>
__device__ __forceinline__ void merge_slice(const VerifyMlaParams& p, const PendingMerge& m,
                                            uint32_t scratch, int thread) {
  constexpr int kUnits = RowGroups * kUnitsPerGroup, kRows = RowGroups * kRowsPerGroup;
  constexpr int kInFlight = 8;
  const int begin = m.split * kUnits / m.splits, end = (m.split + 1) * kUnits / m.splits;
  const int units = end - begin;
  const int parts = units >= kMergeThreads ? 1 : min(kMergeThreads / units, m.splits);
  const int part = parts == 1 ? 0 : thread / units;
  for (int base = 0; base < units; base += kMergeThreads) {
    const int offset = parts == 1 ? base + thread : thread % units;
    const bool works = offset < units && part < parts;
    const int unit = begin + min(offset, units - 1);
    const int row = unit / kUnitsPerGroup * kRowsPerGroup + 2 * (unit & 3);
    // Split 0 lies in its block's second place, all others in their block's first.
    auto place = [&](int split) {
      return (m.first_block + split * p.gang) * kPartialsPerBlock + (split == 0 ? 1 : 0);
    };
    Combined c;
    if (works) {
      for (int first = part; first < m.splits; first += parts * kInFlight) {
        uint4 unit_data[kInFlight];
        float4 stats[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          const int split = first + i * parts;
          const bool exists = split < m.splits;
          const size_t at = place(exists ? split : 0);
          unit_data[i] = exists ? __ldcg(p.partials + at * kUnits + unit) : make_uint4(0, 0, 0, 0);
          stats[i] = exists ? __ldcg(reinterpret_cast<const float4*>(p.stats + at * kRows + row))
                            : make_float4(kNoScore, 0.f, kNoScore, 0.f);
        }
        c.add(unit_data, stats);
      }
    }
    if (parts > 1) {
      // Twelve floats a thread: sums and outputs by column of threads.
      auto cell = [&](int i, int t) { return scratch + (i * kMergeThreads + t) * 4; };
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
      // The scratch may serve another merge.
      ptx::named_barrier<kMergeThreads>(kMergeBarrier);
    }
    if (works && part == 0) store_merged<RowGroups, Cache>(p, m, unit, c);
  }
}

}  // namespace longleaf

// One draw from the target's sampling distribution, as longleaf.ddtree.sampling defines it:
// temperature, top-k, top-p, min-p, then the inverse CDF by ascending token id. Weights are
// float32, sums deterministic, so the token can differ from the float64 definition only where
// the uniform falls within rounding of a border.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ranking.cuh"

namespace longleaf {

constexpr int kDrawThreads = 512;
constexpr float kGreedyBelow = 1e-6f;

struct Sampling {
  float temperature;
  float top_p;
  float min_p;
  int top_k;  // below 1: the whole vocabulary

  __device__ __forceinline__ bool greedy() const {
    return temperature < kGreedyBelow || top_k == 1;
  }
};

// One entry a request.
struct SamplingInput {
  const float* temperature;
  const float* top_p;
  const float* min_p;
  const int32_t* top_k;

  __device__ __forceinline__ Sampling of(int request) const {
    return {temperature[request], top_p[request], min_p[request], top_k[request]};
  }
};

struct DrawScratch {
  static constexpr int kWarps = kDrawThreads / 32;
  static constexpr int kListed = 2 * kDrawThreads;
  static constexpr int kBins = 2048;

  RankKey listed[kListed];  // the greatest keys, sorted
  uint32_t bins[kBins];
  RankKey warp_keys[kWarps];
  double warp_sums[kWarps];
  uint32_t count;
  int bin;
  int cut;
};

namespace draw {

// The row, and what a token weighs: exp((logit - peak) / temperature) in (0, 1].
template <typename Logit>
struct Weights {
  using Row = LogitRow<Logit, kDrawThreads>;
  const Row& row;
  float peak;
  float inverse_temperature;

  __device__ __forceinline__ float of(float logit) const {
    return logit == logit ? expf((logit - peak) * inverse_temperature) : 0.0f;
  }

  // Calls visit(logit, token) for every token; a thread's tokens ascend.
  template <typename Visit>
  __device__ __forceinline__ void each(Visit visit) const {
    constexpr int kItems = 16;
    for (int begin = 0; begin < row.vocabulary; begin += kItems * kDrawThreads) {
      float items[kItems];
      row.load(begin, threadIdx.x, items);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int token = Row::index(begin, threadIdx.x, i);
        if (token < row.vocabulary) visit(items[i], token);
      }
    }
  }
};

__device__ __forceinline__ double block_sum(double value, DrawScratch& s) {
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return warp_sum(lane < DrawScratch::kWarps ? s.warp_sums[lane] : 0.0);
}

__device__ __forceinline__ RankKey block_max(RankKey key, DrawScratch& s) {
  key = warp_max(key);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.warp_keys[threadIdx.x / 32] = key;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return warp_max(lane < DrawScratch::kWarps ? s.warp_keys[lane] : 0);
}

// Sorts s.listed descending.
__device__ inline void sort_listed(DrawScratch& s) {
#pragma unroll 1
  for (int size = 2; size <= DrawScratch::kListed; size *= 2) {
#pragma unroll 1
    for (int stride = size / 2; stride > 0; stride /= 2) {
      __syncthreads();
      const int at = 2 * static_cast<int>(threadIdx.x) - (threadIdx.x & (stride - 1));
      const RankKey low = s.listed[at];
      const RankKey high = s.listed[at + stride];
      if ((low < high) == ((at & size) == 0)) {
        s.listed[at] = high;
        s.listed[at + stride] = low;
      }
    }
  }
  __syncthreads();
}

// Fills s.listed with the greatest keys of the row, sorted, and returns how many they are: as
// many as fit, cut between bins of logits, so 0 if a bin alone is too full.
template <typename Logit>
__device__ int list_greatest(const Weights<Logit>& weights, DrawScratch& s) {
  constexpr float kBinsPerUnit = 64.0f;  // of logit / temperature below the peak
  const float scale = kBinsPerUnit * weights.inverse_temperature;
  const auto bin_of = [&](float logit) {
    const float at = (weights.peak - logit) * scale;
    return at < DrawScratch::kBins - 1 ? static_cast<int>(at) : DrawScratch::kBins - 1;
  };
  __syncthreads();
  for (int i = threadIdx.x; i < DrawScratch::kBins; i += kDrawThreads) s.bins[i] = 0;
  for (int i = threadIdx.x; i < DrawScratch::kListed; i += kDrawThreads) s.listed[i] = 0;
  if (threadIdx.x == 0) s.count = 0;
  __syncthreads();
  weights.each([&](float logit, int) { atomicAdd(&s.bins[bin_of(logit)], 1u); });
  __syncthreads();
  if (threadIdx.x < 32) {  // the first bin at which the list would overflow
    constexpr int kPerLane = DrawScratch::kBins / 32;
    uint32_t mine = 0;
    for (int i = 0; i < kPerLane; ++i) mine += s.bins[threadIdx.x * kPerLane + i];
    uint32_t before = mine;
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t lower = __shfl_up_sync(kFullWarp, before, offset);
      before += threadIdx.x >= static_cast<unsigned>(offset) ? lower : 0;
    }
    const unsigned full = __ballot_sync(kFullWarp, before > DrawScratch::kListed);
    const int lane = full == 0 ? 32 : __ffs(static_cast<int>(full)) - 1;
    if (lane == 32 && threadIdx.x == 0) s.bin = DrawScratch::kBins;
    if (lane == static_cast<int>(threadIdx.x)) {
      uint32_t held = before - mine;
      int bin = lane * kPerLane;
      while (held + s.bins[bin] <= DrawScratch::kListed) held += s.bins[bin++];
      s.bin = bin;
    }
  }
  __syncthreads();
  const int end = s.bin;
  weights.each([&](float logit, int token) {
    if (bin_of(logit) < end) s.listed[atomicAdd(&s.count, 1u)] = rank_key(logit, token);
  });
  __syncthreads();
  sort_listed(s);
  return static_cast<int>(s.count);
}

// Count or mass of the keys from `from` on: what ranking down to that key would keep.
template <typename Logit>
__device__ double kept(const Weights<Logit>& weights, RankKey from, bool mass, DrawScratch& s) {
  float sum = 0.0f;
  weights.each([&](float logit, int token) {
    if (rank_key(logit, token) >= from) sum += mass ? weights.of(logit) : 1.0f;
  });
  return block_sum(sum, s);
}

// The greatest key from which on `target` is kept, 0 if none is. One pass over the row for each
// bit of a value and of an index: for distributions too flat for the list.
template <typename Logit>
__device__ RankKey bisect(const Weights<Logit>& weights, bool mass, double target,
                          DrawScratch& s) {
  uint32_t low = 0;
  uint32_t high = ordered_bits(INFINITY);  // too few are kept: the peak is finite
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const bool enough = kept(weights, static_cast<RankKey>(middle) << 32, mass, s) >= target;
    (enough ? low : high) = middle;
  }
  // Of the tokens of that value, the lowest ids are kept: the smallest last one that is enough.
  int first = 0;
  int last = weights.row.vocabulary - 1;
  while (first < last) {
    const int middle = first + (last - first) / 2;
    const RankKey key = static_cast<RankKey>(low) << 32 | static_cast<uint32_t>(~middle);
    if (kept(weights, key, mass, s) >= target) {
      last = middle;
    } else {
      first = middle + 1;
    }
  }
  return low == 0 ? 0 : static_cast<RankKey>(low) << 32 | static_cast<uint32_t>(~first);
}

// The key from which on top-k and top-p keep tokens.
template <typename Logit>
__device__ RankKey smallest_kept(const Weights<Logit>& weights, const Sampling& sampling,
                                 DrawScratch& s) {
  const int vocabulary = weights.row.vocabulary;
  const bool all = sampling.top_k < 1 || sampling.top_k >= vocabulary;
  const int limit = all ? vocabulary : sampling.top_k;
  if (all && sampling.top_p >= 1.0f) return 0;
  const int listed = list_greatest(weights, s);
  RankKey floor = 0;
  if (!all) {
    floor = limit <= listed ? s.listed[limit - 1]
                            : bisect(weights, false, static_cast<double>(limit), s);
  }
  if (sampling.top_p >= 1.0f) return floor;

  // Cumulative mass of the list: two neighbours a thread, then its warp, then the block.
  const int at = 2 * static_cast<int>(threadIdx.x);
  const int end = limit < listed ? limit : listed;
  const float first = at < end ? weights.of(key_value(s.listed[at])) : 0.0f;
  const float second = at + 1 < end ? weights.of(key_value(s.listed[at + 1])) : 0.0f;
  float inclusive = first + second;
  for (int offset = 1; offset < 32; offset *= 2) {
    const float lower = __shfl_up_sync(kFullWarp, inclusive, offset);
    inclusive += threadIdx.x % 32 >= static_cast<unsigned>(offset) ? lower : 0.0f;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 31) s.warp_sums[threadIdx.x / 32] = inclusive;
  if (threadIdx.x == 0) s.cut = end;
  __syncthreads();
  double before = 0.0;
  double listed_mass = 0.0;
  for (unsigned w = 0; w < DrawScratch::kWarps; ++w) {
    if (w == threadIdx.x / 32) before = listed_mass;
    listed_mass += s.warp_sums[w];
  }
  __syncthreads();
  const double total = limit <= listed ? listed_mass : kept(weights, floor, true, s);
  const double target = static_cast<double>(sampling.top_p) * total;
  // The first token at which the mass reaches the target is the last one kept.
  const double through_second = before + inclusive;
  const double through_first = through_second - second;
  if (at < end && through_first >= target) {
    atomicMin(&s.cut, at);
  } else if (at + 1 < end && through_second >= target) {
    atomicMin(&s.cut, at + 1);
  }
  __syncthreads();
  if (s.cut < end) return s.listed[s.cut];
  if (limit <= listed) return floor;  // rounding alone: all that top-k left
  const RankKey flat = bisect(weights, true, target, s);
  return flat > floor ? flat : floor;
}

}  // namespace draw

// Called by all kDrawThreads threads of a block; every thread gets the token. A row whose greatest
// logit is not finite gives its argmax (NaN ranks as -inf).
template <typename Logit>
__device__ int64_t draw_token(const LogitRow<Logit, kDrawThreads>& row, const Sampling& sampling,
                              double uniform, DrawScratch& s) {
  draw::Weights<Logit> weights{row, 0.0f, 0.0f};
  RankKey best = 0;
  weights.each([&](float logit, int token) {
    const RankKey key = rank_key(logit, token);
    best = key > best ? key : best;
  });
  best = draw::block_max(best, s);
  weights.peak = key_value(best);
  if (sampling.greedy() || !(fabsf(weights.peak) < INFINITY)) return key_index(best);
  weights.inverse_temperature = 1.0f / sampling.temperature;
  const RankKey from = draw::smallest_kept(weights, sampling, s);

  // Inverse CDF: the part of the row that holds the target mass, its part, and so on down to one
  // token. Every warp sums one part.
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int first = 0;
  int length = row.vocabulary;
  double target = 0.0;
  for (bool whole = true; length > 1; whole = false) {
    const int part = (length + DrawScratch::kWarps - 1) / DrawScratch::kWarps;
    const int begin = first + warp * part;
    const int end = min(begin + part, first + length);
    float mass = 0.0f;
#pragma unroll 8
    for (int token = begin + lane; token < end; token += 32) {
      const float logit = to_float(row.data[token]);
      const float weight = weights.of(logit);
      if (rank_key(logit, token) >= from && weight >= sampling.min_p) mass += weight;
    }
    mass = warp_sum(mass);
    __syncthreads();
    if (lane == 0) s.warp_sums[warp] = mass;
    __syncthreads();
    // Every warp finds the same part.
    const double mine = lane < DrawScratch::kWarps ? s.warp_sums[lane] : 0.0;
    double inclusive = mine;
    for (int offset = 1; offset < 32; offset *= 2) {
      const double lower = __shfl_up_sync(kFullWarp, inclusive, offset);
      inclusive += lane >= offset ? lower : 0.0;
    }
    if (whole) target = uniform * __shfl_sync(kFullWarp, inclusive, 31);
    const unsigned beyond = __ballot_sync(kFullWarp, mine > 0.0 && inclusive > target);
    const unsigned massive = __ballot_sync(kFullWarp, mine > 0.0);
    // Where rounding leaves no part beyond the target, the last that has mass.
    const int pick = beyond != 0 ? __ffs(static_cast<int>(beyond)) - 1
                                 : 31 - __clz(static_cast<int>(massive));
    target -= __shfl_sync(kFullWarp, inclusive - mine, pick);
    const int stop = first + length;
    first += pick * part;
    length = min(part, stop - first);
  }
  return first;
}

}  // namespace longleaf

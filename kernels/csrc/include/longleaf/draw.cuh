// One draw from the target's sampling distribution, as longleaf.ddtree.sampling defines it:
// temperature, top-k, top-p, min-p, then the inverse CDF by ascending token id.
//
// A cluster of blocks shares a row, a slice each. Weights are float32 rounded to fixed point, so
// sums are integers: the same in any order and for any split. The token can differ from the
// float64 definition only where the uniform falls within rounding of a border.
#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "ranking.cuh"

namespace longleaf {

constexpr int kDrawThreads = 512;
constexpr int kDrawCluster = 8;
constexpr int kMaxDrawVocabulary = 1 << 22;  // the sum of so many weights fits in a Mass
constexpr float kGreedyBelow = 1e-6f;

using Mass = unsigned long long;
constexpr float kMassOfOne = 1099511627776.0f;  // 2^40: the most probable token's

// One entry a request. Read where needed: registers are few.
struct SamplingInput {
  const float* temperature;
  const float* top_p;
  const float* min_p;
  const int32_t* top_k;  // below 1: the whole vocabulary

  __device__ __forceinline__ bool greedy(int request) const {
    return temperature[request] < kGreedyBelow || top_k[request] == 1;
  }
};

struct DrawScratch {
  static constexpr int kWarps = kDrawThreads / 32;
  static constexpr int kLogBins = 10;
  static constexpr int kBins = 1 << kLogBins;

  // Histogram of the block's slice, an amount in two halves, and that of the whole row.
  uint32_t low[kBins];
  uint32_t high[kBins];
  uint32_t count[kBins];
  Mass row_amount[kBins];
  uint32_t row_count[kBins];
  RankKey warp_keys[kWarps];
  Mass warp_sums[kWarps];
  Mass part_mass[kWarps];
  RankKey block_key;  // for the other blocks to read, like block_mass
  Mass block_mass;
  Mass before;
  int bin;
  int token;

  // Shared memory adds 32 bits at a time.
  __device__ __forceinline__ void add(int bin, Mass amount, uint32_t tokens) {
    const uint32_t part = static_cast<uint32_t>(amount);
    const uint32_t sum = atomicAdd(&low[bin], part) + part;
    const uint32_t rest = static_cast<uint32_t>(amount >> 32) + (sum < part);
    if (rest != 0) atomicAdd(&high[bin], rest);
    atomicAdd(&count[bin], tokens);
  }
};

namespace draw {

__device__ __forceinline__ Mass warp_sum(Mass value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

// The sum over the threads up to this one; `total` becomes that over all of the block.
__device__ __forceinline__ Mass block_scan(Mass value, Mass& total, DrawScratch& s) {
  const int lane = threadIdx.x % 32;
  for (int offset = 1; offset < 32; offset *= 2) {
    const Mass lower = __shfl_up_sync(kFullWarp, value, offset);
    value += lane >= offset ? lower : 0;
  }
  __syncthreads();
  if (lane == 31) s.warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  total = 0;
  Mass before = 0;
#pragma unroll 4
  for (unsigned w = 0; w < DrawScratch::kWarps; ++w) {
    if (w == threadIdx.x / 32) before = total;
    total += s.warp_sums[w];
  }
  return before + value;
}

// This block's slice of the row, and what its tokens weigh: exp((logit - peak) / temperature).
template <typename Logit>
struct Slice {
  using Row = LogitRow<Logit, kDrawThreads>;

  Row row;  // ends where the slice does
  int begin;
  int index_bits;
  float peak;
  float inverse_temperature;

  __device__ __forceinline__ Slice(const Row& whole, int rank)
      : row(whole), peak(0.0f), inverse_temperature(0.0f) {
    constexpr int kGrain = kDrawCluster * 8;  // every slice starts on a whole vector
    const int length = (whole.vocabulary + kGrain - 1) / kGrain * 8;
    begin = min(rank * length, whole.vocabulary);
    row.vocabulary = min(begin + length, whole.vocabulary);
    index_bits = 32 - __clz(whole.vocabulary);
  }

  // A mass of 0 for NaN and -inf: fmaxf takes the number.
  __device__ __forceinline__ float weight(float logit) const {
    constexpr float kLog2E = 1.44269504f;
    return exp2f(fmaxf((peak - logit) * (-kLog2E * inverse_temperature), -126.0f));
  }
  static __device__ __forceinline__ Mass mass(float weight) {
    return __float2ull_rn(weight * kMassOfOne);
  }
  // Orders tokens as a RankKey does, in fewer bits.
  __device__ __forceinline__ RankKey key(float logit, int token) const {
    return (static_cast<RankKey>(ordered_bits(logit)) << index_bits) +
           ((1u << index_bits) - 1 - static_cast<uint32_t>(token));
  }
  // The logit of a key or of a bound between keys; -inf for those that no logit reaches.
  __device__ __forceinline__ float logit_of(RankKey key) const {
    const uint32_t bits = static_cast<uint32_t>(key >> index_bits);
    return bits < ordered_bits(-INFINITY) ? -INFINITY
                                          : key_value(static_cast<RankKey>(bits) << 32);
  }

  // Calls visit(logit, token) for every token of the slice; a thread's tokens ascend.
  template <int kItems, typename Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll 1
    for (int at = begin; at < row.vocabulary; at += kItems * kDrawThreads) {
      float items[kItems];
      row.load(at, threadIdx.x, items);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int token = Row::index(at, threadIdx.x, i);
        if (token < row.vocabulary) visit(items[i], token);
      }
    }
  }

  // Bins of equal width below the peak, the last one for all that lies further down.
  __device__ __forceinline__ int bin_of(float logit) const {
    constexpr float kBinsPerUnit = 64.0f;
    constexpr int kLast = DrawScratch::kBins - 1;
    const float at = (peak - logit) * (kBinsPerUnit * inverse_temperature);
    return at < kLast ? static_cast<int>(at) : kLast;
  }

  // The least ordered bits whose bin is at most `bin`; those past the peak's for -1.
  __device__ __forceinline__ uint32_t bin_floor(int bin) const {
    if (bin >= DrawScratch::kBins - 1) return 0;
    uint32_t outside = ordered_bits(-INFINITY);
    uint32_t inside = ordered_bits(peak);
    if (bin < 0) return inside + 1;
    while (inside - outside > 1) {
      const uint32_t middle = outside + (inside - outside) / 2;
      (bin_of(key_value(static_cast<RankKey>(middle) << 32)) <= bin ? inside : outside) = middle;
    }
    return inside;
  }
};

// The greatest RankKey of the row.
template <typename Logit>
__device__ __forceinline__ RankKey greatest(const Slice<Logit>& slice, DrawScratch& s) {
  float best = -INFINITY;
  int at = -1;
  slice.template each<16>([&](float logit, int token) {
    if (at < 0 || logit > best) {  // NaN is never greater
      best = logit == logit ? logit : -INFINITY;
      at = token;
    }
  });
  RankKey key = warp_max(at < 0 ? 0 : rank_key(best, at));
  if (threadIdx.x % 32 == 0) s.warp_keys[threadIdx.x / 32] = key;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  key = warp_max(lane < DrawScratch::kWarps ? s.warp_keys[lane] : 0);
  if (threadIdx.x == 0) s.block_key = key;
  const auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  return warp_max(lane < kDrawCluster ? *cluster.map_shared_rank(&s.block_key, lane) : 0);
}

// Adds up the blocks' histograms: each block a part of the bins, for all of them.
__device__ __forceinline__ void merge_bins(DrawScratch& s) {
  const auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  unsigned first = 0;
  asm volatile("" : "+r"(first));  // or the compiler keeps eight addresses all the time
  constexpr int kPart = DrawScratch::kBins / kDrawCluster;
  static_assert(kPart <= kDrawThreads, "a thread adds up at most one bin");
  if (threadIdx.x < kPart) {
    const int bin = static_cast<int>(cluster.block_rank()) * kPart + threadIdx.x;
    Mass amount = 0;
    uint32_t count = 0;
#pragma unroll 4
    for (int r = 0; r < kDrawCluster; ++r) {
      const DrawScratch& other = *cluster.map_shared_rank(&s, first + r);
      amount += (static_cast<Mass>(other.high[bin]) << 32) + other.low[bin];
      count += other.count[bin];
    }
#pragma unroll 4
    for (int r = 0; r < kDrawCluster; ++r) {
      DrawScratch& other = *cluster.map_shared_rank(&s, first + r);
      other.row_amount[bin] = amount;
      other.row_count[bin] = count;
    }
  }
  cluster.sync();
}

// How much of the row to keep, greatest tokens first.
struct Limit {
  bool by_mass;
  float share;  // by mass: of that of the tokens from `floor` on
  Mass tokens;   // otherwise
  RankKey floor;
};

// The key from which on the row's tokens are kept: those before it fall short of the limit.
// A histogram finds the bin that the limit falls into, then one of that bin, until it holds one
// token. The first is by logit, so that the next has few tokens left; the others split keys.
template <typename Logit>
__device__ RankKey first_kept(const Slice<Logit>& slice, const Limit& limit, DrawScratch& s) {
  RankKey low = 0;
  RankKey high = 0;
  int shift = 0;
  Mass target = limit.tokens;
#pragma unroll 1
  for (bool by_logit = true;; by_logit = false) {
    for (int i = threadIdx.x; i < DrawScratch::kBins; i += kDrawThreads) {
      s.low[i] = s.high[i] = s.count[i] = 0;
    }
    __syncthreads();
    const auto amount = [&](float logit) -> Mass {
      const Mass mass = slice.mass(slice.weight(logit));
      return limit.by_mass ? mass : 1;
    };
    if (by_logit) {
      Mass rest = 0;  // of the last bin, where most tokens are
      uint32_t rest_count = 0;
      slice.template each<8>([&](float logit, int token) {
        if (limit.floor != 0 && slice.key(logit, token) < limit.floor) return;
        const int bin = slice.bin_of(logit);
        const Mass mine = amount(logit);
        if (bin < DrawScratch::kBins - 1) {
          s.add(bin, mine, 1);
        } else {
          rest += mine;
          ++rest_count;
        }
      });
      rest = warp_sum(rest);
      rest_count = static_cast<uint32_t>(warp_sum(static_cast<Mass>(rest_count)));
      if (threadIdx.x % 32 == 0) s.add(DrawScratch::kBins - 1, rest, rest_count);
    } else {
      const float least = slice.logit_of(low);
      const float most = slice.logit_of(high);
      slice.template each<8>([&](float logit, int token) {
        if (logit < least || logit > most) return;  // not NaN
        const RankKey key = slice.key(logit, token);
        if (key >= low && key <= high) {
          s.add(static_cast<int>((high - key) >> shift), amount(logit), 1);
        }
      });
    }
    merge_bins(s);

    const int pair = 2 * static_cast<int>(threadIdx.x);
    static_assert(DrawScratch::kBins == 2 * kDrawThreads, "a thread looks at two bins");
    const Mass first = s.row_amount[pair];
    const Mass both = first + s.row_amount[pair + 1];
    Mass total;
    const Mass before = block_scan(both, total, s) - both;
    if (by_logit && limit.by_mass) {
      const double share = limit.share;
      target = static_cast<Mass>(ceil(share * static_cast<double>(total)));
      target = target == 0 ? 1 : target > total ? total : target;
    }
    if (before < target && target <= before + both) {
      const bool second = before + first < target;
      s.bin = pair + second;
      s.before = second ? before + first : before;
    }
    __syncthreads();
    const int bin = s.bin;
    target -= s.before;
    if (by_logit) {
      const uint32_t bits = slice.bin_floor(bin - static_cast<int>(threadIdx.x % 2));
      low = static_cast<RankKey>(__shfl_sync(kFullWarp, bits, 0)) << slice.index_bits;
      high = (static_cast<RankKey>(__shfl_sync(kFullWarp, bits, 1)) << slice.index_bits) - 1;
      low = low < limit.floor ? limit.floor : low;
    } else {
      high -= static_cast<RankKey>(bin) << shift;
      const RankKey width = (1ull << shift) - 1;
      low = high - low > width ? high - width : low;
    }
    if (s.row_count[bin] == 1 || low == high) return low;
    const int bits = 64 - __clzll(static_cast<long long>(high - low));
    shift = bits > DrawScratch::kLogBins ? bits - DrawScratch::kLogBins : 0;
  }
}

// The key from which on top-k and top-p keep tokens.
template <typename Logit>
__device__ __forceinline__ RankKey smallest_kept(const Slice<Logit>& slice, int vocabulary,
                                                 const SamplingInput& sampling, int request,
                                                 DrawScratch& s) {
  RankKey from = 0;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int top_k = sampling.top_k[request];
    const float top_p = sampling.top_p[request];
    const bool keeps_all = i == 0 ? top_k < 1 || top_k >= vocabulary : top_p >= 1.0f;
    if (keeps_all) continue;
    from = first_kept(slice, Limit{i == 1, top_p, static_cast<Mass>(top_k), from}, s);
  }
  return from;
}

// What a token adds to the sum that the uniform is held to. Tokens of the logit `least` are kept up
// to `last`.
template <typename Logit>
struct Kept {
  const Slice<Logit>& slice;
  float min_p;
  float least;
  int last;

  __device__ __forceinline__ Kept(const Slice<Logit>& of, RankKey from, float floor)
      : slice(of), min_p(floor), least(of.logit_of(from)) {
    const uint32_t bits = static_cast<uint32_t>(from >> of.index_bits);
    const RankKey ranks = (1ull << of.index_bits) - 1;
    // A bound need not be a logit: below -inf, or between the two zeros, which are one.
    const bool all = bits < ordered_bits(-INFINITY) || bits == ordered_bits(0.0f) - 1;
    last = static_cast<int>(all ? ranks : ranks - (from & ranks));
  }

  __device__ __forceinline__ Mass of(int token) const {
    const float logit = to_float(slice.row.data[token]);
    const float weight = slice.weight(logit);
    const bool kept = logit > least || (logit == least && token <= last);
    return kept && weight >= min_p ? slice.mass(weight) : 0;
  }
};

}  // namespace draw

// Called by all threads of a cluster of kDrawCluster blocks; every thread gets the token. A row
// whose greatest logit is not finite gives its argmax (NaN ranks as -inf).
template <typename Logit>
__device__ int64_t draw_token(const LogitRow<Logit, kDrawThreads>& row,
                              const SamplingInput& sampling, int request, const double* uniform,
                              DrawScratch& s) {
  const auto cluster = cooperative_groups::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank());
  draw::Slice<Logit> slice(row, rank);
  const RankKey best = draw::greatest(slice, s);
  if (threadIdx.x == 0) s.token = static_cast<int>(key_index(best));
  slice.peak = key_value(best);
  if (!sampling.greedy(request) && fabsf(slice.peak) < INFINITY) {
    slice.inverse_temperature = 1.0f / sampling.temperature[request];
    const RankKey from = draw::smallest_kept(slice, row.vocabulary, sampling, request, s);
    const draw::Kept<Logit> kept(slice, from, sampling.min_p[request]);

    // Inverse CDF: the block that holds the target, the warp's part, the thread's, the token.
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int length = slice.row.vocabulary - slice.begin;
    const int part = (length + DrawScratch::kWarps - 1) / DrawScratch::kWarps;
    const int first = slice.begin + warp * part;
    const int stop = min(first + part, slice.row.vocabulary);
    Mass mass = 0;
#pragma unroll 4
    for (int token = first + lane; token < stop; token += 32) mass += kept.of(token);
    mass = draw::warp_sum(mass);
    if (lane == 0) s.part_mass[warp] = mass;
    Mass total;
    draw::block_scan(lane == 0 ? mass : 0, total, s);
    if (threadIdx.x == 0) s.block_mass = total;
    cluster.sync();
    const Mass other = lane < kDrawCluster ? *cluster.map_shared_rank(&s.block_mass, lane) : 0;
    total = draw::warp_sum(other);
    const Mass before = draw::warp_sum(lane < rank ? other : 0);
    Mass target = static_cast<Mass>(*uniform * static_cast<double>(total));
    target = target < total ? target : total - 1;
    target -= before;  // wraps in the blocks behind the target
    if (target < s.block_mass) {
      int in = 0;
      while (target >= s.part_mass[in]) target -= s.part_mass[in++];
      const int begin = slice.begin + in * part;
      const int end = min(begin + part, slice.row.vocabulary);
      const int each = (end - begin + kDrawThreads - 1) / kDrawThreads;
      const int mine = min(begin + static_cast<int>(threadIdx.x) * each, end);
      const int next = min(mine + each, end);
      mass = 0;
      for (int token = mine; token < next; ++token) mass += kept.of(token);
      target -= draw::block_scan(mass, total, s) - mass;
      if (target < mass) {
        int token = mine;
        for (Mass at = kept.of(token); target >= at; at = kept.of(token)) {
          target -= at;
          ++token;
        }
        for (int r = 0; r < kDrawCluster; ++r) *cluster.map_shared_rank(&s.token, r) = token;
      }
    }
  }
  cluster.sync();  // the token is there, and nobody reads this block's memory any more
  return s.token;
}

}  // namespace longleaf

// One ranking, that of the numpy reference: value descending, equal values by lower index.
//
// A RankKey holds both in 64 bits, so that keys of one row are distinct and integer comparison
// is the ranking: ordered bits of the value above, complement of the index below. 0 is no key.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace longleaf {

using RankKey = unsigned long long;

constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

// Monotone in the value; -0 equals +0, and NaN ranks as -inf.
__device__ __forceinline__ uint32_t ordered_bits(float value) {
  const float canonical = value == value ? value + 0.0f : -INFINITY;
  const uint32_t bits = __float_as_uint(canonical);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ RankKey rank_key(float value, uint32_t index) {
  return static_cast<RankKey>(ordered_bits(value)) << 32 | static_cast<uint32_t>(~index);
}

__device__ __forceinline__ float key_value(RankKey key) {
  const uint32_t bits = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

__device__ __forceinline__ uint32_t key_index(RankKey key) {
  return ~static_cast<uint32_t>(key);
}

__device__ __forceinline__ RankKey warp_max(RankKey key) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const RankKey other = __shfl_xor_sync(kFullWarp, key, offset);
    key = other > key ? other : key;
  }
  return key;
}

__device__ __forceinline__ float warp_sum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

__device__ __forceinline__ double warp_sum(double value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

// One row of logits, read 16 bytes at a time where alignment allows. A block reads it in chunks:
// thread t's item i of a tile that starts at `begin` is token `index(begin, t, i)`.
template <typename Logit, int kThreads>
struct LogitRow {
  static constexpr int kVector = 16 / sizeof(Logit);

  const Logit* data;
  int vocabulary;
  bool aligned;  // base and every row start on 16 bytes, vocabulary a multiple of kVector

  static __device__ __forceinline__ int index(int begin, int thread, int item) {
    return begin + (item / kVector * kThreads + thread) * kVector + item % kVector;
  }

  // Items past the vocabulary become -inf; kItems must be a multiple of kVector.
  template <int kItems>
  __device__ __forceinline__ void load(int begin, int thread, float (&items)[kItems]) const {
    static_assert(kItems % kVector == 0, "a thread reads whole vectors");
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kItems; i += kVector) {
        const int at = index(begin, thread, i);
        const bool present = at < vocabulary;
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (present) raw = __ldg(reinterpret_cast<const uint4*>(data + at));
        const Logit* parts = reinterpret_cast<const Logit*>(&raw);
#pragma unroll
        for (int j = 0; j < kVector; ++j) items[i + j] = present ? to_float(parts[j]) : -INFINITY;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int at = index(begin, thread, i);
        items[i] = at < vocabulary ? to_float(data[at]) : -INFINITY;
      }
    }
  }
};

// The k greatest of a block's distinct keys, in order. Every thread holds kItems keys in
// registers (0 = none). Leaders are any keys among them, at least k unless there are fewer keys:
// the k-th greatest leader bounds the k-th greatest key from below, so few keys pass it.
template <int kThreads, int kMaxLeaders>
struct TopKeys {
  static constexpr int kCapacity = 1024;
  static constexpr int kWarps = kThreads / 32;

  RankKey leaders[kMaxLeaders];
  RankKey candidates[kCapacity];
  RankKey warp_best[kWarps];
  RankKey threshold;
  uint32_t count;

  // Writes top[0..k), greatest first, 0 where keys run out. `leaders` (a power of two, at most
  // kThreads) must be filled before; ends with a barrier.
  template <int kItems>
  __device__ void select(const RankKey (&keys)[kItems], int k, int leader_count, RankKey* top) {
    if (threadIdx.x == 0) {
      threshold = 1;
      count = 0;
    }
    __syncthreads();
    find_threshold(k, leader_count);
    __syncthreads();
    gather(keys);
    __syncthreads();
    const int found = static_cast<int>(count);
    if (found <= kCapacity) {
      rank_candidates(found, k, top);
      __syncthreads();
    } else {
      take_one_by_one(keys, k, top);
    }
  }

 private:
  __device__ void find_threshold(int k, int leader_count) {
    const int lanes = kThreads / leader_count;  // threads that share one leader
    const RankKey mine = leaders[threadIdx.x / lanes];
    const int greater = count_greater(leaders, leader_count, mine, lanes);
    if (mine != 0 && greater == k - 1 && threadIdx.x % lanes == 0) threshold = mine;
  }

  // How many of list[0..n) exceed `mine`, shared by `lanes` (1, 2, 4, …, 32) adjacent threads.
  static __device__ __forceinline__ int count_greater(const RankKey* list, int n, RankKey mine,
                                                      int lanes) {
    int greater = 0;
#pragma unroll 8
    for (int i = threadIdx.x % lanes; i < n; i += lanes) greater += list[i] > mine;
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      greater += __shfl_xor_sync(kFullWarp, greater, offset);
    }
    return greater;
  }

  template <int kItems>
  __device__ void gather(const RankKey (&keys)[kItems]) {
    const RankKey bound = threshold;
    int passing = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) passing += keys[i] >= bound;
    if (passing == 0) return;
    uint32_t at = atomicAdd(&count, static_cast<uint32_t>(passing));
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (keys[i] >= bound) {
        if (at < kCapacity) candidates[at] = keys[i];
        ++at;
      }
    }
  }

  __device__ void rank_candidates(int found, int k, RankKey* top) {
    int lanes = 1;
    while (lanes < 16 && found * lanes * 2 <= kThreads) lanes *= 2;
    const int step = kThreads / lanes;
    for (int first = 0; first < found; first += step) {  // uniform: whole warps shuffle
      const int i = first + static_cast<int>(threadIdx.x) / lanes;
      const RankKey mine = i < found ? candidates[i] : 0;
      const int rank = count_greater(candidates, found, mine, lanes);
      if (i < found && rank < k) top[rank] = mine;
    }
    for (int i = found + static_cast<int>(threadIdx.x); i < k; i += kThreads) top[i] = 0;
  }

  // For inputs built so that most keys pass the threshold: slow, and right for any keys.
  template <int kItems>
  __device__ void take_one_by_one(const RankKey (&keys)[kItems], int k, RankKey* top) {
    RankKey last = ~0ull;
    for (int taken = 0; taken < k; ++taken) {
      RankKey best = 0;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (keys[i] < last && keys[i] > best) best = keys[i];
      }
      best = warp_max(best);
      if (threadIdx.x % 32 == 0) warp_best[threadIdx.x / 32] = best;
      __syncthreads();
      for (int i = 0; i < kWarps; ++i) best = warp_best[i] > best ? warp_best[i] : best;
      if (threadIdx.x == 0) top[taken] = best;
      last = best;
      __syncthreads();
    }
  }
};

}  // namespace longleaf

// build_tree: logits to draft trees in one launch.
//
// Grid (tiles, depth, batch). A block ranks one tile of 8,192 logits; the last block of a row
// merges the row's tiles into its top k with log-probabilities; the last row of a request expands
// the tree. Sums run in an order that depends on the vocabulary alone, so a request gets the same
// tree in every batch, on every run.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "expand_tree.cuh"
#include "last_block.cuh"
#include "ranking.cuh"

namespace longleaf {

constexpr int kTreeThreads = 512;
constexpr int kTileItems = 16;
constexpr int kTile = kTreeThreads * kTileItems;
constexpr int kMaxTiles = 64;

struct BuildTreeParams {
  const void* logits;
  int64_t batch_stride;  // in elements, like depth_stride
  int64_t depth_stride;
  bool aligned;
  int vocabulary;
  int tiles;
  int width;  // k: candidates kept of each depth
  bool expand;
  ExpansionProblem problem;
  const int64_t* root_tokens;
  const int64_t* prefix_lens;
  uint32_t* row_counters;      // [batch * depth], zero between launches
  uint32_t* request_counters;  // [batch], likewise
  RankKey* tile_keys;          // [batch * depth, width, tiles]: rank-major
  float2* tile_sums;           // [batch * depth, tiles]: greatest logit, sum of exp(x - greatest)
  int64_t* top_tokens;         // [batch, depth, width]
  double* top_log_probs;       // [batch, depth, width]
  double* log_sum_exp;         // [batch, depth]
  TreeOutput output;
};

namespace build {

// As many leaders as the threshold needs to be tight: at least twice k.
__device__ __forceinline__ int leader_count(int k) { return k <= 64 ? 128 : 256; }

using Ranking = TopKeys<kTreeThreads, 256>;

struct Shared {
  union {
    struct {
      Ranking ranking;
      RankKey top[kMaxNodes];
      RankKey thread_best[kTreeThreads];
      float warp_sums[kTreeThreads / 32];
      double log_sum;
    };
    ExpansionState expansion;
  };
  bool last;
};

// Ranks this block's tile and writes its top k and its softmax sum.
template <typename Logit>
__device__ void rank_tile(const BuildTreeParams& p, int row, Shared& shared) {
  const int tile = blockIdx.x;
  const Logit* data = static_cast<const Logit*>(p.logits) + blockIdx.z * p.batch_stride +
                      blockIdx.y * p.depth_stride;
  const LogitRow<Logit, kTreeThreads> logits{data, p.vocabulary, p.aligned};
  float values[kTileItems];
  logits.load(tile * kTile, threadIdx.x, values);
  RankKey keys[kTileItems];
  RankKey best = 0;
#pragma unroll
  for (int i = 0; i < kTileItems; ++i) {
    const int token = logits.index(tile * kTile, threadIdx.x, i);
    keys[i] = token < p.vocabulary ? rank_key(values[i], token) : 0;
    best = keys[i] > best ? keys[i] : best;
  }
  // A leader is the best of threads that lie far apart, for high logits cluster by token id.
  const int leaders = leader_count(p.width);
  shared.thread_best[threadIdx.x] = best;
  __syncthreads();
  if (threadIdx.x < static_cast<unsigned>(leaders)) {
    for (int other = threadIdx.x + leaders; other < kTreeThreads; other += leaders) {
      const RankKey key = shared.thread_best[other];
      best = key > best ? key : best;
    }
    shared.ranking.leaders[threadIdx.x] = best;
  }
  shared.ranking.select(keys, p.width, leaders, shared.top);

  for (int r = threadIdx.x; r < p.width; r += kTreeThreads) {
    p.tile_keys[(static_cast<int64_t>(row) * p.width + r) * p.tiles + tile] = shared.top[r];
  }
  const float peak = key_value(shared.top[0]);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kTileItems; ++i) {
    if (keys[i] != 0 && peak > -INFINITY) sum += expf(key_value(keys[i]) - peak);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) shared.warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0.0f;
    for (int w = 0; w < kTreeThreads / 32; ++w) total += shared.warp_sums[w];
    p.tile_sums[static_cast<int64_t>(row) * p.tiles + tile] = make_float2(peak, total);
  }
}

// Merges a row's tiles: its top k tokens and their log-probabilities.
__device__ inline void finish_row(const BuildTreeParams& p, int row, Shared& shared) {
  const RankKey* tile_keys = p.tile_keys + static_cast<int64_t>(row) * p.width * p.tiles;
  const int present = p.width * p.tiles;
  constexpr int kItems = kMaxTiles * kMaxNodes / kTreeThreads;
  RankKey keys[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = i * kTreeThreads + threadIdx.x;
    keys[i] = at < present ? __ldcg(tile_keys + at) : 0;
  }
  // The first keys are the tiles' best: rank 0 of every tile, then rank 1, …
  const int leaders = leader_count(p.width);
  if (threadIdx.x < static_cast<unsigned>(leaders)) {
    shared.ranking.leaders[threadIdx.x] = keys[0];
  }
  shared.ranking.select(keys, p.width, leaders, shared.top);

  const float peak = key_value(shared.top[0]);
  if (threadIdx.x < 32) {
    double sum = 0.0;
    for (int tile = threadIdx.x; tile < p.tiles; tile += 32) {
      const float2 part = __ldcg(p.tile_sums + static_cast<int64_t>(row) * p.tiles + tile);
      if (part.x > -INFINITY) sum += static_cast<double>(part.y * expf(part.x - peak));
    }
    sum = warp_sum(sum);
    if (threadIdx.x == 0) shared.log_sum = log(sum);
  }
  __syncthreads();
  // A row without a finite maximum has no distribution: none of its tokens is possible.
  const bool valid = fabsf(peak) < INFINITY;
  for (int r = threadIdx.x; r < p.width; r += kTreeThreads) {
    const RankKey key = shared.top[r];
    const double shifted = static_cast<double>(key_value(key)) - static_cast<double>(peak);
    const int64_t at = static_cast<int64_t>(row) * p.width + r;
    p.top_tokens[at] = key_index(key);
    p.top_log_probs[at] = valid ? shifted - shared.log_sum : -INFINITY;
  }
  if (threadIdx.x == 0) {
    p.log_sum_exp[row] = valid ? static_cast<double>(peak) + shared.log_sum : -INFINITY;
  }
}

__device__ inline void grow_tree(const BuildTreeParams& p, int request, Shared& shared) {
  const int64_t first = static_cast<int64_t>(request) * p.problem.depth * p.width;
  shared.expansion.load<kTreeThreads>(p.problem, p.top_log_probs + first, p.width);
  __syncthreads();
  const int64_t prefix_len = p.prefix_lens == nullptr ? 0 : p.prefix_lens[request];
  expand_and_write<kTreeThreads>(p.problem, shared.expansion, p.top_tokens + first, p.width,
                                 p.root_tokens[request], prefix_len, request, p.output);
}

}  // namespace build

template <typename Logit>
__global__ void __launch_bounds__(kTreeThreads, 2) build_tree_kernel(const BuildTreeParams p) {
  __shared__ build::Shared shared;
  const int request = blockIdx.z;
  const int row = request * p.problem.depth + blockIdx.y;
  build::rank_tile<Logit>(p, row, shared);
  if (!last_block(p.row_counters + row, p.tiles, &shared.last)) return;
  build::finish_row(p, row, shared);
  if (!p.expand) return;
  if (!last_block(p.request_counters + request, p.problem.depth, &shared.last)) return;
  build::grow_tree(p, request, shared);
}

struct ExpandTreeParams {
  const int64_t* tokens;    // [batch, depth, stride]
  const double* log_probs;  // [batch, depth, stride]
  int stride;
  ExpansionProblem problem;
  const int64_t* root_tokens;
  const int64_t* prefix_lens;
  TreeOutput output;
};

constexpr int kExpandThreads = 128;

// Grid (batch): the expansion alone, from marginals.
__global__ void __launch_bounds__(kExpandThreads) expand_tree_kernel(const ExpandTreeParams p) {
  __shared__ ExpansionState state;
  const int request = blockIdx.x;
  const int64_t first = static_cast<int64_t>(request) * p.problem.depth * p.stride;
  state.load<kExpandThreads>(p.problem, p.log_probs + first, p.stride);
  __syncthreads();
  const int64_t prefix_len = p.prefix_lens == nullptr ? 0 : p.prefix_lens[request];
  expand_and_write<kExpandThreads>(p.problem, state, p.tokens + first, p.stride,
                                   p.root_tokens[request], prefix_len, request, p.output);
}

}  // namespace longleaf

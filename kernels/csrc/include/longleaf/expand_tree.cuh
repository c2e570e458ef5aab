// Best-first expansion: from sorted marginals to the tree, by one warp. Agrees bit for bit with
// the definition in longleaf.ddtree.build_tree; scores are kept as costs, -score, whose float64
// bits order like unsigned integers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ranking.cuh"

namespace longleaf {

constexpr int kMaxBudget = 127;
constexpr int kMaxNodes = kMaxBudget + 1;
constexpr int kMaxTreeDepth = 15;

// Where a tree goes; every pointer is that of request 0, rows of `nodes` = budget + 1 entries.
struct TreeOutput {
  int64_t* tokens;
  int32_t* parents;
  int32_t* depths;
  uint64_t* visible;  // [nodes, ceil(nodes / 64)]
  int64_t* positions;
  double* log_probs;
  int32_t* count;  // one a request
};

struct ExpansionProblem {
  int depth;
  int width;
  int budget;
  bool seed_chain;
};

// The tree under construction, in shared memory, with what its edges cost.
struct ExpansionState {
  // Step r of row d is the cost of taking rank r at depth d + 1, -log_prob. Two more columns and
  // rows are infinite, so that looking one step ahead needs no bounds.
  double steps[(kMaxTreeDepth + 2) * (kMaxBudget + 2)];
  double cost[kMaxNodes];
  uint32_t link[kMaxNodes];  // parent << 16 | index of the node's step
  int count;

  __device__ __forceinline__ int parent(int node) const {
    return static_cast<int>(link[node] >> 16);
  }
  __device__ __forceinline__ int step(int node) const {
    return static_cast<int>(link[node] & 0xffff);
  }

  // Called by all threads of a block of kThreads; log_probs: [depth, stride] of one request.
  template <int kThreads>
  __device__ void load(const ExpansionProblem& problem, const double* log_probs, int stride) {
    const int columns = problem.width + 2;
    for (int i = threadIdx.x; i < (problem.depth + 2) * columns; i += kThreads) {
      const int row = i / columns;
      const int rank = i % columns;
      const bool real = row < problem.depth && rank < problem.width;
      steps[i] = real ? fabs(__ldcg(log_probs + row * stride + rank)) : INFINITY;
    }
  }
};

namespace expansion {

constexpr uint64_t kNever = 0x7ff0000000000000ull;  // the bits of an infinite cost

__device__ __forceinline__ uint64_t cost_bits(double cost) {
  return static_cast<uint64_t>(__double_as_longlong(cost)) & 0x7fffffffffffffffull;
}
__device__ __forceinline__ double cost_of(uint64_t bits) {
  return __longlong_as_double(static_cast<long long>(bits));
}

// The only candidate that a node offers at a time: its next child, the lowest rank not in the
// tree. That is the same set of minimal candidates as a heap of first children and next siblings.
struct Offer {
  uint64_t cost;       // bits; kNever or more if there is no candidate
  double base;         // cost of the node itself
  int at;              // the candidate's step
  uint32_t order;      // depth of the node << 8 | node: settles equal costs
  double next_step;    // step after `at`
  double child_step;   // first step of the candidate's own children
  double next;         // cost of the offer after this one
  double child;        // cost of the candidate's first child

  // The steps to look ahead with: read at the end of a round, used late in the next one, since
  // every instruction between two pops is on the critical path.
  __device__ __forceinline__ void read_ahead(const double* steps, int columns) {
    next_step = steps[at + 1];
    child_step = steps[static_cast<int>(order >> 8) * columns + columns];
  }
  __device__ __forceinline__ void look_ahead() {
    next = base + next_step;
    child = cost_of(cost) + child_step;
  }
};

// The lane that holds the smallest (cost, order), where `least` is the smallest upper half.
__device__ __forceinline__ int cheapest_lane(uint64_t cost, uint32_t order, uint32_t least) {
  const uint32_t high = static_cast<uint32_t>(cost >> 32);
  unsigned holders = __ballot_sync(kFullWarp, high == least);
  if ((holders & (holders - 1)) != 0) {  // equal in the upper half: settle by the rest
    const uint32_t low = high == least ? static_cast<uint32_t>(cost) : 0xffffffffu;
    const uint32_t least_low = __reduce_min_sync(kFullWarp, low);
    const bool tied = high == least && low == least_low;
    const uint32_t first = __reduce_min_sync(kFullWarp, tied ? order : 0xffffffffu);
    holders = __ballot_sync(kFullWarp, tied && order == first);
  }
  return __ffs(static_cast<int>(holders)) - 1;
}

// Nodes 1.. are the rank-0 tokens of each depth, up to the first impossible one. Returns the
// count; rows past it may be written.
__device__ __forceinline__ int seed_chain(const ExpansionProblem& problem, int columns,
                                          ExpansionState& state) {
  const int spine = problem.depth < problem.budget ? problem.depth : problem.budget;
  double cost = 0.0;
  int count = 1;
  for (int d = 0; d < spine; ++d) {
    cost += state.steps[d * columns];
    count += cost_bits(cost) < kNever;
    if (threadIdx.x % 32 == 0) {
      state.cost[d + 1] = cost;
      state.link[d + 1] = static_cast<uint32_t>(d << 16 | d * columns);
    }
  }
  return count;
}

// Lane l of the warp keeps the offers of nodes l, l + 32, …; kSlots * 32 >= budget.
template <int kSlots>
__device__ void expand(const ExpansionProblem& problem, ExpansionState& state) {
  const int lane = threadIdx.x % 32;
  const int columns = problem.width + 2;
  if (lane == 0) state.cost[0] = 0.0;
  int count = problem.seed_chain ? seed_chain(problem, columns, state) : 1;
  __syncwarp();
  Offer offers[kSlots];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const int node = s * 32 + lane;
    const bool taken = node < count;  // so far a chain: node i has depth i and child i + 1
    const int depth = taken ? node : problem.depth;
    offers[s].base = taken ? state.cost[node] : INFINITY;
    offers[s].at = depth * columns + (node + 1 < count ? 1 : 0);
    offers[s].order = static_cast<uint32_t>(depth << 8 | node);
    offers[s].cost = cost_bits(offers[s].base + state.steps[offers[s].at]);
    offers[s].read_ahead(state.steps, columns);
  }
  while (count <= problem.budget) {
    int best = 0;
    uint64_t cost = offers[0].cost;
    uint32_t order = offers[0].order;
#pragma unroll
    for (int s = 1; s < kSlots; ++s) {
      const bool less = offers[s].cost < cost;
      const bool first = offers[s].cost == cost && offers[s].order < order;
      best = less || first ? s : best;
      cost = less ? offers[s].cost : cost;
      order = less || first ? offers[s].order : order;
    }
    const uint32_t least = __reduce_min_sync(kFullWarp, static_cast<uint32_t>(cost >> 32));
    double child = 0.0;
    int at = 0;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      offers[s].look_ahead();
      child = best == s ? offers[s].child : child;
      at = best == s ? offers[s].at : at;
    }
    if (least >= static_cast<uint32_t>(kNever >> 32)) break;
    const int winner = cheapest_lane(cost, order, least);
    if (lane == winner) {
      state.cost[count] = cost_of(cost);
      state.link[count] = (order & 0xff) << 16 | static_cast<uint32_t>(at);
    }
    cost = __shfl_sync(kFullWarp, cost, winner);
    child = __shfl_sync(kFullWarp, child, winner);
    order = __shfl_sync(kFullWarp, order, winner);
    const int parent = static_cast<int>(order & 0xff);
    const int depth = static_cast<int>(order >> 8) + 1;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int node = s * 32 + lane;
      const bool grown = node == parent;
      const bool born = node == count;
      Offer& offer = offers[s];
      offer.cost = born ? cost_bits(child) : grown ? cost_bits(offer.next) : offer.cost;
      offer.base = born ? cost_of(cost) : offer.base;
      offer.at = born ? depth * columns : offer.at + grown;
      offer.order = born ? static_cast<uint32_t>(depth << 8 | node) : offer.order;
      offer.read_ahead(state.steps, columns);
    }
    ++count;
  }
  if (lane == 0) state.count = count;
}

}  // namespace expansion

// Runs on a whole block of kThreads, with loaded and synchronised state in shared memory.
// candidate_tokens: [depth, stride] of this request.
template <int kThreads>
__device__ void expand_and_write(const ExpansionProblem& problem, ExpansionState& state,
                                 const int64_t* candidate_tokens, int stride, int64_t root_token,
                                 int64_t prefix_len, int request, const TreeOutput& output) {
  if (threadIdx.x < 32) {
    if (problem.budget <= 32) {
      expansion::expand<1>(problem, state);
    } else if (problem.budget <= 64) {
      expansion::expand<2>(problem, state);
    } else {
      expansion::expand<4>(problem, state);
    }
  }
  __syncthreads();
  const int rows = problem.budget + 1;
  const int words = (rows + 63) / 64;
  const int columns = problem.width + 2;
  const int count = state.count;
  for (int i = threadIdx.x; i < rows; i += kThreads) {
    // A row past the count is harmless to verify: the root's token at the root's position,
    // seeing itself alone, child of none.
    const bool drafted = i > 0 && i < count;
    const int step = drafted ? state.step(i) : 0;
    const int depth = drafted ? step / columns + 1 : 0;
    const int64_t at = static_cast<int64_t>(request) * rows + i;
    output.tokens[at] =
        drafted ? __ldcg(reinterpret_cast<const long long*>(candidate_tokens) +
                         (depth - 1) * stride + step % columns)
                : root_token;
    output.parents[at] = drafted ? state.parent(i) : -1;
    output.depths[at] = depth;
    output.positions[at] = prefix_len + depth;
    output.log_probs[at] = i < count ? 0.0 - state.cost[i] : -INFINITY;
    uint64_t low = 0;
    uint64_t high = 0;
    int node = i;
    for (int left = depth;; --left) {
      const uint64_t bit = 1ull << (node % 64);
      low |= node < 64 ? bit : 0;
      high |= node < 64 ? 0 : bit;
      if (left == 0) break;
      node = state.parent(node);
    }
    output.visible[at * words] = low;
    if (words > 1) output.visible[at * words + 1] = high;
  }
  if (threadIdx.x == 0) output.count[request] = count;
}

}  // namespace longleaf

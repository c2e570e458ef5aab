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

// Cost of taking rank r at depth d + 1, -log_prob, at steps[d * width + r].
struct ExpansionProblem {
  int depth;
  int width;
  int budget;
  bool seed_chain;
};

// The tree under construction, in shared memory.
struct TreeNodes {
  double cost[kMaxNodes];
  uint32_t link[kMaxNodes];  // parent << 16 | depth << 8 | rank
  int count;

  __device__ __forceinline__ void set(int node, double value, int parent, int depth, int rank) {
    cost[node] = value;
    link[node] = static_cast<uint32_t>(parent << 16 | depth << 8 | rank);
  }
  __device__ __forceinline__ int parent(int node) const { return link[node] >> 16; }
  __device__ __forceinline__ int depth(int node) const { return link[node] >> 8 & 0xff; }
  __device__ __forceinline__ int rank(int node) const { return link[node] & 0xff; }
};

namespace expansion {

constexpr uint64_t kNever = 0x7ff0000000000000ull;  // the bits of an infinite cost

__device__ __forceinline__ uint64_t cost_bits(double cost) {
  return static_cast<uint64_t>(__double_as_longlong(cost)) & 0x7fffffffffffffffull;
}

// The only candidate that a node offers at a time: its next child, the lowest rank not in the
// tree. That is the same set of minimal candidates as a heap of first children and next siblings.
struct Offer {
  uint64_t cost;  // bits, kNever if there is none
  double base;    // cost of the node itself
  int depth;      // of the node itself
  int rank;       // of the child offered

  // Sets node and rank where `changed`, without a branch.
  __device__ __forceinline__ void update(const ExpansionProblem& problem, const double* steps,
                                         bool changed, double new_base, int new_depth,
                                         int new_rank) {
    base = changed ? new_base : base;
    depth = changed ? new_depth : depth;
    rank = changed ? new_rank : rank;
    const bool open = changed && depth < problem.depth && rank < problem.width;
    const double step = open ? steps[depth * problem.width + rank] : INFINITY;
    cost = changed ? cost_bits(base + step) : cost;
  }
};

// The lane that holds the smallest (cost, depth, parent); `order` is depth << 8 | parent.
// All lanes of the warp call it; kNever everywhere gives -1.
__device__ __forceinline__ int cheapest_lane(uint64_t cost, uint32_t order) {
  const uint32_t high = static_cast<uint32_t>(cost >> 32);
  const uint32_t least = __reduce_min_sync(kFullWarp, high);
  if (least >= static_cast<uint32_t>(kNever >> 32)) return -1;
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

// Nodes 1.. are the rank-0 tokens of each depth, up to the first impossible one.
__device__ __forceinline__ int seed_chain(const ExpansionProblem& problem, const double* steps,
                                          TreeNodes& nodes) {
  const int lane = threadIdx.x % 32;
  const int spine = problem.depth < problem.budget ? problem.depth : problem.budget;
  double cost = 0.0;
  int count = 1;
  while (count <= spine) {
    cost += steps[(count - 1) * problem.width];
    if (cost_bits(cost) >= kNever) break;
    if (lane == 0) nodes.set(count, cost, count - 1, count, 0);
    ++count;
  }
  return count;
}

// Lane l of the warp keeps the offers of nodes l, l + 32, …; kSlots * 32 >= budget.
template <int kSlots>
__device__ void expand(const ExpansionProblem& problem, const double* steps, TreeNodes& nodes) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) nodes.set(0, 0.0, 0, 0, 0);
  int count = problem.seed_chain ? seed_chain(problem, steps, nodes) : 1;
  __syncwarp();
  Offer offers[kSlots];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const int node = s * 32 + lane;
    const bool taken = node < count;  // so far a chain: node i has depth i and child i + 1
    offers[s] = {kNever, 0.0, problem.depth, 0};
    offers[s].update(problem, steps, taken, taken ? nodes.cost[node] : 0.0, node,
                     node + 1 < count ? 1 : 0);
  }
  while (count <= problem.budget) {
    uint64_t cost = offers[0].cost;
    uint32_t order = static_cast<uint32_t>(offers[0].depth << 8 | lane);
#pragma unroll
    for (int s = 1; s < kSlots; ++s) {
      const uint32_t other = static_cast<uint32_t>(offers[s].depth << 8 | (s * 32 + lane));
      if (offers[s].cost < cost || (offers[s].cost == cost && other < order)) {
        cost = offers[s].cost;
        order = other;
      }
    }
    const int winner = cheapest_lane(cost, order);
    if (winner < 0) break;
    cost = __shfl_sync(kFullWarp, cost, winner);
    order = __shfl_sync(kFullWarp, order, winner);
    const int parent = static_cast<int>(order & 0xff);
    const int depth = static_cast<int>(order >> 8) + 1;
    const double base = __longlong_as_double(static_cast<long long>(cost));
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int node = s * 32 + lane;
      const bool grown = node == parent;
      const bool born = node == count;
      if (grown) nodes.set(count, base, parent, depth, offers[s].rank);
      offers[s].update(problem, steps, grown || born, born ? base : offers[s].base,
                       born ? depth : offers[s].depth, born ? 0 : offers[s].rank + 1);
    }
    ++count;
  }
  if (lane == 0) nodes.count = count;
}

}  // namespace expansion

// Runs on a whole block of kThreads; `steps` and `nodes` are shared memory, steps already written
// and synchronised. candidate_tokens: [depth, stride] of this request.
template <int kThreads>
__device__ void expand_and_write(const ExpansionProblem& problem, const double* steps,
                                 TreeNodes& nodes, const int64_t* candidate_tokens, int stride,
                                 int64_t root_token, int64_t prefix_len, int request,
                                 const TreeOutput& output) {
  if (threadIdx.x < 32) {
    if (problem.budget <= 32) {
      expansion::expand<1>(problem, steps, nodes);
    } else if (problem.budget <= 64) {
      expansion::expand<2>(problem, steps, nodes);
    } else {
      expansion::expand<4>(problem, steps, nodes);
    }
  }
  __syncthreads();
  const int rows = problem.budget + 1;
  const int words = (rows + 63) / 64;
  const int count = nodes.count;
  for (int i = threadIdx.x; i < rows; i += kThreads) {
    // A row past the count is harmless to verify: the root's token at the root's position,
    // seeing itself alone, child of none.
    const bool taken = i < count;
    const int depth = taken ? nodes.depth(i) : 0;
    const int64_t at = static_cast<int64_t>(request) * rows + i;
    output.tokens[at] =
        depth > 0 ? __ldcg(reinterpret_cast<const long long*>(candidate_tokens) +
                           (depth - 1) * stride + nodes.rank(i))
                  : root_token;
    output.parents[at] = depth > 0 ? nodes.parent(i) : -1;
    output.depths[at] = depth;
    output.positions[at] = prefix_len + depth;
    output.log_probs[at] = taken ? 0.0 - nodes.cost[i] : -INFINITY;
    uint64_t low = 0;
    uint64_t high = 0;
    int node = i;
    for (int left = depth;; --left) {
      const uint64_t bit = 1ull << (node % 64);
      low |= node < 64 ? bit : 0;
      high |= node < 64 ? 0 : bit;
      if (left == 0) break;
      node = nodes.parent(node);
    }
    output.visible[at * words] = low;
    if (words > 1) output.visible[at * words + 1] = high;
  }
  if (threadIdx.x == 0) output.count[request] = count;
}

}  // namespace longleaf

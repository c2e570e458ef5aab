// accept: walk the verified tree from the root along the target's own choices, as
// longleaf.ddtree.accept does.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "draw.cuh"
#include "expand_tree.cuh"
#include "last_block.cuh"
#include "ranking.cuh"

namespace longleaf {

// Trees of a batch, rows of `nodes`; a node past a tree's count has parent -1 and is unreachable.
struct TreeInput {
  const int64_t* tokens;
  const int32_t* parents;
  int nodes;  // at most kMaxNodes
};

// Rows of `max_path`; a walk stops after that many nodes. Unused entries of `path` become -1.
struct WalkOutput {
  int32_t* path;
  int32_t* path_len;
  int64_t* bonus;
  int max_path;
};

namespace walk {

// The tree of one request in the registers of one warp.
struct Nodes {
  static constexpr int kSlots = kMaxNodes / 32;
  int64_t tokens[kSlots];
  int32_t parents[kSlots];

  __device__ __forceinline__ Nodes(const TreeInput& tree, int request) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int node = s * 32 + threadIdx.x % 32;
      const bool present = node < tree.nodes;
      const int64_t at = static_cast<int64_t>(request) * tree.nodes + node;
      tokens[s] = present ? tree.tokens[at] : -1;
      parents[s] = present ? tree.parents[at] : -1;
    }
  }

  // The child of `node` that carries `token`, -1 if none does.
  __device__ __forceinline__ int child(int node, int64_t token) const {
    int found = -1;
#pragma unroll
    for (int s = kSlots - 1; s >= 0; --s) {
      const unsigned holders =
          __ballot_sync(kFullWarp, parents[s] == node && tokens[s] == token);
      if (holders != 0) found = s * 32 + __ffs(static_cast<int>(holders)) - 1;
    }
    return found;
  }
};

// Called by one whole warp with the target's token after `node`. Returns the child that carries it,
// written to entry `length` of the path, or -1 where the walk ends, and then the rest is written.
// Of several warps that walk alike, one writes.
__device__ __forceinline__ int advance(const Nodes& nodes, int node, int length, int64_t token,
                                        const WalkOutput& output, int request, bool writes) {
  const int child = length < output.max_path ? nodes.child(node, token) : -1;
  if (!writes) return child;
  const int64_t first = static_cast<int64_t>(request) * output.max_path;
  if (child >= 0) {
    if (threadIdx.x % 32 == 0) output.path[first + length] = child;
  } else {
    for (int i = length + threadIdx.x % 32; i < output.max_path; i += 32) {
      output.path[first + i] = -1;
    }
    if (threadIdx.x % 32 == 0) {
      output.path[first] = 0;
      output.path_len[request] = length;
      output.bonus[request] = token;
    }
  }
  return child;
}

// The whole walk by one warp, where the target's token of every node is known.
__device__ inline void along(const TreeInput& tree, const int64_t* target_tokens,
                             const WalkOutput& output, int request) {
  const Nodes nodes(tree, request);
  const long long* chosen = reinterpret_cast<const long long*>(target_tokens) +
                            static_cast<int64_t>(request) * tree.nodes;
  int node = 0;
  for (int length = 1; node >= 0; ++length) {
    node = advance(nodes, node, length, __ldcg(chosen + node), output, request, true);
  }
}

}  // namespace walk

// Grid (batch), one warp each. target_tokens: [batch, nodes], the target's argmax.
__global__ void __launch_bounds__(32)
    accept_greedy_kernel(const TreeInput tree, const int64_t* target_tokens,
                         const WalkOutput output) {
  walk::along(tree, target_tokens, output, blockIdx.x);
}

struct AcceptSampledParams {
  TreeInput tree;
  const int32_t* depths;  // [batch, nodes]
  const void* logits;     // [batch * nodes, vocabulary]
  int64_t row_stride;     // in elements
  bool aligned;
  int vocabulary;
  SamplingInput sampling;
  const double* uniforms;  // [batch, max_path]: by depth
  uint32_t* counters;      // [batch], zero between launches
  int64_t* drawn;          // [batch, nodes]
  WalkOutput output;
};

namespace walk {

template <typename Logit>
__device__ __forceinline__ int64_t draw_after(const AcceptSampledParams& p, int request, int node,
                                              int depth, DrawScratch& scratch) {
  const int64_t row = static_cast<int64_t>(request) * p.tree.nodes + node;
  const LogitRow<Logit, kDrawThreads> logits{
      static_cast<const Logit*>(p.logits) + row * p.row_stride, p.vocabulary, p.aligned};
  const double* uniform = p.uniforms + static_cast<int64_t>(request) * p.output.max_path + depth;
  return draw_token(logits, p.sampling, request, uniform, scratch);
}

}  // namespace walk

// Grid (kDrawCluster, batch): a cluster draws along the walk, at the visited nodes alone.
template <typename Logit>
__global__ void __cluster_dims__(kDrawCluster) __launch_bounds__(kDrawThreads, 2)
    accept_sampled_walk_kernel(const AcceptSampledParams p) {
  __shared__ DrawScratch scratch;
  __shared__ int next;
  const int request = blockIdx.y;
  int node = 0;
  for (int length = 1; node >= 0; ++length) {
    const int64_t token = walk::draw_after<Logit>(p, request, node, length - 1, scratch);
    if (threadIdx.x < 32) {
      const walk::Nodes nodes(p.tree, request);
      const int child = walk::advance(nodes, node, length, token, p.output, request,
                                      blockIdx.x == 0);
      if (threadIdx.x == 0) next = child;
    }
    __syncthreads();
    node = next;
    __syncthreads();
  }
}

// Grid (kDrawCluster, nodes, batch): a cluster draws the token of one node, visited or not, for a
// draw depends on the node alone; the last one of a request walks. Faster while nodes are few.
template <typename Logit>
__global__ void __cluster_dims__(kDrawCluster) __launch_bounds__(kDrawThreads, 2)
    accept_sampled_nodes_kernel(const AcceptSampledParams p) {
  __shared__ DrawScratch scratch;
  __shared__ bool last;
  const int node = blockIdx.y;
  const int request = blockIdx.z;
  const int64_t at = static_cast<int64_t>(request) * p.tree.nodes + node;
  const int depth = p.depths[at];
  const bool reachable = node == 0 || p.tree.parents[at] >= 0;
  if (reachable && depth >= 0 && depth < p.output.max_path) {  // the same for the whole cluster
    const int64_t token = walk::draw_after<Logit>(p, request, node, depth, scratch);
    if (blockIdx.x == 0 && threadIdx.x == 0) p.drawn[at] = token;
  }
  if (blockIdx.x != 0 || !last_block(p.counters + request, p.tree.nodes, &last)) return;
  if (threadIdx.x < 32) walk::along(p.tree, p.drawn, p.output, request);
}

}  // namespace longleaf

#include "tree_capi.h"

#include <cuda_runtime.h>

#include <cstring>

#include "longleaf/accept.cuh"
#include "longleaf/build_tree.cuh"
#include "longleaf/launch.cuh"

namespace {

using longleaf::RankKey;

// Counters come first and have the same place for every shape, so that launches of different
// shapes can share a workspace.
constexpr int kMaxBatch = 256;
constexpr size_t kRowCounters = kMaxBatch * longleaf::kMaxTreeDepth;
constexpr size_t kCounterBytes = (kRowCounters + kMaxBatch) * sizeof(uint32_t);

int tiles_of(int vocabulary) { return (vocabulary - 1) / longleaf::kTile + 1; }

bool takes_marginals(int batch, int depth, int vocabulary, int width) {
  return batch >= 0 && batch <= kMaxBatch && depth > 0 && depth <= longleaf::kMaxTreeDepth &&
         vocabulary > 0 && tiles_of(vocabulary) <= longleaf::kMaxTiles && width > 0 &&
         width <= longleaf::kMaxBudget && width <= vocabulary;
}

bool takes_walk(const longleaf_walk& walk) {
  const bool sizes = walk.batch >= 0 && walk.batch <= kMaxBatch && walk.nodes > 0 &&
                     walk.nodes <= longleaf::kMaxNodes && walk.max_path > 0;
  return sizes && (walk.batch == 0 || (walk.tokens && walk.parents && walk.path && walk.path_len &&
                                       walk.bonus));
}

bool takes_output(const longleaf_tree_output& output) {
  return output.tokens && output.parents && output.depths && output.visible && output.positions &&
         output.log_probs && output.count;
}

size_t element_bytes(int logits_type) { return logits_type == LONGLEAF_FLOAT32 ? 4 : 2; }

bool aligned_rows(const void* logits, int logits_type, int vocabulary, int64_t stride_bits) {
  const uintptr_t vector = 16 / element_bytes(logits_type);
  return reinterpret_cast<uintptr_t>(logits) % 16 == 0 && stride_bits % vector == 0 &&
         vocabulary % vector == 0;
}

longleaf::TreeOutput tree_output(const longleaf_tree_output& output) {
  return {output.tokens,    output.parents,   output.depths, output.visible,
          output.positions, output.log_probs, output.count};
}

longleaf::WalkOutput walk_output(const longleaf_walk& walk) {
  return {walk.path, walk.path_len, walk.bonus, walk.max_path};
}

}  // namespace

size_t longleaf_build_tree_workspace(int batch, int depth, int vocabulary, int width) {
  if (!takes_marginals(batch, depth, vocabulary, width)) return 0;
  const size_t rows = static_cast<size_t>(batch) * depth;
  return kCounterBytes +
         rows * tiles_of(vocabulary) * (width * sizeof(RankKey) + sizeof(float2));
}

int longleaf_build_tree(const longleaf_build_tree_args* args, void* stream) {
  if (!args) return LONGLEAF_BAD_ARGUMENT;
  const size_t needed =
      longleaf_build_tree_workspace(args->batch, args->depth, args->vocabulary, args->width);
  const bool grows = args->budget >= 0;
  const bool known_type =
      args->logits_type == LONGLEAF_FLOAT32 || args->logits_type == LONGLEAF_BFLOAT16;
  const int wanted = args->budget < args->vocabulary ? args->budget : args->vocabulary;
  if (needed == 0 || args->workspace_bytes < needed || !known_type ||
      args->budget > longleaf::kMaxBudget || (grows && args->width < wanted)) {
    return LONGLEAF_BAD_ARGUMENT;
  }
  if (args->batch == 0) return LONGLEAF_OK;
  if (!args->logits || !args->workspace || !args->top_tokens || !args->top_log_probs ||
      !args->log_sum_exp ||
      (grows && (!args->root_tokens || !takes_output(args->output)))) {
    return LONGLEAF_BAD_ARGUMENT;
  }
  char* workspace = static_cast<char*>(args->workspace);
  longleaf::BuildTreeParams p{};
  p.logits = args->logits;
  p.batch_stride = args->batch_stride;
  p.depth_stride = args->depth_stride;
  p.aligned = aligned_rows(args->logits, args->logits_type, args->vocabulary,
                           args->batch_stride | args->depth_stride);
  p.vocabulary = args->vocabulary;
  p.tiles = tiles_of(args->vocabulary);
  p.width = args->width;
  p.expand = grows;
  p.problem = {args->depth, args->width, args->budget, args->seed_chain != 0};
  p.root_tokens = args->root_tokens;
  p.prefix_lens = args->prefix_lens;
  p.row_counters = reinterpret_cast<uint32_t*>(workspace);
  p.request_counters = p.row_counters + kRowCounters;
  p.tile_keys = reinterpret_cast<RankKey*>(workspace + kCounterBytes);
  const size_t rows = static_cast<size_t>(args->batch) * args->depth;
  p.tile_sums = reinterpret_cast<float2*>(p.tile_keys + rows * p.tiles * p.width);
  p.top_tokens = args->top_tokens;
  p.top_log_probs = args->top_log_probs;
  p.log_sum_exp = args->log_sum_exp;
  p.output = tree_output(args->output);
  const dim3 grid(p.tiles, args->depth, args->batch);
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (args->logits_type == LONGLEAF_FLOAT32) {
    LONGLEAF_LAUNCH(longleaf::build_tree_kernel<float>, grid, longleaf::kTreeThreads, on, p);
  } else {
    LONGLEAF_LAUNCH(longleaf::build_tree_kernel<__nv_bfloat16>, grid, longleaf::kTreeThreads, on,
                    p);
  }
  return cudaGetLastError();
}

int longleaf_expand_tree(const longleaf_expand_tree_args* args, void* stream) {
  if (!args || args->batch < 0 || args->batch > kMaxBatch || args->depth <= 0 ||
      args->depth > longleaf::kMaxTreeDepth || args->width <= 0 || args->budget < 0 ||
      args->budget > longleaf::kMaxBudget) {
    return LONGLEAF_BAD_ARGUMENT;
  }
  if (args->batch == 0) return LONGLEAF_OK;
  if (!args->tokens || !args->log_probs || !args->root_tokens || !takes_output(args->output)) {
    return LONGLEAF_BAD_ARGUMENT;
  }
  longleaf::ExpandTreeParams p{};
  p.tokens = args->tokens;
  p.log_probs = args->log_probs;
  p.stride = args->width;
  // No node's rank reaches the budget: its siblings of lower rank are in the tree.
  const int useful = args->budget > 0 ? args->budget : 1;
  p.problem = {args->depth, args->width < useful ? args->width : useful, args->budget,
               args->seed_chain != 0};
  p.root_tokens = args->root_tokens;
  p.prefix_lens = args->prefix_lens;
  p.output = tree_output(args->output);
  LONGLEAF_LAUNCH(longleaf::expand_tree_kernel, dim3(args->batch), longleaf::kExpandThreads,
                  static_cast<cudaStream_t>(stream), p);
  return cudaGetLastError();
}

int longleaf_accept_greedy(const longleaf_walk* walk, const int64_t* target_tokens,
                           void* stream) {
  if (!walk || !takes_walk(*walk)) return LONGLEAF_BAD_ARGUMENT;
  if (walk->batch == 0) return LONGLEAF_OK;
  if (!target_tokens) return LONGLEAF_BAD_ARGUMENT;
  const longleaf::TreeInput tree{walk->tokens, walk->parents, walk->nodes};
  LONGLEAF_LAUNCH(longleaf::accept_greedy_kernel, dim3(walk->batch), 32,
                  static_cast<cudaStream_t>(stream), tree, target_tokens, walk_output(*walk));
  return cudaGetLastError();
}

size_t longleaf_accept_sampled_workspace(int batch, int nodes) {
  if (batch < 0 || batch > kMaxBatch || nodes <= 0 || nodes > longleaf::kMaxNodes) return 0;
  return kCounterBytes + static_cast<size_t>(batch) * nodes * sizeof(int64_t);
}

int longleaf_accept_sampled(const longleaf_accept_sampled_args* args, void* stream) {
  if (!args) return LONGLEAF_BAD_ARGUMENT;
  const longleaf_walk& walk = args->walk;
  const size_t needed = longleaf_accept_sampled_workspace(walk.batch, walk.nodes);
  const bool known_type =
      args->logits_type == LONGLEAF_FLOAT32 || args->logits_type == LONGLEAF_BFLOAT16;
  if (!takes_walk(walk) || args->workspace_bytes < needed || args->vocabulary <= 0 ||
      args->vocabulary > longleaf::kMaxDrawVocabulary || !known_type) {
    return LONGLEAF_BAD_ARGUMENT;
  }
  if (walk.batch == 0) return LONGLEAF_OK;
  if (!args->depths || !args->logits || !args->temperature || !args->top_p || !args->min_p ||
      !args->top_k || !args->uniforms || !args->workspace) {
    return LONGLEAF_BAD_ARGUMENT;
  }
  char* workspace = static_cast<char*>(args->workspace);
  longleaf::AcceptSampledParams p{};
  p.tree = {walk.tokens, walk.parents, walk.nodes};
  p.depths = args->depths;
  p.logits = args->logits;
  p.row_stride = args->row_stride;
  p.aligned =
      aligned_rows(args->logits, args->logits_type, args->vocabulary, args->row_stride);
  p.vocabulary = args->vocabulary;
  p.sampling = {args->temperature, args->top_p, args->min_p, args->top_k};
  p.uniforms = args->uniforms;
  p.counters = reinterpret_cast<uint32_t*>(workspace);
  p.drawn = reinterpret_cast<int64_t*>(workspace + kCounterBytes);
  p.output = walk_output(walk);
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  const bool wide = args->logits_type == LONGLEAF_FLOAT32;
  constexpr int cluster = longleaf::kDrawCluster;
  constexpr int threads = longleaf::kDrawThreads;
  const dim3 nodes(cluster, walk.nodes, walk.batch);
  const dim3 walks(cluster, walk.batch);
  if (args->every_node && wide) {
    LONGLEAF_LAUNCH_CLUSTERS(cluster, longleaf::accept_sampled_nodes_kernel<float>, nodes, threads,
                             on, p);
  } else if (args->every_node) {
    LONGLEAF_LAUNCH_CLUSTERS(cluster, longleaf::accept_sampled_nodes_kernel<__nv_bfloat16>, nodes,
                             threads, on, p);
  } else if (wide) {
    LONGLEAF_LAUNCH_CLUSTERS(cluster, longleaf::accept_sampled_walk_kernel<float>, walks, threads,
                             on, p);
  } else {
    LONGLEAF_LAUNCH_CLUSTERS(cluster, longleaf::accept_sampled_walk_kernel<__nv_bfloat16>, walks,
                             threads, on, p);
  }
  return cudaGetLastError();
}

/* C ABI of build_tree, expand_tree and accept. See capi.h for the conventions.
 *
 * Workspaces must be zero before their first use and are zero where it matters after every
 * launch; one workspace serves one launch at a time. The *_workspace functions give the bytes
 * needed, or 0 for sizes that no kernel takes.
 */
#ifndef LONGLEAF_TREE_CAPI_H
#define LONGLEAF_TREE_CAPI_H

#include <stddef.h>
#include <stdint.h>

#include "capi.h"

enum longleaf_logits { LONGLEAF_FLOAT32 = 0, LONGLEAF_BFLOAT16 = 1 };

/* A tree a request, rows of budget + 1 nodes. visible: [batch, nodes, ceil(nodes / 64)]. */
struct longleaf_tree_output {
  int64_t* tokens;
  int32_t* parents;
  int32_t* depths;
  uint64_t* visible;
  int64_t* positions;
  double* log_probs;
  int32_t* count; /* [batch] */
};

struct longleaf_build_tree_args {
  const void* logits; /* [batch, depth, vocabulary], last dimension contiguous */
  int32_t logits_type;
  int32_t batch;
  int32_t depth;
  int32_t vocabulary;
  int64_t batch_stride;
  int64_t depth_stride;
  int32_t width;  /* candidates kept of each depth: at least budget where a tree is grown */
  int32_t budget; /* -1: marginals alone, no tree */
  int32_t seed_chain;
  int32_t reserved;
  const int64_t* root_tokens; /* [batch] */
  const int64_t* prefix_lens; /* [batch], or NULL for zeros */
  void* workspace;
  size_t workspace_bytes;
  int64_t* top_tokens;   /* [batch, depth, width] */
  double* top_log_probs; /* [batch, depth, width] */
  double* log_sum_exp;   /* [batch, depth] */
  struct longleaf_tree_output output;
};

LONGLEAF_API size_t longleaf_build_tree_workspace(int batch, int depth, int vocabulary, int width);
LONGLEAF_API int longleaf_build_tree(const struct longleaf_build_tree_args* args, void* stream);

struct longleaf_expand_tree_args {
  const int64_t* tokens;   /* [batch, depth, width], rows as ddtree.build_tree takes them */
  const double* log_probs; /* likewise */
  int32_t batch;
  int32_t depth;
  int32_t width;
  int32_t budget;
  int32_t seed_chain;
  int32_t reserved;
  const int64_t* root_tokens;
  const int64_t* prefix_lens;
  struct longleaf_tree_output output;
};

LONGLEAF_API int longleaf_expand_tree(const struct longleaf_expand_tree_args* args, void* stream);

/* parents: -1 for the root and for nodes past a tree's count. */
struct longleaf_walk {
  const int64_t* tokens; /* [batch, nodes] */
  const int32_t* parents;
  int32_t batch;
  int32_t nodes;
  int32_t max_path;
  int32_t reserved;
  int32_t* path; /* [batch, max_path] */
  int32_t* path_len;
  int64_t* bonus;
};

LONGLEAF_API int longleaf_accept_greedy(const struct longleaf_walk* walk,
                                        const int64_t* target_tokens, void* stream);

struct longleaf_accept_sampled_args {
  struct longleaf_walk walk;
  const int32_t* depths; /* [batch, nodes] */
  const void* logits;    /* [batch * nodes, vocabulary], last dimension contiguous */
  int32_t logits_type;
  int32_t vocabulary;
  int64_t row_stride;
  const float* temperature; /* [batch], like top_p, min_p and top_k */
  const float* top_p;
  const float* min_p;
  const int32_t* top_k;
  const double* uniforms; /* [batch, max_path] */
  int32_t every_node;     /* draw at every node at once, not along the walk: for small batches */
  int32_t reserved;
  void* workspace;
  size_t workspace_bytes;
};

LONGLEAF_API size_t longleaf_accept_sampled_workspace(int batch, int nodes);
LONGLEAF_API int longleaf_accept_sampled(const struct longleaf_accept_sampled_args* args,
                                         void* stream);

#endif

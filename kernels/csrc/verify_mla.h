/* Verify attention over an MLA cache. See longleaf_kernels/verify.py for the operator on top. */
#ifndef LONGLEAF_VERIFY_MLA_H
#define LONGLEAF_VERIFY_MLA_H

#include <stddef.h>
#include <stdint.h>

#include "capi.h"

/* All tensors are contiguous and 16-byte aligned, on the current device. */
typedef struct longleaf_verify_mla_args {
  const void* q;              /* bf16 [tokens, heads, 576] */
  const void* kv_pool;        /* bf16 or e4m3 [slots, 576], or [pages, 64, 576] */
  const int32_t* kv_indptr;   /* [batch + 1]: prefix tokens of the requests, summed up */
  const void* kv_indices;     /* int32 or int64: a slot for each prefix token, or page numbers */
  const int32_t* page_indptr; /* [batch + 1]: where a request's pages start in kv_indices; pages only */
  const void* tree_kv;        /* bf16 [tokens, 576]: this step's rows */
  const void* visible;        /* uint64 [tokens, ceil(nodes / 64)], bit j: sees the request's token j;
                                 null: causal */
  const int32_t* q_indptr;    /* [batch + 1]; null: every request has `nodes` tokens */
  void* out;                  /* bf16 [tokens, heads, 512] */
  float* lse;                 /* fp32 [tokens, heads], natural logarithm; may be null */
  void* workspace;            /* longleaf_verify_mla_workspace() bytes, zero before the first launch */
  int64_t tokens;  /* rows of q, tree_kv and out */
  int64_t slots;   /* of kv_pool: pages times page_size */
  int64_t indices; /* entries of kv_indices */
  int32_t batch;
  int32_t nodes; /* tokens of each request, or the largest number of them with q_indptr */
  int32_t heads;
  int32_t page_size;     /* 1 or 64 */
  int32_t wide_indices;  /* kv_indices is int64 */
  int32_t e4m3;          /* kv_pool is e4m3 */
  float softmax_scale;
  float kv_scale;        /* a cached value is kv_scale times the stored one; 1 for bf16 */
  int32_t row_groups;    /* tuning; 0 chooses: 8-row groups of a row tile, 1 to 5 */
  int32_t gang;          /* tuning; 0 chooses: blocks that walk the same tokens */
  int32_t min_tiles;     /* tuning; 0 chooses: least 16-token tiles of a split */
} longleaf_verify_mla_args;

/* Bytes of workspace that serve every call on the current device, one call at a time. */
LONGLEAF_API int longleaf_verify_mla_workspace(size_t* bytes);

/* One launch on `stream` (a cudaStream_t). Lengths are read on the device: a captured launch may be
 * replayed after kv_indptr, kv_indices and q_indptr have changed, within batch, nodes, tokens and
 * indices. Lengths beyond those are cut to them: the results are wrong, nothing else is. */
LONGLEAF_API int longleaf_verify_mla(const longleaf_verify_mla_args* args, void* stream);

#endif

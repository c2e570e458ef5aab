// What one verify-attention launch is told, and the sizes its host and device sides agree on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "longleaf/config.h"

namespace longleaf {

constexpr int kTileTokens = 16;   // tokens of one step of the pipeline
constexpr int kRowsPerGroup = 8;  // rows (node x head) of one mma column group
constexpr int kRowsPerBox = 8;    // consecutive rows of q that one copy brings
constexpr int kMaxRowGroups = 5;  // row groups of the largest row tile: 40 rows

// Tokens of a tile of the step's own rows: a slot of an e4m3 cache's ring holds eight bf16 rows.
constexpr int tree_tile_log2(bool e4m3) { return e4m3 ? 3 : 4; }

// Partial outputs: per row group, 16 pairs of 16 value columns x 32 lanes, 16 bytes each.
constexpr int kUnitsPerGroup = kLatentDim;
constexpr int kPartialsPerBlock = 2;  // a block's work range is cut at most at both its ends

// A CUtensorMap. Rows of 576 bf16 come to shared memory swizzled, see verify_mla_layout.cuh.
struct alignas(128) TensorMap {
  unsigned char opaque[128];
};

struct VerifyMlaParams {
  TensorMap q_rows;     // of q: boxes of kRowsPerBox rows
  TensorMap tree_rows;  // of tree_kv: boxes of one row
  TensorMap pool_rows;  // of a bf16 kv_pool: likewise
  const void* kv_pool;       // e4m3 [slots, 576]; pages of 64 are 64 slots
  const int32_t* kv_indptr;  // [batch + 1], counts prefix tokens
  const void* kv_indices;    // slots, or pages
  const int32_t* page_indptr;   // [batch + 1], counts entries of kv_indices; kv_indptr for slots
  const uint64_t* visible;      // [tokens, visible_words], or null: causal
  const int32_t* q_indptr;      // [batch + 1], or null: `nodes` tokens each
  uint16_t* out;                // bf16 [tokens, heads, 512]
  float* lse;                   // [tokens, heads] natural log, or null

  // workspace
  unsigned* counters;  // one a block, zero before the first launch; every launch leaves them ready
  float2* stats;       // [blocks, 2, rows of a tile]: reference (log2 units) and sum
  uint4* partials;     // [blocks, 2, row groups * kUnitsPerGroup]

  int batch;
  int tokens;  // rows of q, tree_kv and out
  int entries;            // of kv_indices
  int max_prefix_tokens;  // that so many entries can name
  int nodes;  // tokens of every request, or the largest number of them
  int heads;
  int visible_words;
  int page_log2;      // 0 or 6
  int index_is_wide;  // kv_indices is int64
  int tree_tile_log2;
  int gang;           // blocks that walk the same tokens, each with its own row tile
  int gangs;
  int rounds;         // row tiles of the largest request over `gang`, rounded up
  int min_tiles;      // do not split work finer than this
  float logit_scale;  // softmax scale * log2(e) * kv_scale
  float value_scale;  // kv_scale: 1 for bf16
};

}  // namespace longleaf

// The work list, derived by every block from the lengths in global memory.
//
// Work is a line of token tiles: request after request, and for a request whose rows need several
// rounds of a gang, round after round. The gangs that take part cut the line into equal ranges; the
// blocks of a gang walk the same tiles and hold one row tile each. So a long request is spread over
// many gangs, and a gang can serve several short ones.
#pragma once

#include <cstdint>

#include "longleaf/verify_mla_params.h"

namespace longleaf {

// All rows of one round of one request, and the tokens that those rows see.
struct Item {
  int prefix_tokens;
  int prefix_tiles;
  int tiles;       // prefix and tree
  int first_prefix;  // prefix tokens of the requests before
  int first_token;   // the request's first row of tree_kv
  int nodes;
};

__device__ __forceinline__ int clamped(int x, int high) { return max(0, min(x, high)); }

// Lengths come from memory that nobody checks: wrong ones are cut to what the launch was told, so that
// all blocks still agree on one plan and stay within the tensors.
template <int RowGroups>
__device__ __forceinline__ Item load_item(const VerifyMlaParams& p, int request, int round) {
  constexpr int kRows = RowGroups * kRowsPerGroup;
  Item item;
  item.first_prefix = __ldg(p.kv_indptr + request);
  item.prefix_tokens =
      clamped(__ldg(p.kv_indptr + request + 1) - item.first_prefix, p.max_prefix_tokens);
  item.prefix_tiles = (item.prefix_tokens + kTileTokens - 1) / kTileTokens;
  if (p.q_indptr) {
    const int first = __ldg(p.q_indptr + request);
    item.nodes = clamped(__ldg(p.q_indptr + request + 1) - first, p.nodes);
    item.first_token = clamped(first, p.tokens - item.nodes);
  } else {
    item.first_token = request * p.nodes;
    item.nodes = p.nodes;
  }
  const int rows = item.nodes * p.heads;
  const int first_row = round * p.gang * kRows;
  int tree_tokens = item.nodes;
  if (!p.visible) {  // causal: no row of this round sees further than the round's last token
    const int end = min(first_row + p.gang * kRows, rows);
    tree_tokens = (end + p.heads - 1) / p.heads;
  }
  const int tree_tiles = (tree_tokens + (1 << p.tree_tile_log2) - 1) >> p.tree_tile_log2;
  item.tiles = first_row < rows ? item.prefix_tiles + tree_tiles : 0;
  return item;
}

// Where a gang's range starts, in shared memory.
struct PlanStart {
  int total;  // tiles of the whole line
  int gangs;  // that take part
  int begin, end;
  int request, round, tile;  // of `begin`
};

// Ranges differ by one tile at most; the longer ones come first.
__device__ __forceinline__ int range_begin(int gang, int total, int gangs) {
  return gang * (total / gangs) + min(gang, total % gangs);
}
// The gang whose range holds `position`.
__device__ __forceinline__ int gang_of(int position, int total, int gangs) {
  const int length = total / gangs, longer = total % gangs;
  const int split = longer * (length + 1);
  return position < split ? position / (length + 1) : longer + (position - split) / length;
}

template <int RowGroups>
__device__ __forceinline__ int request_tiles(const VerifyMlaParams& p, int request) {
  int tiles = 0;
  for (int round = 0; round < p.rounds; ++round) tiles += load_item<RowGroups>(p, request, round).tiles;
  return tiles;
}

// Run by one warp.
template <int RowGroups>
__device__ __forceinline__ void make_plan(const VerifyMlaParams& p, int gang, int lane,
                                          PlanStart* plan) {
  const bool one_item = p.batch == 1 && p.rounds == 1;
  int total = 0;
  if (one_item) {
    total = load_item<RowGroups>(p, 0, 0).tiles;
  } else {
    for (int r = lane; r < p.batch; r += 32) total += request_tiles<RowGroups>(p, r);
    for (int step = 16; step; step >>= 1) total += __shfl_xor_sync(~0u, total, step);
  }
  const int gangs = max(1, min(p.gangs, total / p.min_tiles));
  const bool takes_part = gang < gangs && total > 0;
  const int begin = takes_part ? range_begin(gang, total, gangs) : 0;
  const int end = takes_part ? range_begin(gang + 1, total, gangs) : 0;
  if (lane == 0) *plan = {total, gangs, begin, end, 0, 0, one_item ? begin : 0};
  if (one_item || !takes_part) return;
  __syncwarp();

  int before = 0;  // tiles of the requests before this chunk of 32
  for (int base = 0; base < p.batch; base += 32) {
    const int tiles = base + lane < p.batch ? request_tiles<RowGroups>(p, base + lane) : 0;
    int through = tiles;
    for (int step = 1; step < 32; step <<= 1) {
      const int other = __shfl_up_sync(~0u, through, step);
      if (lane >= step) through += other;
    }
    const int first = before + through - tiles;
    if (first <= begin && begin < first + tiles) {
      int tile = begin - first, round = 0;
      for (;; ++round) {
        const int length = load_item<RowGroups>(p, base + lane, round).tiles;
        if (tile < length) break;
        tile -= length;
      }
      plan->request = base + lane;
      plan->round = round;
      plan->tile = tile;
    }
    before += __shfl_sync(~0u, through, 31);
    if (begin < before) break;
  }
}

// Walks a gang's range segment by segment: the tiles of one item that lie in the range. Keeps little in
// registers, which the roles need for other things.
template <int RowGroups>
class Cursor {
 public:
  __device__ __forceinline__ Cursor(const VerifyMlaParams& p, const PlanStart& plan, int member)
      : request(plan.request), params_(p), plan_(plan), member_(member), position_(plan.begin),
        round_(plan.round - 1) {}

  // Goes to the next segment in which this member has a row tile; false at the end.
  __device__ __forceinline__ bool next() {
    while (position_ < plan_.end) {
      if (++round_ == params_.rounds) {
        round_ = 0;
        ++request;
      }
      item = load_item<RowGroups>(params_, request, round_);
      first_tile = position_ == plan_.begin ? plan_.tile : 0;
      end_tile = min(item.tiles, first_tile + plan_.end - position_);
      position_ += end_tile - first_tile;
      if (end_tile > first_tile && first_row() < item.nodes * params_.heads) return true;
    }
    return false;
  }
  // The item's first tile on the line.
  __device__ __forceinline__ int item_begin() const { return position_ - end_tile; }
  // Of this member's row tile, within the request.
  __device__ __forceinline__ int first_row() const {
    return (round_ * params_.gang + member_) * RowGroups * kRowsPerGroup;
  }

  Item item;
  int request;
  int first_tile, end_tile;  // within the item

 private:
  const VerifyMlaParams& params_;
  const PlanStart& plan_;
  int member_, position_, round_;
};

}  // namespace longleaf

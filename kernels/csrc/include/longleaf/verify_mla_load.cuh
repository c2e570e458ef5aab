// The load warps: queries, cached rows by index, and the step's own rows, into the ring.
#pragma once

#include "longleaf/plan.cuh"
#include "longleaf/verify_mla_layout.cuh"

namespace longleaf {

constexpr int kRowsPerLoadWarp = kTileTokens / kLoadWarps;
constexpr int kTilesPerIndexLoad = 32 / kRowsPerLoadWarp;

// The pool slot of a prefix token: one load, issued well before its use.
__device__ __forceinline__ int load_index(const VerifyMlaParams& p, int first_entry, int token) {
  const int entry = first_entry + (token >> p.page_log2);
  const int index = p.index_is_wide
                        ? static_cast<int>(__ldg(static_cast<const int64_t*>(p.kv_indices) + entry))
                        : __ldg(static_cast<const int32_t*>(p.kv_indices) + entry);
  return (index << p.page_log2) + (token & ((1 << p.page_log2) - 1));
}

template <int RowGroups, class Cache>
__device__ __forceinline__ void load_role(const VerifyMlaParams& p, const PlanStart& plan,
                                          uint32_t shared, int member, int warp, int lane) {
  using L = Layout<RowGroups>;
  RingCursor<L::kSlots> ring;
  const int row = warp * kRowsPerLoadWarp;  // first of this warp's rows in a tile

  // Waits for the slot, announces `bytes` a row; then copy() fills it.
  auto open_slot = [&] {
    ptx::mbar_wait(shared + L::kEmpty + 8 * ring.slot, ring.parity ^ 1);
    return shared + L::kRing + ring.slot * kSlotBytes;
  };
  // Rows of q or tree_kv: contiguous, bf16; past the last one the last one again (finite, unused).
  auto load_rows = [&](const uint16_t* source, int first, int last) {
    const uint32_t to = open_slot();
    const uint32_t full = shared + L::kFull + 8 * ring.slot;
    if (ptx::elect_one()) {
      ptx::mbar_arrive_expect(full, kRowsPerLoadWarp * kBf16RowBytes);
#pragma unroll
      for (int i = 0; i < kRowsPerLoadWarp; ++i) {
        const size_t from = static_cast<size_t>(min(first + row + i, last)) * kRowDim;
        ptx::bulk_copy(to + (row + i) * kBf16Stride, source + from, kBf16RowBytes, full);
      }
    }
    __syncwarp();
    ring.advance();
  };

  Cursor<RowGroups> segment(p, plan, member);
  while (segment.next()) {
    const Item& item = segment.item;
    const int prefix_end = min(segment.end_tile, item.prefix_tiles);
    // Lane i holds the slot of row i % 4 of tile i / 4 of a group of eight tiles; one group ahead.
    const int first_entry = __ldg(p.page_indptr + segment.request);
    const int lane_token = (lane / kRowsPerLoadWarp) * kTileTokens + row + lane % kRowsPerLoadWarp;
    auto group_index = [&](int tile) {
      const int token = tile * kTileTokens + lane_token;
      return tile < prefix_end ? load_index(p, first_entry, min(token, item.prefix_tokens - 1)) : 0;
    };
    int next_index = group_index(segment.first_tile), index = 0;

    const uint16_t* queries =
        p.q + static_cast<size_t>(item.first_token) * p.heads * kRowDim;
    for (int i = 0; i < L::kQuerySlots; ++i)
      load_rows(queries, segment.first_row + i * kTileTokens, item.nodes * p.heads - 1);

    int tile = segment.first_tile;
    for (int in_group = 0; tile < prefix_end; ++tile, ++in_group) {
      if (in_group % kTilesPerIndexLoad == 0) {
        index = next_index;
        next_index = group_index(tile + kTilesPerIndexLoad);
      }
      const int source_lane = (in_group % kTilesPerIndexLoad) * kRowsPerLoadWarp;
      int slots[kRowsPerLoadWarp];  // warp-uniform, so that the copies need no loop over lanes
#pragma unroll
      for (int i = 0; i < kRowsPerLoadWarp; ++i)
        slots[i] = __shfl_sync(~0u, index, source_lane + i);
      const uint32_t to = open_slot();
      const uint32_t full = shared + L::kFull + 8 * ring.slot;
      if (ptx::elect_one()) {
        ptx::mbar_arrive_expect(full, kRowsPerLoadWarp * Cache::kRowBytes);
#pragma unroll
        for (int i = 0; i < kRowsPerLoadWarp; ++i)
          ptx::bulk_copy(to + (row + i) * Cache::kStride,
                         static_cast<const char*>(p.kv_pool) +
                             static_cast<size_t>(static_cast<unsigned>(slots[i])) * Cache::kRowBytes,
                         Cache::kRowBytes, full);
      }
      __syncwarp();
      ring.advance();
    }
    for (; tile < segment.end_tile; ++tile)
      load_rows(p.tree_kv + static_cast<size_t>(item.first_token) * kRowDim,
                (tile - item.prefix_tiles) * kTileTokens, item.nodes - 1);
  }
}

}  // namespace longleaf

// The load warps: queries, cached rows by index, and the step's own rows, into the ring.
#pragma once

#include "longleaf/plan.cuh"
#include "longleaf/verify_mla_layout.cuh"

namespace longleaf {

constexpr int kRowsPerLoadWarp = kTileTokens / kLoadWarps;
constexpr int kTilesPerIndexLoad = 32 / kRowsPerLoadWarp;
static_assert(kRowsPerLoadWarp == kRowsPerBox);

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

  auto open_slot = [&] {
    ptx::mbar_wait(shared + L::kEmpty + 8 * ring.slot, ring.parity ^ 1);
    return shared + L::kRing + ring.slot * kSlotBytes;
  };
  // Consecutive rows from `first` on; those past the request's are another's or zeros, and unused.
  auto load_rows = [&](const TensorMap& map, int first) {
    const uint32_t to = open_slot(), full = shared + L::kFull + 8 * ring.slot;
    if (ptx::elect_one()) {
      ptx::mbar_arrive_expect(full, kRowsPerBox * kBf16RowBytes);
      ptx::tensor_copy(to + row * kBf16RowBytes, &map, first + row, full);
    }
    __syncwarp();
    ring.advance();
  };

  if (warp == 0 && ptx::elect_one()) {
    ptx::prefetch_tensor_map(&p.q_rows);
    ptx::prefetch_tensor_map(&p.tree_rows);
    if (!Cache::kIsE4m3) ptx::prefetch_tensor_map(&p.pool_rows);
  }
  __syncwarp();
  Cursor<RowGroups> segment(p, plan, member);
  while (segment.next()) {
    const Item& item = segment.item;
    const int prefix_end = min(segment.end_tile, item.prefix_tiles);
    // Lane i holds the slot of row i % 8 of tile i / 8 of a group of four tiles; one group ahead.
    const int first_entry =
        p.page_log2 == 0 ? item.first_prefix : __ldg(p.page_indptr + segment.request);
    const int lane_token = (lane / kRowsPerLoadWarp) * kTileTokens + row + lane % kRowsPerLoadWarp;
    auto group_index = [&](int tile) {
      const int token = tile * kTileTokens + lane_token;
      return tile < prefix_end ? load_index(p, first_entry, min(token, item.prefix_tokens - 1)) : 0;
    };
    int next_index = group_index(segment.first_tile), index = 0;

#pragma unroll 1
    for (int i = 0; i < L::kQuerySlots; ++i)
      load_rows(p.q_rows, item.first_token * p.heads + segment.first_row + i * kTileTokens);

    int tile = segment.first_tile;
    for (int in_group = 0; tile < prefix_end; ++tile, ++in_group) {
      if (in_group % kTilesPerIndexLoad == 0) {
        index = next_index;
        next_index = group_index(tile + kTilesPerIndexLoad);
      }
      const int source_lane = (in_group % kTilesPerIndexLoad) * kRowsPerLoadWarp;
      const uint32_t to = open_slot(), full = shared + L::kFull + 8 * ring.slot;
      const bool elected = ptx::elect_one();
      if (elected)
        ptx::mbar_arrive_expect(
            full, kRowsPerLoadWarp * (Cache::kIsE4m3 ? kE4m3RowBytes : kBf16RowBytes));
#pragma unroll
      for (int i = 0; i < kRowsPerLoadWarp; ++i) {
        // Warp-uniform, so that the copy needs no loop over lanes.
        const int slot = __shfl_sync(~0u, index, source_lane + i);
        if (!elected) continue;
        if constexpr (Cache::kIsE4m3) {
          ptx::bulk_copy(to + (row + i) * kE4m3Stride,
                         static_cast<const char*>(p.kv_pool) +
                             static_cast<size_t>(static_cast<unsigned>(slot)) * kE4m3RowBytes,
                         kE4m3RowBytes, full);
        } else {
          ptx::tensor_copy(to + (row + i) * kBf16RowBytes, &p.pool_rows, slot, full);
        }
      }
      __syncwarp();
      ring.advance();
    }
    for (; tile < segment.end_tile; ++tile)
      load_rows(p.tree_rows, item.first_token + (tile - item.prefix_tiles) * kTileTokens);
  }
}

}  // namespace longleaf

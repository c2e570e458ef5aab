// The load warps: queries, cached rows by index, and the step's own rows, into the ring.
#pragma once

#include "longleaf/plan.cuh"
#include "longleaf/verify_mla_layout.cuh"

namespace longleaf {

constexpr int kLoadBarrier = 1;  // named barrier of the load warps
constexpr int kRowsPerLoadWarp = kTileTokens / kLoadWarps;
constexpr int kTilesPerIndexLoad = 32 / kRowsPerLoadWarp;
static_assert(kRowsPerLoadWarp == kRowsPerBox);
constexpr int kNoRow = -1;  // outside every tensor

// The slot or page of a prefix token: one load, and nothing computed with it, as its use is far off.
__device__ __forceinline__ int load_index(const VerifyMlaParams& p, int first_entry, int token) {
  const size_t entry = static_cast<size_t>(first_entry + (token >> p.page_log2));
  // Of a wide index the low half says all.
  return __ldg(static_cast<const int32_t*>(p.kv_indices) + (entry << p.index_is_wide));
}

// Whether the first queries of a member are the same whatever the lengths: they come before the plan.
__device__ __forceinline__ bool queries_come_first(const VerifyMlaParams& p) {
  return p.batch == 1 && p.rounds == 1 && !p.q_indptr;
}

// This warp's share of the queries of a slot: consecutive rows from `first` on. Those past the request's
// are another's or zeros, and their results unused.
template <class L>
__device__ __forceinline__ void load_queries(const TensorMap& map, int first, uint32_t shared, int slot,
                                             int warp) {
  const uint32_t full = shared + L::kFull + 8 * slot;
  if (ptx::elect_one()) {
    if (warp < L::kSlotGroups) {
      ptx::mbar_arrive_expect(full, kRowsPerBox * kBf16RowBytes);
      ptx::tensor_copy(shared + L::kRing + slot * L::kSlotBytes + warp * kRowsPerBox * kBf16RowBytes,
                       &map, first + warp * kRowsPerBox, full);
    } else {
      ptx::mbar_arrive(full);
    }
  }
  __syncwarp();
}

// This warp's share of a tile of the tree: `count` rows from `first` on, then zeros, which the copy engine
// gives for rows outside its tensor. Another request's rows would not do: their probabilities are zero,
// but zero times NaN is NaN.
template <class L>
__device__ __forceinline__ void load_tree_rows(const TensorMap& map, int first, int count,
                                               uint32_t shared, int slot, int warp) {
  const uint32_t full = shared + L::kFull + 8 * slot;
  if (ptx::elect_one()) {
    if (warp < L::kSlotGroups) {
      ptx::mbar_arrive_expect(full, kRowsPerLoadWarp * kBf16RowBytes);
      const uint32_t to = shared + L::kRing + slot * L::kSlotBytes;
#pragma unroll 1
      for (int i = warp * kRowsPerLoadWarp; i < (warp + 1) * kRowsPerLoadWarp; ++i)
        ptx::tensor_copy(to + i * kBf16RowBytes, &map, i < count ? first + i : kNoRow, full);
    } else {
      ptx::mbar_arrive(full);
    }
  }
  __syncwarp();
}

// The first queries, where they come before the plan. The ring is empty.
template <int RowGroups, class Cache>
__device__ __forceinline__ void load_first_queries(const VerifyMlaParams& p, uint32_t shared,
                                                   int member, int warp) {
  using L = Layout<RowGroups, Cache>;
  for (int i = 0; i < L::kQuerySlots; ++i)
    load_queries<L>(p.q_rows, member * L::kRows + i * Cache::kSlotRows, shared, i, warp);
}

template <int RowGroups, class Cache>
__device__ __forceinline__ void load_role(const VerifyMlaParams& p, const PlanStart& plan,
                                          uint32_t shared, int member, int warp, int lane) {
  using L = Layout<RowGroups, Cache>;
  RingCursor<L::kSlots> ring;
  const int row = warp * kRowsPerLoadWarp;  // first of this warp's rows in a tile

  auto open_slot = [&] {
    ptx::mbar_wait(shared + L::kEmpty + 8 * ring.slot, ring.parity ^ 1);
    return shared + L::kRing + ring.slot * L::kSlotBytes;
  };

  bool queries_loaded = queries_come_first(p);
  Cursor<RowGroups> segment(p, plan, member);
  while (segment.next()) {
    const Item& item = segment.item;
    const int prefix_end = min(segment.end_tile, item.prefix_tiles);
    // Lane i holds the slot of row i % 8 of tile i / 8 of a group of four tiles; one group ahead.
    const int pages = (item.prefix_tokens + (1 << p.page_log2) - 1) >> p.page_log2;
    const int first_entry =
        clamped(p.page_log2 == 0 ? item.first_prefix : __ldg(p.page_indptr + segment.request),
                p.entries - pages);
    const int lane_token = (lane / kRowsPerLoadWarp) * kTileTokens + row + lane % kRowsPerLoadWarp;
    auto token_of = [&](int tile) {
      return min(tile * kTileTokens + lane_token, item.prefix_tokens - 1);
    };
    auto group_index = [&](int tile) {
      return tile < prefix_end ? load_index(p, first_entry, token_of(tile)) : 0;
    };
    int next_index = group_index(segment.first_tile), index = 0;

#pragma unroll 1
    for (int i = 0; i < L::kQuerySlots; ++i) {
      if (queries_loaded) {
        ring.advance();
      } else {
        open_slot();
        load_queries<L>(p.q_rows,
                        item.first_token * p.heads + segment.first_row() + i * Cache::kSlotRows,
                        shared, ring.slot, warp);
        ring.advance();
      }
    }
    queries_loaded = false;

    int tile = segment.first_tile;
    for (int in_group = 0; tile < prefix_end; ++tile, ++in_group) {
      if (in_group % kTilesPerIndexLoad == 0) {
        index = next_index << p.page_log2;
        if (p.page_log2) index += token_of(tile) & ((1 << p.page_log2) - 1);
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
    for (; tile < segment.end_tile; ++tile) {
      const int node = (tile - item.prefix_tiles) * Cache::kSlotRows;
      open_slot();
      load_tree_rows<L>(p.tree_rows, item.first_token + node, item.nodes - node, shared, ring.slot,
                        warp);
      ring.advance();
    }
  }
  // A block without work must not end before what it asked for has come.
  for (int i = 0; queries_loaded && i < L::kQuerySlots; ++i) ptx::mbar_wait(shared + L::kFull + 8 * i, 0);
}

}  // namespace longleaf

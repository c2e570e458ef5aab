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

// Copies this warp's four rows of RowBytes, 16 bytes a lane: two whole rows of lanes a row (one for
// 576 bytes), and the four rest together. rows[i]: row numbers; rest: that of the lane's rest.
template <int RowBytes>
__device__ __forceinline__ void copy_rows(uint32_t to, const void* base,
                                          const uint32_t (&rows)[kRowsPerLoadWarp], uint32_t rest,
                                          int lane) {
  constexpr int kStride = RowBytes + 16, kWhole = RowBytes / 512;
  constexpr int kRestLanes = (RowBytes - kWhole * 512) / 16;
  const char* source = static_cast<const char*>(base);
#pragma unroll
  for (int i = 0; i < kRowsPerLoadWarp; ++i) {
    const char* from = source + static_cast<size_t>(rows[i]) * RowBytes + lane * 16;
#pragma unroll
    for (int j = 0; j < kWhole; ++j)
      ptx::copy_16(to + i * kStride + j * 512 + lane * 16, from + j * 512);
  }
  if (lane < kRowsPerLoadWarp * kRestLanes)
    ptx::copy_16(to + lane / kRestLanes * kStride + kWhole * 512 + lane % kRestLanes * 16,
                 source + static_cast<size_t>(rest) * RowBytes + kWhole * 512 +
                     lane % kRestLanes * 16);
}

template <int RowGroups, class Cache>
__device__ __forceinline__ void load_role(const VerifyMlaParams& p, const PlanStart& plan,
                                          uint32_t shared, int member, int warp, int lane) {
  using L = Layout<RowGroups>;
  constexpr int kCacheRestLanes = Cache::kRowBytes % 512 / 16;
  RingCursor<L::kSlots> ring;
  const int row = warp * kRowsPerLoadWarp;  // first of this warp's rows in a tile

  auto wait_slot = [&] {
    ptx::mbar_wait(shared + L::kEmpty + 8 * ring.slot, ring.parity ^ 1);
    return shared + L::kRing + ring.slot * kSlotBytes;
  };
  auto finish_slot = [&] {
    ptx::mbar_arrive_after_copies(shared + L::kFull + 8 * ring.slot);
    ring.advance();
  };
  // Rows of q or tree_kv: contiguous, bf16; past the last one the last one again (finite, unused).
  auto load_rows = [&](const uint16_t* source, int first, int last) {
    uint32_t rows[kRowsPerLoadWarp];
#pragma unroll
    for (int i = 0; i < kRowsPerLoadWarp; ++i) rows[i] = min(first + row + i, last);
    const uint32_t rest = min(first + row + lane / (kBf16RowBytes % 512 / 16), last);
    copy_rows<kBf16RowBytes>(wait_slot() + row * kBf16Stride, source, rows, rest, lane);
    finish_slot();
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
#pragma unroll 1
    for (int i = 0; i < L::kQuerySlots; ++i)
      load_rows(queries, segment.first_row + i * kTileTokens, item.nodes * p.heads - 1);

    int tile = segment.first_tile;
    for (int in_group = 0; tile < prefix_end; ++tile, ++in_group) {
      if (in_group % kTilesPerIndexLoad == 0) {
        index = next_index;
        next_index = group_index(tile + kTilesPerIndexLoad);
      }
      const int source_lane = (in_group % kTilesPerIndexLoad) * kRowsPerLoadWarp;
      uint32_t slots[kRowsPerLoadWarp];
#pragma unroll
      for (int i = 0; i < kRowsPerLoadWarp; ++i)
        slots[i] = __shfl_sync(~0u, index, source_lane + i);
      const uint32_t rest = __shfl_sync(~0u, index, source_lane + lane / kCacheRestLanes % 4);
      copy_rows<Cache::kRowBytes>(wait_slot() + row * Cache::kStride, p.kv_pool, slots, rest, lane);
      finish_slot();
    }
    for (; tile < segment.end_tile; ++tile)
      load_rows(p.tree_kv + static_cast<size_t>(item.first_token) * kRowDim,
                (tile - item.prefix_tiles) * kTileTokens, item.nodes - 1);
  }
}

}  // namespace longleaf

// compact_kv: the accepted path's rows move to the front of the step's slots, in all pools at
// once. Row i of the path goes to the slot of node i; a spine 0, 1, 2, … moves nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace longleaf {

constexpr int kMaxPools = 256;
constexpr int kMovesInFlight = 8;

struct CompactParams {
  char* pools[kMaxPools];
  int64_t row_stride;  // bytes from slot to slot, a multiple of 16
  int row_vectors;     // of 16 bytes each
  const void* slots;   // [batch, nodes], int64 or int32
  bool wide_slots;
  const int32_t* path;      // [batch, max_path]
  const int32_t* path_len;  // [batch]
  int nodes;
  int max_path;

  __device__ __forceinline__ int64_t slot(int request, int node) const {
    const int64_t at = static_cast<int64_t>(request) * nodes + node;
    return wide_slots ? static_cast<const int64_t*>(slots)[at]
                      : static_cast<const int32_t*>(slots)[at];
  }
};

// Grid (pools, batch). A thread owns one 16-byte column of the rows: it reads the column of the
// rows that move before it writes any, so rows need no barrier although they overlap. A path
// longer than one pass holds goes in order: a row lands below every row that moves later.
__global__ void __launch_bounds__(256)
    compact_kv_kernel(const __grid_constant__ CompactParams p) {
  const int request = blockIdx.y;
  char* pool = p.pools[blockIdx.x];
  const int32_t* path = p.path + static_cast<int64_t>(request) * p.max_path;
  const int length = min(p.path_len[request], p.max_path);
  for (int first = 1; first < length; first += kMovesInFlight) {
    int64_t source[kMovesInFlight];  // byte offsets, -1 for a row that stays
    int64_t destination[kMovesInFlight];
    bool any = false;
#pragma unroll
    for (int i = 0; i < kMovesInFlight; ++i) {
      const int row = first + i;
      const int node = row < length ? path[row] : row;
      source[i] = node == row ? -1 : p.slot(request, node) * p.row_stride;
      destination[i] = node == row ? -1 : p.slot(request, row) * p.row_stride;
      any = any || node != row;
    }
    if (!any) continue;
    for (int column = threadIdx.x; column < p.row_vectors; column += blockDim.x) {
      uint4 held[kMovesInFlight];
#pragma unroll
      for (int i = 0; i < kMovesInFlight; ++i) {
        if (source[i] >= 0) held[i] = reinterpret_cast<const uint4*>(pool + source[i])[column];
      }
#pragma unroll
      for (int i = 0; i < kMovesInFlight; ++i) {
        if (source[i] >= 0) reinterpret_cast<uint4*>(pool + destination[i])[column] = held[i];
      }
    }
  }
}

}  // namespace longleaf

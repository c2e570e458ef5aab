#include "compact_capi.h"

#include <cuda_runtime.h>

#include "longleaf/compact_kv.cuh"
#include "longleaf/launch.cuh"

int longleaf_compact_kv(const longleaf_compact_kv_args* args, void* stream) {
  if (!args) return LONGLEAF_BAD_ARGUMENT;
  const bool sizes = args->pool_count > 0 && args->pool_count <= longleaf::kMaxPools &&
                     args->row_bytes > 0 && args->row_bytes % 16 == 0 &&
                     args->row_stride >= args->row_bytes && args->row_stride % 16 == 0 &&
                     args->batch >= 0 && args->nodes > 0 && args->max_path > 0;
  if (!sizes) return LONGLEAF_BAD_ARGUMENT;
  if (args->batch == 0) return LONGLEAF_OK;
  if (!args->pools || !args->slots || !args->path || !args->path_len) return LONGLEAF_BAD_ARGUMENT;
  longleaf::CompactParams params{};
  for (int i = 0; i < args->pool_count; ++i) {
    params.pools[i] = static_cast<char*>(args->pools[i]);
    if (!params.pools[i] || reinterpret_cast<uintptr_t>(params.pools[i]) % 16 != 0) {
      return LONGLEAF_BAD_ARGUMENT;
    }
  }
  params.row_stride = args->row_stride;
  params.row_vectors = args->row_bytes / 16;
  params.slots = args->slots;
  params.wide_slots = args->slots_are_int64 != 0;
  params.path = args->path;
  params.path_len = args->path_len;
  params.nodes = args->nodes;
  params.max_path = args->max_path;
  const int warps = (params.row_vectors + 31) / 32;
  const dim3 grid(args->pool_count, args->batch);
  LONGLEAF_LAUNCH(longleaf::compact_kv_kernel, grid, 32 * (warps < 8 ? warps : 8),
                  static_cast<cudaStream_t>(stream), params);
  return cudaGetLastError();
}

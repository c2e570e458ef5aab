/* C ABI of compact_kv. See capi.h for the conventions. */
#ifndef LONGLEAF_COMPACT_CAPI_H
#define LONGLEAF_COMPACT_CAPI_H

#include <stdint.h>

#include "capi.h"

struct longleaf_compact_kv_args {
  void* const* pools; /* host array of device pointers, each 16-byte aligned */
  int32_t pool_count;
  int32_t row_bytes; /* a multiple of 16, like row_stride */
  int64_t row_stride;
  const void* slots; /* [batch, nodes]: the slot that each node's row was written to */
  int32_t slots_are_int64;
  int32_t batch;
  int32_t nodes;
  int32_t max_path;
  const int32_t* path; /* [batch, max_path], node ids from the root down, ascending */
  const int32_t* path_len;
};

LONGLEAF_API int longleaf_compact_kv(const struct longleaf_compact_kv_args* args, void* stream);

#endif

// Work that depends on other blocks of the same launch is done by the last of them to arrive.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace longleaf {

// True in the last of `blocks` blocks that call it with `counter`, for all its threads; what the
// others wrote before is then visible (read it with __ldcg). The counter, zero before, is zero
// again afterwards. `flag` is a word of shared memory.
__device__ inline bool last_block(uint32_t* counter, int blocks, bool* flag) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    *flag = atomicInc(counter, static_cast<uint32_t>(blocks - 1)) ==
            static_cast<uint32_t>(blocks - 1);
    __threadfence();
  }
  __syncthreads();
  return *flag;
}

}  // namespace longleaf

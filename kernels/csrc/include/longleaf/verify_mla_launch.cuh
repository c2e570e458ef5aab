// The definition behind verify_mla_launch.h; included by the instances alone.
#pragma once

#include "longleaf/verify_mla.cuh"
#include "longleaf/verify_mla_launch.h"

namespace longleaf {

template <int RowGroups, class Cache>
cudaError_t launch_verify_mla(const VerifyMlaParams& params, cudaStream_t stream) {
  constexpr int kBytes = Layout<RowGroups, Cache>::kBytes;
  auto* kernel = verify_mla_kernel<RowGroups, Cache>;
  // Set at every call: it belongs to the current device, and costs little.
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  // Blocks wait for each other in the merge: all must run at once, or the launch must fail.
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(params.gang * params.gangs);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace longleaf

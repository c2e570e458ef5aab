#include <cuda_runtime_api.h>

#include "capi.h"

#ifndef LONGLEAF_CUDA_ARCHS
#error "the build must define LONGLEAF_CUDA_ARCHS, for example \"90a;120a\""
#endif

const char* longleaf_error_string(int status) {
  switch (status) {
    case LONGLEAF_OK: return "success";
    case LONGLEAF_BAD_ARGUMENT: return "an argument that no kernel of this library takes";
    case LONGLEAF_NOT_BUILT: return "no kernel was built for this case";
    default: break;
  }
  if (status < 0) return "unknown status";
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

int longleaf_abi_version(void) { return LONGLEAF_ABI_VERSION; }

const char* longleaf_cuda_archs(void) { return LONGLEAF_CUDA_ARCHS; }

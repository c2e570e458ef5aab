// Host side of verify attention: what instances define and the dispatcher calls.
#pragma once

#include <cuda_runtime_api.h>

#include "longleaf/verify_mla_params.h"

namespace longleaf {

struct Bf16Cache;
struct E4m3Cache;

// Launches gang * gangs cooperative blocks. Defined once per instance in csrc/instances.
template <int RowGroups, class Cache>
cudaError_t launch_verify_mla(const VerifyMlaParams& params, cudaStream_t stream);

}  // namespace longleaf

// Verify attention over an MLA cache: prefix, tree block and merge in one launch.
//
// O = softmax(Q K^T + mask) V for all nodes and heads of every request of a batch, where K is the
// cached row and V its first 512 columns. See kernels/README.md for the design.
#pragma once

#include "longleaf/verify_mla_load.cuh"
#include "longleaf/verify_mla_scores.cuh"
#include "longleaf/verify_mla_values.cuh"

namespace longleaf {

template <int RowGroups, class Cache>
__global__ void __launch_bounds__(kThreads, 1)
    verify_mla_kernel(const __grid_constant__ VerifyMlaParams p) {
  using L = Layout<RowGroups>;
  uint8_t* memory = ptx::dynamic_shared();
  const uint32_t shared = ptx::shared_address(memory);
  PlanStart& plan = *reinterpret_cast<PlanStart*>(memory + L::kPlan);
  // Through a shuffle, so that the compiler knows the warp's number to be uniform.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int gang = blockIdx.x / p.gang, member = blockIdx.x % p.gang;

  if (warp == 0) {
    make_plan<RowGroups>(p, gang, lane, &plan);
  } else if (threadIdx.x == 32) {
    init_barriers<L>(shared);
  }
  __syncthreads();

  if (warp >= kScoreWarps + kValueWarps) {
    ptx::shrink_registers<kLoadRegisters>();
    load_role<RowGroups, Cache>(p, plan, shared, member, warp - kScoreWarps - kValueWarps, lane);
  } else if (warp >= kScoreWarps) {
    ptx::grow_registers<kValueRegisters>();
    ValueWarp<RowGroups, Cache> values(p, shared, warp - kScoreWarps, lane);
    values.run(plan, gang, member, reinterpret_cast<PendingMerge*>(memory + L::kMerges));
  } else {
    ptx::grow_registers<kScoreRegisters>();
    ScoreWarp<RowGroups, Cache> scores(p, shared, warp, lane);
    scores.run(plan, member);
  }
}

}  // namespace longleaf

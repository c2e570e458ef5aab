// Verify attention over an MLA cache: prefix, tree block and merge in one launch.
//
// O = softmax(Q K^T + mask) V for all nodes and heads of every request of a batch, where K is the
// cached row and V its first 512 columns. See kernels/README.md for the design.
#pragma once

#include "longleaf/verify_mla_load.cuh"
#include "longleaf/verify_mla_scores.cuh"
#include "longleaf/verify_mla_softmax.cuh"
#include "longleaf/verify_mla_values.cuh"

namespace longleaf {

template <int RowGroups, class Cache>
__global__ void __launch_bounds__(kThreads, 1)
    verify_mla_kernel(const __grid_constant__ VerifyMlaParams p) {
  using L = Layout<RowGroups, Cache>;
  uint8_t* memory = ptx::dynamic_shared();
  const uint32_t shared = ptx::shared_address(memory);
  PlanStart& plan = *reinterpret_cast<PlanStart*>(memory + L::kPlan);
  // Through a shuffle, so that the compiler knows the warp's number to be uniform.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int gang = blockIdx.x / p.gang, member = blockIdx.x % p.gang;

  constexpr int kFirstSoftmax = kScoreWarps + kValueWarps, kFirstLoad = kFirstSoftmax + kSoftmaxWarps;
  PendingMerges& pending = *reinterpret_cast<PendingMerges*>(memory + L::kMerges);
  if (warp >= kFirstLoad) {
    if (threadIdx.x == 32 * kFirstLoad) {
      ptx::prefetch_tensor_map(&p.q_rows);
      init_barriers<L>(shared);
      pending.count = 0;
      if (!Cache::kIsE4m3) ptx::prefetch_tensor_map(&p.pool_rows);
      ptx::prefetch_tensor_map(&p.tree_rows);
    }
    ptx::named_barrier<32 * kLoadWarps>(kLoadBarrier);
    ptx::wait_for_launch();
    if (queries_come_first(p))
      load_first_queries<RowGroups, Cache>(p, shared, member, warp - kFirstLoad);
  } else if (warp == 0) {
    ptx::wait_for_launch();
    make_plan<RowGroups>(p, gang, lane, &plan);
  }
  __syncthreads();
  ptx::allow_next_launch();

  if (warp >= kFirstSoftmax) {
    ptx::shrink_registers<kOtherRegisters>();
    if (warp >= kFirstLoad) {
      load_role<RowGroups, Cache>(p, plan, shared, member, warp - kFirstLoad, lane);
    } else {
      SoftmaxWarp<RowGroups, Cache>(p, shared, warp - kFirstSoftmax, lane).run(plan, member);
    }
    return;
  }
  if (warp >= kScoreWarps) {
    ptx::grow_registers<kValueRegisters>();
    ValueWarp<RowGroups, Cache>(p, shared, warp - kScoreWarps, lane)
        .run(plan, gang, member, pending);
  } else {
    ptx::grow_registers<kScoreRegisters>();
    ScoreWarp<RowGroups, Cache>(p, shared, warp, lane).run(plan, member);
  }
  merge_pending<RowGroups, Cache>(p, pending, shared + L::kRing, threadIdx.x);
}

}  // namespace longleaf

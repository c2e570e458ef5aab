// Stands in for CUDA's header: what kernels use of clusters.
#pragma once

#include "cuda_runtime.h"

namespace cooperative_groups {

struct cluster_group {
  unsigned block_rank() const { return emulator::cluster_rank(); }
  void sync() const { emulator::cluster_barrier(); }
  template <typename T>
  T* map_shared_rank(T* mine, unsigned rank) const {
    return reinterpret_cast<T*>(emulator::shared_of(rank, mine));
  }
};
inline cluster_group this_cluster() { return {}; }

}  // namespace cooperative_groups

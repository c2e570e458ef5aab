// How a launcher starts a kernel. Tests compile the same launchers for the CPU, where these macros
// are theirs.
#pragma once

#include <cuda_runtime.h>

#ifndef LONGLEAF_LAUNCH
#define LONGLEAF_LAUNCH(kernel, grid, block, stream, ...) \
  kernel<<<(grid), (block), 0, (stream)>>>(__VA_ARGS__)
#endif

// A kernel whose __cluster_dims__ are (blocks, 1, 1).
#ifndef LONGLEAF_LAUNCH_CLUSTERS
#define LONGLEAF_LAUNCH_CLUSTERS(blocks, kernel, grid, block, stream, ...) \
  LONGLEAF_LAUNCH(kernel, grid, block, stream, __VA_ARGS__)
#endif

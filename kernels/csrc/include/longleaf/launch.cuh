// How a launcher starts a kernel. Tests compile the same launchers for the CPU, where
// LONGLEAF_LAUNCH is theirs.
#pragma once

#include <cuda_runtime.h>

#ifndef LONGLEAF_LAUNCH
#define LONGLEAF_LAUNCH(kernel, grid, block, stream, ...) \
  kernel<<<(grid), (block), 0, (stream)>>>(__VA_ARGS__)
#endif

// What a launch adds to the resources that the compiler reports, for the compile-time check.
#include <cstdlib>
#include <cstring>

#include "capi.h"
#include "longleaf/verify_mla_layout.cuh"

template <class Cache>
static int verify_mla_bytes(int row_groups) {
  switch (row_groups) {
    case 1: return longleaf::Layout<1, Cache>::kBytes;
    case 2: return longleaf::Layout<2, Cache>::kBytes;
    case 3: return longleaf::Layout<3, Cache>::kBytes;
    case 4: return longleaf::Layout<4, Cache>::kBytes;
    case 5: return longleaf::Layout<5, Cache>::kBytes;
    default: return LONGLEAF_NOT_BUILT;
  }
}

// Bytes of dynamic shared memory that a kernel is launched with, by its name as the compiler
// reports it without namespace, such as "verify_mla_kernel<3, Bf16Cache>".
LONGLEAF_API int longleaf_dynamic_shared_bytes(const char* kernel) {
  constexpr char kVerify[] = "verify_mla_kernel<";
  if (std::strncmp(kernel, kVerify, sizeof(kVerify) - 1) != 0) return 0;
  const int row_groups = std::atoi(kernel + sizeof(kVerify) - 1);
  return std::strstr(kernel, "E4m3Cache") ? verify_mla_bytes<longleaf::E4m3Cache>(row_groups)
                                          : verify_mla_bytes<longleaf::Bf16Cache>(row_groups);
}

// What a launch adds to the resources that the compiler reports, for the compile-time check.
#include <cstdlib>
#include <cstring>

#include "capi.h"
#include "longleaf/verify_mla_layout.cuh"

// Bytes of dynamic shared memory that a kernel is launched with, by its name as the compiler
// reports it without namespace, such as "verify_mla_kernel<3, Bf16Cache>".
LONGLEAF_API int longleaf_dynamic_shared_bytes(const char* kernel) {
  constexpr char kVerify[] = "verify_mla_kernel<";
  if (std::strncmp(kernel, kVerify, sizeof(kVerify) - 1) != 0) return 0;
  switch (std::atoi(kernel + sizeof(kVerify) - 1)) {
    case 1: return longleaf::Layout<1>::kBytes;
    case 2: return longleaf::Layout<2>::kBytes;
    case 3: return longleaf::Layout<3>::kBytes;
    case 4: return longleaf::Layout<4>::kBytes;
    case 5: return longleaf::Layout<5>::kBytes;
    default: return LONGLEAF_NOT_BUILT;
  }
}

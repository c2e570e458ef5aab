#include "longleaf/verify_mla_launch.cuh"

template cudaError_t longleaf::launch_verify_mla<3, longleaf::E4m3Cache>(
    const longleaf::VerifyMlaParams&, cudaStream_t);

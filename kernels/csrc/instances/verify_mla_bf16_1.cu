#include "longleaf/verify_mla_launch.cuh"

template cudaError_t longleaf::launch_verify_mla<1, longleaf::Bf16Cache>(
    const longleaf::VerifyMlaParams&, cudaStream_t);

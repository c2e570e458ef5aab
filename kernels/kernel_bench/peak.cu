// The rate of mma.sync m16n8k16, bf16 with float32 sums, from registers alone: eight independent
// products a warp in flight. Inputs are pseudo-random: the multiplier draws less power on zeros.
#include <cstdint>

namespace {

__device__ uint32_t pair_of_bf16(uint32_t seed) {
    seed = seed * 747796405u + 2891336453u;
    seed = (seed ^ (seed >> 15)) * 277803737u;
    // Random signs and mantissas, exponents of values from 0.5 to 1.
    return (seed & 0x807f807fu) | 0x3f003f00u;
}

__global__ void mma_kernel(int iterations, float* sink) {
    constexpr int kChains = 8;
    const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t a[4], b[kChains][2];
    float sums[kChains][4] = {};
    for (int i = 0; i < 4; ++i) a[i] = pair_of_bf16(thread * 31 + i);
    for (int chain = 0; chain < kChains; ++chain) {
        for (int i = 0; i < 2; ++i) b[chain][i] = pair_of_bf16(thread * 37 + chain * 2 + i + 100);
    }
    for (int iteration = 0; iteration < iterations; ++iteration) {
#pragma unroll
        for (int chain = 0; chain < kChains; ++chain) {
            float* c = sums[chain];
            asm volatile(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                "{%8,%9}, {%0,%1,%2,%3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[chain][0]), "r"(b[chain][1]));
        }
    }
    float total = 0;
    for (int chain = 0; chain < kChains; ++chain) {
        for (int i = 0; i < 4; ++i) total += sums[chain][i];
    }
    sink[thread] = total;
}

}  // namespace

// Floating-point operations of one launch: blocks * warps * iterations * 8 * 4096.
// sink: blocks * warps * 32 floats. Returns a cudaError_t.
extern "C" int longleaf_bench_mma(int blocks, int warps, int iterations, float* sink, void* stream) {
    mma_kernel<<<blocks, warps * 32, 0, static_cast<cudaStream_t>(stream)>>>(iterations, sink);
    return static_cast<int>(cudaGetLastError());
}

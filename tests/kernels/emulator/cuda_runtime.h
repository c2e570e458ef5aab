// Stands in for CUDA's header: runs kernels on the CPU, one fiber a thread, blocks one after
// another, or clusters one after another. Enough of the language for kernels without inline PTX.
// Threads of a block interleave at barriers and warp collectives only, blocks of a cluster at its
// barriers, in an order drawn from a seed. Shared memory is the library's thread-local data, and
// nothing else is, so that it can be exchanged with the block that runs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

using cudaStream_t = void*;
using cudaError_t = int;
inline cudaError_t cudaGetLastError() { return 0; }
inline const char* cudaGetErrorString(cudaError_t) { return "a CUDA error"; }

namespace emulator {

struct Thread {
  dim3 index, block, block_size, grid_size;
};
extern Thread* current;

// `cluster` blocks that differ in x run at once.
void run(unsigned cluster, dim3 grid, dim3 block, const std::function<void()>& kernel);
void block_barrier();
void cluster_barrier();
unsigned cluster_rank();
// Where another block of the cluster has the shared memory that is at `mine` here.
void* shared_of(unsigned rank, void* mine);
// Every lane gives a word and gets those of all 32.
const uint64_t* exchange(uint64_t word);

template <typename T>
uint64_t to_word(T value) {
  static_assert(sizeof(T) <= 8, "one word a lane");
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}
template <typename T>
T from_word(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(T));
  return value;
}
inline unsigned lane() { return current->index.x % 32; }

}  // namespace emulator

#define threadIdx (emulator::current->index)
#define blockIdx (emulator::current->block)
#define blockDim (emulator::current->block_size)
#define gridDim (emulator::current->grid_size)
#define LONGLEAF_LAUNCH(kernel, grid, block, stream, ...) \
  LONGLEAF_LAUNCH_CLUSTERS(1, kernel, grid, block, stream, __VA_ARGS__)
#define LONGLEAF_LAUNCH_CLUSTERS(cluster, kernel, grid, block, stream, ...) \
  ((void)(stream), emulator::run((cluster), (grid), (block), [&] { kernel(__VA_ARGS__); }))

inline void __syncthreads() { emulator::block_barrier(); }
inline void __syncwarp(unsigned = ~0u) { emulator::exchange(0); }
inline void __threadfence() {}

template <typename T>
T __shfl_sync(unsigned, T value, int source) {
  return emulator::from_word<T>(emulator::exchange(emulator::to_word(value))[source & 31]);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const unsigned source = emulator::lane() ^ static_cast<unsigned>(mask);
  return emulator::from_word<T>(emulator::exchange(emulator::to_word(value))[source]);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned delta) {
  const unsigned lane = emulator::lane();
  const unsigned source = lane >= delta ? lane - delta : lane;
  return emulator::from_word<T>(emulator::exchange(emulator::to_word(value))[source]);
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  const uint64_t* votes = emulator::exchange(predicate);
  unsigned ballot = 0;
  for (int i = 0; i < 32; ++i) ballot |= static_cast<unsigned>(votes[i]) << i;
  return ballot;
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  const uint64_t* values = emulator::exchange(value);
  return static_cast<unsigned>(*std::min_element(values, values + 32));
}

inline unsigned atomicAdd(unsigned* at, unsigned value) {
  const unsigned old = *at;
  *at += value;
  return old;
}
inline unsigned atomicInc(unsigned* at, unsigned limit) {
  const unsigned old = *at;
  *at = old >= limit ? 0 : old + 1;
  return old;
}
inline int atomicMin(int* at, int value) {
  const int old = *at;
  *at = std::min(old, value);
  return old;
}

inline unsigned long long __float2ull_rn(float x) { return static_cast<unsigned long long>(std::nearbyint(x)); }
template <typename T>
T __ldg(const T* at) { return *at; }
template <typename T>
T __ldcg(const T* at) { return *at; }
inline unsigned __float_as_uint(float x) { return emulator::from_word<unsigned>(emulator::to_word(x)); }
inline float __uint_as_float(unsigned x) { return emulator::from_word<float>(x); }
inline long long __double_as_longlong(double x) { return emulator::from_word<long long>(emulator::to_word(x)); }
inline double __longlong_as_double(long long x) { return emulator::from_word<double>(emulator::to_word(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int min(int a, int b) { return std::min(a, b); }

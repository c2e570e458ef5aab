// Stands in for CUDA's header in the emulation of verify_mla: every thread is a fiber, all blocks run
// at once, warps are held up at random, and asynchronous copies land at random times.
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
#define __grid_constant__
#define __launch_bounds__(...)

struct dim3 { unsigned x, y, z; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

constexpr unsigned kWarp = 32;

struct Thread {
  dim3 index, block;
};
extern Thread* current;
inline unsigned lane() { return current->index.x % kWarp; }

// Runs `kernel` on grid x threads fibers; aborts with a report when none can go on.
void run(unsigned grid, unsigned threads, const std::function<void()>& kernel, unsigned seed);

uint8_t* shared();  // of the current block: starts as NaN
const uint64_t* exchange(uint64_t word);  // every lane gives a word and gets those of all
// All lanes meet; `work` runs once on what they bring.
void together(void* mine, void (*work)(void** lanes));
void pause();  // lets others run
void named_barrier(int id, unsigned threads);
void mbar_init(uint32_t bar, int arrivals);
// after_loads: only once what the thread has read from shared memory is in its registers.
void mbar_arrive(uint32_t bar, int bytes, bool after_loads = false);
void mbar_wait(uint32_t bar, int parity);
// At a random later time: bytes of `from` to shared memory, counted on the barrier.
void copy_later(uint32_t to, const void* from, int bytes, uint32_t bar);
// Likewise, with the copy engine's 128-byte swizzle: bits 4 to 6 of the address by bits 7 to 9.
void copy_swizzled_later(uint32_t to, const void* from, int bytes, uint32_t bar);

template <class T>
uint64_t to_word(T value) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}
template <class T>
T from_word(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

}  // namespace emulator

#define threadIdx (emulator::current->index)
#define blockIdx (emulator::current->block)

void __syncthreads();
inline void __syncwarp() { emulator::exchange(0); }
template <class T>
T __shfl_sync(unsigned, T value, int source) {
  return emulator::from_word<T>(emulator::exchange(emulator::to_word(value))[source & 31]);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const unsigned source = emulator::lane() ^ static_cast<unsigned>(mask);
  return emulator::from_word<T>(emulator::exchange(emulator::to_word(value))[source]);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned delta) {
  const unsigned lane = emulator::lane(), source = lane >= delta ? lane - delta : lane;
  return emulator::from_word<T>(emulator::exchange(emulator::to_word(value))[source]);
}
inline bool __any_sync(unsigned, bool predicate) {
  const uint64_t* votes = emulator::exchange(predicate);
  return std::any_of(votes, votes + emulator::kWarp, [](uint64_t vote) { return vote != 0; });
}
template <class T>
T __ldg(const T* at) { return *at; }
template <class T>
T __ldcg(const T* at) { return *at; }
template <class T>
void __stcg(T* at, T value) { *at = value; }
inline unsigned __float_as_uint(float x) { return emulator::from_word<unsigned>(emulator::to_word(x)); }
inline float __uint_as_float(unsigned x) { return emulator::from_word<float>(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = a | static_cast<uint64_t>(b) << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= (bytes >> (8 * (selector >> 4 * i & 7)) & 255) << 8 * i;
  return result;
}
using std::max;
using std::min;

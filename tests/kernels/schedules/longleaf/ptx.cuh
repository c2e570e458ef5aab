// The kernel's PTX wrappers, for the emulation. Same names and meaning as the real header.
#pragma once

#include "cuda_runtime.h"

namespace longleaf::ptx {

inline uint8_t* dynamic_shared() { return emulator::shared(); }
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - emulator::shared());
}
inline void pin_loads(bool) {}
template <int Count>
void grow_registers() {}
template <int Count>
void shrink_registers() {}

inline void wait_for_launch() {}
inline void allow_next_launch() {}

inline void mbar_init(uint32_t bar, int arrivals) { emulator::mbar_init(bar, arrivals); }
inline void mbar_init_fence() {}
inline void mbar_arrive(uint32_t bar) { emulator::mbar_arrive(bar, 0); }
inline void mbar_arrive_after(uint32_t bar, uint32_t) { emulator::mbar_arrive(bar, 0, true); }
inline void mbar_arrive_expect(uint32_t bar, int bytes) { emulator::mbar_arrive(bar, bytes); }
inline void mbar_wait(uint32_t bar, int parity) { emulator::mbar_wait(bar, parity); }
inline void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t bar) {
  emulator::copy_later(to, from, bytes, bar);
}
struct Rows {  // what the emulation keeps in a TensorMap
  const uint8_t* base;
  int box, count;
};
inline void tensor_copy(uint32_t to, const void* map, int row, uint32_t bar) {
  constexpr int kRowBytes = 1152;
  const Rows& rows = *static_cast<const Rows*>(map);
  alignas(16) static const uint8_t zeros[kRowBytes] = {};  // what rows outside the tensor give
  for (int i = 0; i < rows.box; ++i) {
    const bool inside = row + i >= 0 && row + i < rows.count;
    emulator::copy_swizzled_later(
        to + i * kRowBytes, inside ? rows.base + static_cast<size_t>(row + i) * kRowBytes : zeros,
        kRowBytes, bar);
  }
}
inline void prefetch_tensor_map(const void*) {}
inline int recompute(int x) { return x; }
inline void copy_16(uint32_t to, const void* from) {
  std::memcpy(emulator::shared() + to, from, 16);
}
inline void wait_copies() { emulator::pause(); }
inline bool elect_one() {
  emulator::exchange(0);
  return emulator::lane() == 0;
}
template <int Threads>
void named_barrier(int id) { emulator::named_barrier(id, Threads); }
inline unsigned add_acq_rel(unsigned* counter, unsigned value) {
  emulator::pause();
  const unsigned old = *counter;
  *counter += value;
  return old;
}
inline unsigned load_acquire(const unsigned* counter) {
  emulator::pause();
  return *counter;
}

template <class T>
T load(uint32_t address) {
  T x;
  std::memcpy(&x, emulator::shared() + address, sizeof x);
  return x;
}
template <class T>
void store(uint32_t address, T x) { std::memcpy(emulator::shared() + address, &x, sizeof x); }
inline uint32_t load_shared(uint32_t address) { return load<uint32_t>(address); }
inline uint2 load_shared2(uint32_t address) { return load<uint2>(address); }
inline uint4 load_shared4(uint32_t address) { return load<uint4>(address); }
inline float2 load_shared_f2(uint32_t address) { return load<float2>(address); }
inline float4 load_shared_f4(uint32_t address) { return load<float4>(address); }
inline void store_shared(uint32_t address, uint32_t x) { store(address, x); }
inline void store_shared_f2(uint32_t address, float x, float y) { store(address, float2{x, y}); }
inline void store_shared_f4(uint32_t address, const float (&x)[4]) {
  store(address, float4{x[0], x[1], x[2], x[3]});
}

struct MatrixLoad {
  const uint8_t* memory;
  uint32_t address;
  int count;
  bool transposed;
  uint32_t words[4] = {};
};
// 8 x 8 matrices of 16-bit elements; lane 8 m + i holds the address of row i of matrix m.
inline void load_matrices(void** all) {
  auto** lanes = reinterpret_cast<MatrixLoad**>(all);
  for (int m = 0; m < lanes[0]->count; ++m)
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 2; ++i) {
        const int major = lane / 4, minor = lane % 4 * 2 + i;
        const int row = lanes[0]->transposed ? minor : major;
        const int column = lanes[0]->transposed ? major : minor;
        uint16_t element;
        std::memcpy(&element, lanes[0]->memory + lanes[8 * m + row]->address + 2 * column, 2);
        lanes[lane]->words[m] |= static_cast<uint32_t>(element) << 16 * i;
      }
}
inline MatrixLoad ldmatrix(uint32_t address, int count, bool transposed) {
  MatrixLoad load{emulator::shared(), address, count, transposed};
  emulator::together(&load, load_matrices);
  return load;
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  const MatrixLoad load = ldmatrix(address, 4, false);
  std::copy_n(load.words, 4, r);
}
inline void ldmatrix_x4_trans(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t address) {
  const MatrixLoad load = ldmatrix(address, 4, true);
  a = load.words[0], b = load.words[1], c = load.words[2], d = load.words[3];
}
inline void ldmatrix_x2_trans(uint32_t& a, uint32_t& b, uint32_t address) {
  const MatrixLoad load = ldmatrix(address, 2, true);
  a = load.words[0], b = load.words[1];
}
inline uint32_t transpose_8x8(uint32_t x) {
  const uint64_t* rows = emulator::exchange(x);
  const unsigned column = emulator::lane() / 4, row = emulator::lane() % 4 * 2;
  uint32_t y = 0;
  for (unsigned i = 0; i < 2; ++i)
    y |= static_cast<uint32_t>(rows[(row + i) * 4 + column / 2] >> 16 * (column & 1) & 0xffff) << 16 * i;
  return y;
}

inline float bf16_low(uint32_t x) { return __uint_as_float(x << 16); }
inline float bf16_high(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }
inline uint16_t to_bf16(float x) {
  const uint32_t bits = __float_as_uint(x);
  if (std::isnan(x)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint16_t to_f16(float x) {
  const _Float16 half = static_cast<_Float16>(std::clamp(x, -65504.f, 65504.f));
  return emulator::from_word<uint16_t>(emulator::to_word(half));
}
inline float from_f16(uint16_t x) { return static_cast<float>(emulator::from_word<_Float16>(x)); }
inline float from_e4m3(unsigned x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  const float size = (x & 127) == 127 ? NAN
                     : exponent       ? std::ldexp(1 + mantissa / 8.f, exponent - 7)
                                      : std::ldexp(mantissa / 8.f, -6);
  return x & 128 ? -size : size;
}
inline uint32_t pack_bf16(float low, float high) {
  return to_bf16(low) | static_cast<uint32_t>(to_bf16(high)) << 16;
}
inline uint32_t pack_f16(float low, float high) {
  return to_f16(low) | static_cast<uint32_t>(to_f16(high)) << 16;
}
inline uint32_t e4m3_low_to_f16(uint32_t x) {
  return pack_f16(from_e4m3(x & 255), from_e4m3(x >> 8 & 255));
}
inline uint32_t e4m3_high_to_f16(uint32_t x) { return e4m3_low_to_f16(x >> 16); }
inline float exp2_approx(float x) { return std::exp2(x); }

struct Product {
  float* c;
  const uint32_t *a, *b;
  bool is_f16;
};
// C[16][8] += A[16][16] B[16][8] in the fragments of mma.m16n8k16.
inline void multiply_fragments(void** all) {
  auto** lanes = reinterpret_cast<Product**>(all);
  const auto value = [&](uint32_t word, int i) {
    const auto bits = static_cast<uint16_t>(word >> 16 * i);
    return lanes[0]->is_f16 ? from_f16(bits) : bf16_low(bits);
  };
  float a[16][16], b[16][8], c[16][8] = {};
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 2; ++i) {
      const int g = lane / 4, t = lane % 4 * 2 + i;
      for (int r = 0; r < 4; ++r) a[g + 8 * (r & 1)][t + 8 * (r >> 1)] = value(lanes[lane]->a[r], i);
      for (int r = 0; r < 2; ++r) b[t + 8 * r][g] = value(lanes[lane]->b[r], i);
    }
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < 8; ++j) c[i][j] += a[i][k] * b[k][j];
  for (int lane = 0; lane < 32; ++lane)
    for (int r = 0; r < 4; ++r) lanes[lane]->c[r] += c[lane / 4 + 8 * (r >> 1)][lane % 4 * 2 + (r & 1)];
}
inline void mma_bf16(float (&c)[4], const uint32_t* a, const uint32_t* b) {
  Product product{c, a, b, false};
  emulator::together(&product, multiply_fragments);
}
inline void mma_f16(float (&c)[4], const uint32_t* a, const uint32_t* b) {
  Product product{c, a, b, true};
  emulator::together(&product, multiply_fragments);
}

}  // namespace longleaf::ptx

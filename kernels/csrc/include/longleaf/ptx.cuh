// Thin wrappers of the PTX that the kernels use. Everything here exists on sm_90a and sm_120a.
#pragma once

#include <cstdint>

namespace longleaf::ptx {

// Aligned to the copy engine's swizzle pattern.
__device__ __forceinline__ uint8_t* dynamic_shared() {
  extern __shared__ __align__(1024) uint8_t memory[];
  return memory;
}
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same number, which the compiler must think new: what depends on it is computed again, not kept.
__device__ __forceinline__ int recompute(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Keeps the assembler from moving loads down past this point, closer to their use: it leaves only the
// latency of an idle memory pipe between them. `never` is false in a way that it cannot know.
__device__ __forceinline__ void pin_loads(bool never) {
  if (never) asm volatile("exit;");
}

// ---- register pools (warpgroups of four warps) ----
template <int Count>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

// ---- programmatic launches: no effect without the launch attribute ----
// Waits until the kernels that this launch depends on have ended and their writes are visible.
__device__ __forceinline__ void wait_for_launch() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Lets the next launch start as soon as there is room; it waits as above before it reads anything.
__device__ __forceinline__ void allow_next_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- mbarriers ----
__device__ __forceinline__ void mbar_init(uint32_t bar, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}
__device__ __forceinline__ void mbar_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void mbar_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Arrives once `read` is in its register. An arrival orders this warp's loads before other ordinary
// accesses, but not before the writes of the copy engine: a load still under way could see them. The
// assembler keeps both instructions, of which one runs.
__device__ __forceinline__ void mbar_arrive_after(uint32_t bar, uint32_t read) {
  asm volatile(
      "{.reg .pred p; setp.eq.u32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared.b64 _, [%0];\n"
      "@!p mbarrier.arrive.shared.b64 _, [%0];}" ::"r"(bar),
      "r"(read)
      : "memory");
}
__device__ __forceinline__ void mbar_arrive_expect(uint32_t bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mbar_wait(uint32_t bar, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "retry: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra retry;\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

// ---- copies and synchronisation ----
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(bar)
      : "memory");
}
// Rows of a tensor map of boxes of whole rows, from row `row` on.
__device__ __forceinline__ void tensor_copy(uint32_t to, const void* map, int row, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(bar), "r"(0), "r"(row)
      : "memory");
}
__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void copy_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected != 0;
}
template <int Threads>
__device__ __forceinline__ void named_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}
__device__ __forceinline__ unsigned add_acq_rel(unsigned* counter, unsigned value) {
  unsigned old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(counter), "r"(value)
               : "memory");
  return old;
}
__device__ __forceinline__ unsigned load_acquire(const unsigned* counter) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// ---- shared memory ----
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t& a, uint32_t& b, uint32_t& c,
                                                  uint32_t& d, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t& a, uint32_t& b, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(a), "=r"(b)
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ uint2 load_shared2(uint32_t address) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ float2 load_shared_f2(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ uint4 load_shared4(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ __forceinline__ float4 load_shared_f4(uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void store_shared_f2(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void store_shared_f4(uint32_t address, const float (&x)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

// ---- arithmetic ----
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_f16(float (&c)[4], const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float bf16_low(uint32_t x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float bf16_high(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }
// Two e4m3 (the low or the high half of x) to two f16; exact.
__device__ __forceinline__ uint32_t e4m3_low_to_f16(uint32_t x) {
  uint32_t r;
  asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.rn.f16x2.e4m3x2 %0, lo;}" : "=r"(r) : "r"(x));
  return r;
}
__device__ __forceinline__ uint32_t e4m3_high_to_f16(uint32_t x) {
  uint32_t r;
  asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.rn.f16x2.e4m3x2 %0, hi;}" : "=r"(r) : "r"(x));
  return r;
}

}  // namespace longleaf::ptx

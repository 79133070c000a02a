// The warp-wide instructions of the attention kernels: ldmatrix, mma.m16n8k16 and the conversions
// around them. Shared-memory addresses are 32-bit ones of the shared window.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cute/arch/mma_sm80.hpp>
#include <type_traits>

namespace lighttransfer::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The value, of which the compiler knows nothing: it stays in a register.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// threadIdx.x, read again. What derives from it is then computed where it is used, rather than kept
// in registers through loops that have none left.
__device__ __forceinline__ uint32_t thread_anew() {
  uint32_t id;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(id));
  return id;
}

// Does nothing, but the compiler moves no instruction across it.
__device__ __forceinline__ void scheduling_fence() {
  __syncwarp();
}

// Loads and stores of shared memory at an address plus an immediate.
template <int kOffset = 0>
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b32 [%0 + %2], %1;\n" ::"r"(address), "r"(word), "n"(kOffset) : "memory");
}
template <int kOffset>
__device__ __forceinline__ float load_shared(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1 + %2];\n" : "=f"(x) : "r"(address), "n"(kOffset));
  return x;
}

// Calls f(0), ..., f(kCount - 1) with constants, for what must be known when an instruction is
// written.
template <int kCount, int kI = 0, class F>
__device__ __forceinline__ void static_for(const F& f) {
  if constexpr (kI < kCount) {
    f(std::integral_constant<int, kI>{});
    static_for<kCount, kI + 1>(f);
  }
}

// The value of the lane that differs in the bits of kLanes.
template <int kLanes>
__device__ __forceinline__ float shuffle_xor(float x) {
  float y;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, -1;\n" : "=f"(y) : "f"(x), "n"(kLanes));
  return y;
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
template <uint32_t kOffset>
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4 + %5];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address), "n"(kOffset));
}

template <uint32_t kOffset>
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4 + %5];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address), "n"(kOffset));
}

// c += a * b for one m16n8k16 product. With g = lane / 4 and t = lane % 4, c holds the elements
// (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
template <class Element>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  using Atom =
      std::conditional_t<std::is_same_v<Element, __half>, cute::SM80_16x8x16_F32F16F16F32_TN,
                         cute::SM80_16x8x16_F32BF16BF16F32_TN>;
  Atom::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]);
}

// Two elements in one register, `low` in the lower half, by one conversion.
template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<Element, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// 2^x by the special function unit; 2^-inf is 0.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// exp(x). Of a difference of scores, which loses nothing to the change of base.
__device__ __forceinline__ float fast_exp(float x) {
  return fast_exp2(x * 1.4426950408889634f);
}

}  // namespace lighttransfer::cuda

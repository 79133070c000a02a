// The warp instructions of sm_80 that the kernels use, over CuTe's atoms, for fp16 and bf16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>

namespace lighttransfer::cuda {

// What depends on the storage type: the mma atom and the conversions.
template <class T>
struct Half;

template <>
struct Half<__half> {
  using Mma = cute::SM80_16x8x16_F32F16F16F32_TN;
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  }
};

template <>
struct Half<__nv_bfloat16> {
  using Mma = cute::SM80_16x8x16_F32BF16BF16F32_TN;
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
  }
};

// c[16 x 8] += a[16 x 16] b[16 x 8].
template <class T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  Half<T>::Mma::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]);
}

// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], const void* row) {
  cute::SM75_U32x4_LDSM_N::copy(*static_cast<const cute::uint128_t*>(row), r[0], r[1], r[2], r[3]);
}
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], const void* row) {
  cute::SM75_U16x8_LDSM_T::copy(*static_cast<const cute::uint128_t*>(row), r[0], r[1], r[2], r[3]);
}

// The transpose of an 8 x 8 matrix that is spread over the warp as an mma fragment.
__device__ __forceinline__ uint32_t transpose8x8(uint32_t matrix) {
  uint32_t result;
  cute::SM75_U32x1_MOVM_T::copy(matrix, result);
  return result;
}

// 16 bytes from global to shared memory without waiting; zeros where `valid` is false.
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
  cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
      *static_cast<const cute::uint128_t*>(global), *static_cast<cute::uint128_t*>(shared), valid);
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kLog2E = 1.4426950408889634f;

// Of a difference of scores: subtracted first, they lose nothing to the change of base.
__device__ __forceinline__ float exp_approx(float x) {
  return exp2_approx(x * kLog2E);
}

}  // namespace lighttransfer::cuda

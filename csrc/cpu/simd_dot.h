// Dot products of rows in storage precision, summed in fp32: of two rows (Dot), and of one row with
// those of several query heads at once (GroupDot).
#pragma once

#include "simd.h"

namespace lighttransfer::cpu {
namespace {

// A row of E is walked kWidth elements at a time: acc = madd(load(a), load(b), acc), the last step
// with load(p, n). reduce_add(acc) is the product.
template <class E>
struct Dot {
  using Operand = Vec;
  static constexpr int kWidth = kLanes;
  static inline Operand load(const typename E::Storage* p) { return cpu::load<E>(p); }
  static inline Operand load(const typename E::Storage* p, int64_t n) { return cpu::load<E>(p, n); }
  static inline Vec madd(Operand a, Operand b, Vec acc) { return fma(a, b, acc); }
};

#if defined(__AVX512BF16__)
// vdpbf16ps: products of bf16 pairs are exact in fp32; only their sums round.
template <>
struct Dot<Element<DType::kBFloat16>> {
  using Operand = __m512bh;
  static constexpr int kWidth = 32;
  static inline Operand load(const uint16_t* p) {
    return bit_cast<__m512bh>(_mm512_loadu_epi16(p));
  }
  static inline Operand load(const uint16_t* p, int64_t n) {
    const __mmask32 mask = static_cast<__mmask32>((uint64_t{1} << n) - 1);
    return bit_cast<__m512bh>(_mm512_maskz_loadu_epi16(mask, p));
  }
  static inline Vec madd(Operand a, Operand b, Vec acc) { return _mm512_dpbf16_ps(acc, a, b); }
};
#endif

// --- Groups of four lanes: each a vector of its own, with one query head to itself. ---

constexpr int kGroups = kLanes / 4;

template <int i0, int i1, int i2, int i3>
inline Vec permute_groups(Vec v) {
#if defined(__AVX512F__)
  return _mm512_permute_ps(v, i0 | i1 << 2 | i2 << 4 | i3 << 6);
#elif defined(__AVX2__)
  return _mm256_permute_ps(v, i0 | i1 << 2 | i2 << 4 | i3 << 6);
#else
  return __builtin_shufflevector(v, v, i0, i1, i2, i3);
#endif
}

// Lanes i0, i1 of each group of a, then i2, i3 of b.
template <int i0, int i1, int i2, int i3>
inline Vec shuffle_groups(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_shuffle_ps(a, b, i0 | i1 << 2 | i2 << 4 | i3 << 6);
#elif defined(__AVX2__)
  return _mm256_shuffle_ps(a, b, i0 | i1 << 2 | i2 << 4 | i3 << 6);
#else
  return __builtin_shufflevector(a, b, i0, i1, 4 + i2, 4 + i3);
#endif
}

// The sum, or the maximum, of each group in all of its lanes.
inline Vec group_add(Vec v) {
  v += permute_groups<2, 3, 0, 1>(v);
  return v + permute_groups<1, 0, 3, 2>(v);
}

inline Vec group_max(Vec v) {
  v = max(v, permute_groups<2, 3, 0, 1>(v));
  return max(v, permute_groups<1, 0, 3, 2>(v));
}

// Lane i of each group: the sum of that group of v_i.
inline Vec group_add4(Vec v0, Vec v1, Vec v2, Vec v3) {
  const Vec a = shuffle_groups<0, 1, 0, 1>(v0, v1) + shuffle_groups<2, 3, 2, 3>(v0, v1);
  const Vec b = shuffle_groups<0, 1, 0, 1>(v2, v3) + shuffle_groups<2, 3, 2, 3>(v2, v3);
  return shuffle_groups<0, 2, 0, 2>(a, b) + shuffle_groups<1, 3, 1, 3>(a, b);
}

// Dot products of one row of E with the rows of all groups at once: kStep elements of the row, the
// same in every group, meet kStep elements of each group's row.
template <class E>
struct GroupDot;

template <>
struct GroupDot<Element<DType::kFloat32>> : Dot<Element<DType::kFloat32>> {
  static constexpr int kStep = 4;
  static inline Operand load_same(const float* p) {
#if defined(__AVX512F__)
    return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
#elif defined(__AVX2__)
    return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
#else
    return load(p);
#endif
  }
};

#if defined(__AVX512BF16__)
template <>
struct GroupDot<Element<DType::kBFloat16>> : Dot<Element<DType::kBFloat16>> {
  static constexpr int kStep = 8;
  static inline Operand load_same(const uint16_t* p) {
    return bit_cast<__m512bh>(
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
};
constexpr bool kHasBf16Dot = true;
#else
constexpr bool kHasBf16Dot = false;
#endif

}  // namespace
}  // namespace lighttransfer::cpu

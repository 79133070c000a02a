// Dot products of rows in storage precision, summed in fp32: of two rows (Dot), and of many rows
// with the same few (PreparedDot).
#pragma once

#include "simd.h"

namespace lighttransfer::cpu {
namespace {

using F32 = Element<DType::kFloat32>;

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

// --- Groups of four lanes. ---

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

// Group g: the sum of v_g's groups. Lanes of a group stay apart.
inline Vec add_groups(const Vec (&v)[kGroups]) {
#if defined(__AVX512F__)
  const auto fold = [](Vec x, Vec y) {
    return _mm512_shuffle_f32x4(x, y, 0x44) + _mm512_shuffle_f32x4(x, y, 0xee);
  };
  const Vec a = fold(v[0], v[1]), b = fold(v[2], v[3]);
  return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
#elif defined(__AVX2__)
  return _mm256_permute2f128_ps(v[0], v[1], 0x20) + _mm256_permute2f128_ps(v[0], v[1], 0x31);
#else
  return v[0];
#endif
}

// Dot products of rows of E with rows that are prepared once: acc = madd(prepared + d,
// load(row + d), acc) for every multiple d of kWidth, the last step with load(row + d, n).
template <class E>
struct PreparedDot {
  using Prepared = float;
  using Operand = VecPair;
  static constexpr int kWidth = 2 * kLanes;

  // Whole steps: zeros follow the row.
  static inline void prepare(const typename E::Storage* row, int64_t n, Prepared* to) {
    for (int64_t d = 0; d < n; d += kWidth) {
      const VecPair v = n - d < kWidth ? load(row + d, n - d) : load(row + d);
      store<F32>(to + d, v.first);
      store<F32>(to + d + kLanes, v.second);
    }
  }
  static inline Operand load(const typename E::Storage* p) { return load_pair<E>(p); }
  static inline Operand load(const typename E::Storage* p, int64_t n) {
    return load_first<E>(p, n);
  }
  static inline Vec madd(const Prepared* a, Operand b, Vec acc) {
    acc = fma(cpu::load<F32>(a), b.first, acc);
    return fma(cpu::load<F32>(a + kLanes), b.second, acc);
  }
};

#if defined(__AVX512BF16__)
template <>
struct PreparedDot<Element<DType::kBFloat16>> : Dot<Element<DType::kBFloat16>> {
  using Prepared = uint16_t;

  static inline void prepare(const uint16_t* row, int64_t n, Prepared* to) {
    std::memset(to, 0, (n + kWidth - 1) / kWidth * kWidth * sizeof(*to));
    std::memcpy(to, row, n * sizeof(*to));
  }
  static inline Vec madd(const Prepared* a, Operand b, Vec acc) {
    return Dot::madd(Dot::load(a), b, acc);
  }
};
#endif

}  // namespace
}  // namespace lighttransfer::cpu

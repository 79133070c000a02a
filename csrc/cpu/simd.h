// Vectors of fp32 as wide as the instruction set that a file is compiled for: what the kernels that
// are compiled once per instruction set are written in. Everything has internal linkage, because
// each copy of a kernel sees other types under these names.
//
//   kLanes                      16 with AVX-512, 8 with AVX2, 4 otherwise
//   load<E>, store<E>           E = Element<dtype>: fp32, fp16 or bf16 in memory, fp32 in
//                               registers; with a count, only that many leading lanes (the
//                               others load as 0)
#pragma once

#if defined(__x86_64__)
// GCC 12 warns about its own _mm512_undefined_*().
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include <type_traits>

#include "element.h"

// Before a loop over an array of vectors that must stay in registers: GCC keeps it in memory unless
// it unrolls the loop early.
#define LT_UNROLL _Pragma("GCC unroll 16")

namespace lighttransfer::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline Vec broadcast(float x) {
  return x - Vec{};  // not +: -0.0 must stay -0.0
}

// --- Memory. ---

inline Vec fp32_from_fp16(HalfVec h) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(bit_cast<__m256i>(h));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(bit_cast<__m128i>(h));
#else
  const IntVec bits = __builtin_convertvector(h, IntVec);
  const IntVec magnitude = (bits & 0x7fff) << 13;
  // The fp16 exponent read as an fp32 one is 112 too small; the product also normalises subnormals.
  const IntVec scaled = bit_cast<IntVec>(bit_cast<Vec>(magnitude) * 0x1p112f);
  const IntVec infinite = magnitude >= (0x7c00 << 13);
  return bit_cast<Vec>(((bits & 0x8000) << 16) | scaled | (infinite & 0x7f800000));
#endif
}

template <class E>
constexpr bool kIsBf16 = std::is_same_v<E, Element<DType::kBFloat16>>;

template <class E>
inline Vec widen(HalfVec h) {
  if constexpr (kIsBf16<E>) {
#if defined(__AVX512F__)  // GCC 12 would convert in halves
    return bit_cast<Vec>(bit_cast<IntVec>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(h))) << 16);
#else
    return bit_cast<Vec>(__builtin_convertvector(h, IntVec) << 16);
#endif
  } else {
    return fp32_from_fp16(h);
  }
}

template <class E>
inline Vec load(const typename E::Storage* from) {
  if constexpr (sizeof(*from) == 4) {
    Vec v;
    std::memcpy(&v, from, sizeof(v));
    return v;
  } else {
    HalfVec h;
    std::memcpy(&h, from, sizeof(h));
    return widen<E>(h);
  }
}

// The first n elements; 0 <= n <= kLanes. Reads nothing behind them.
template <class E>
inline Vec load(const typename E::Storage* from, int64_t n) {
#if defined(__AVX512F__)
  const __mmask16 mask = static_cast<__mmask16>((1u << n) - 1);
  if constexpr (sizeof(*from) == 4) {
    return _mm512_maskz_loadu_ps(mask, from);
  } else {
    return widen<E>(bit_cast<HalfVec>(_mm256_maskz_loadu_epi16(mask, from)));
  }
#else
  typename E::Storage lanes[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = from[i];
  return load<E>(lanes);
#endif
}

// The bf16 next to each lane, in the upper half of the lane; ties go to even, NaN stays NaN.
inline IntVec round_to_bf16(Vec v) {
  const IntVec bits = bit_cast<IntVec>(v);
  const IntVec rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const IntVec nan = (bits & 0x7fffffff) > 0x7f800000;
  return ((rounded & ~nan) | (nan & 0x7fc00000)) & ~0xffff;
}

// Rounds to nearest even.
template <class E>
inline void store(typename E::Storage* to, Vec v) {
  if constexpr (sizeof(*to) == 4) {
    std::memcpy(to, &v, sizeof(v));
  } else if constexpr (kIsBf16<E>) {
    const HalfVec h = __builtin_convertvector((round_to_bf16(v) >> 16) & 0xffff, HalfVec);
    std::memcpy(to, &h, sizeof(h));
  } else {
#if defined(__AVX512F__)
    const __m256i h = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to, &h, sizeof(h));
#elif defined(__F16C__)
    const __m128i h = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to, &h, sizeof(h));
#else
    for (int i = 0; i < kLanes; ++i) to[i] = E::store(v[i]);
#endif
  }
}

template <class E>
inline void store(typename E::Storage* to, Vec v, int64_t n) {
  typename E::Storage lanes[kLanes];
  store<E>(lanes, v);
  for (int64_t i = 0; i < n; ++i) to[i] = lanes[i];
}

// 2 * kLanes elements in the order that is cheapest to convert: bf16 by even and odd positions, the
// others by halves. What is the same for both vectors, or goes back through store_pair, need not
// care.
struct VecPair {
  Vec first, second;
};

template <class E>
inline VecPair load_pair(const typename E::Storage* from) {
  if constexpr (kIsBf16<E>) {
    IntVec bits;
    std::memcpy(&bits, from, sizeof(bits));
    return {bit_cast<Vec>(bits << 16), bit_cast<Vec>(bits & ~0xffff)};
  } else {
    return {load<E>(from), load<E>(from + kLanes)};
  }
}

template <class E>
inline void store_pair(typename E::Storage* to, VecPair v) {
  if constexpr (kIsBf16<E>) {
    const IntVec bits = ((round_to_bf16(v.first) >> 16) & 0xffff) | round_to_bf16(v.second);
    std::memcpy(to, &bits, sizeof(bits));
  } else {
    store<E>(to, v.first);
    store<E>(to + kLanes, v.second);
  }
}

// The first n of 2 * kLanes elements, in the order of memory.
template <class E>
inline VecPair load_first(const typename E::Storage* from, int64_t n) {
  const int64_t second = n > kLanes ? n - kLanes : 0;
  return {load<E>(from, n - second), load<E>(from + (n - second), second)};
}

template <class E>
inline void store_first(typename E::Storage* to, VecPair v, int64_t n) {
  const int64_t second = n > kLanes ? n - kLanes : 0;
  store<E>(to, v.first, n - second);
  store<E>(to + (n - second), v.second, second);
}

// --- Arithmetic. ---

// a * b + c; rounded once where the instruction set can.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// A NaN in b comes through; one in a may not.
inline Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline Vec min(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// Lanes are summed as a binary tree.
inline float reduce_add(Vec v) {
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof(v));
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// e^x within about 1 ulp, over the whole range: 0 for -inf, subnormals, +inf above 88.7; NaN for
// NaN. Below, x = n ln 2 + r with |r| <= ln 2 / 2.
inline Vec exp(Vec x) {
  x = max(broadcast(-104.0f), x);
  x = min(broadcast(89.0f), x);
  // Adding 1.5 * 2^23 rounds to an integer, which the low bits of the sum then hold.
  const Vec kRound = broadcast(0x1.8p23f);
  const Vec shifted = fma(x, broadcast(0x1.715476p0f), kRound);  // log2(e)
  const Vec n = shifted - kRound;
  Vec r = fma(n, broadcast(-0x1.62e400p-1f), x);  // ln 2 in two parts; n times the first is exact
  r = fma(n, broadcast(-0x1.7f7d1cp-20f), r);
  // Taylor's series is as good as a minimax polynomial here from degree 7 on.
  Vec p = broadcast(1.0f / 5040);
  p = fma(p, r, broadcast(1.0f / 720));
  p = fma(p, r, broadcast(1.0f / 120));
  p = fma(p, r, broadcast(1.0f / 24));
  p = fma(p, r, broadcast(1.0f / 6));
  p = fma(p, r, broadcast(0.5f));
  p = fma(p * r, r, r) + 1.0f;
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, n);
#else
  // 2^n in two factors: one alone would overflow where the result does not, and flush subnormals.
  const IntVec e = bit_cast<IntVec>(shifted) - 0x4b400000;
  const IntVec half = e >> 1;
  const auto power = [](IntVec k) { return bit_cast<Vec>((k + 127) << 23); };
  return p * power(half) * power(e - half);
#endif
}

}  // namespace
}  // namespace lighttransfer::cpu

// 16-bit floating-point formats, without branches so that loops over lanes vectorise.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace cudasim {

inline uint32_t float_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline float bits_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

inline float f16_to_f32(uint16_t h) {
  uint32_t magnitude = uint32_t(h & 0x7FFF) << 13;
  uint32_t bits = float_bits(bits_float(magnitude) * 0x1p112f);  // rebias; exact for subnormals too
  bits |=
      magnitude >= 0x0F800000u ? 0x7F800000u : 0u;  // infinity and NaN keep an all-ones exponent
  return bits_float(bits | uint32_t(h & 0x8000) << 16);
}

inline uint16_t f32_to_f16(float f) {
  uint32_t bits = float_bits(f), magnitude = bits & 0x7FFFFFFFu, sign = bits >> 16 & 0x8000u;
  // 0.5 has the spacing of f16's subnormals, so the addition rounds to it
  uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
  uint32_t normal = (magnitude - 0x38000000u + 0x0FFFu + (magnitude >> 13 & 1)) >> 13;
  uint32_t r = magnitude < 0x38800000u ? subnormal : normal;
  r = magnitude >= 0x477FF000u ? 0x7C00u : r;
  r = magnitude > 0x7F800000u ? 0x7FFFu : r;
  return uint16_t(r | (magnitude > 0x7F800000u ? 0u : sign));
}

inline float bf16_to_f32(uint16_t h) {
  return bits_float(uint32_t(h) << 16);
}

inline uint16_t f32_to_bf16(float f) {
  uint32_t bits = float_bits(f);
  uint32_t r = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
  return uint16_t((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : r);
}

// Towards zero.
inline uint16_t f32_to_bf16_rz(float f) {
  uint32_t bits = float_bits(f);
  return uint16_t((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : bits >> 16);
}
inline uint16_t f32_to_f16_rz(float f) {
  uint16_t r = f32_to_f16(f);
  float magnitude = std::fabs(f), rounded = std::fabs(f16_to_f32(r));
  return uint16_t(rounded > magnitude ? r - 1 : r);
}

// Round a double once: to odd in float first, which makes the second rounding right.
inline float round_to_odd(double d) {
  float f = static_cast<float>(d);
  if (static_cast<double>(f) == d || std::isnan(f)) return f;
  uint32_t bits = float_bits(f);
  bool away = std::fabs(static_cast<double>(f)) > std::fabs(d);
  if (away) --bits;
  return bits_float(bits | 1);
}

inline float flush(float x) {
  return (float_bits(x) & 0x7F800000u) == 0 ? bits_float(float_bits(x) & 0x80000000u) : x;
}

struct F16 {
  static float up(uint16_t h) { return f16_to_f32(h); }
  static uint16_t down(float f) { return f32_to_f16(f); }
  static constexpr uint16_t kInfinity = 0x7C00;
};
struct BF16 {
  static float up(uint16_t h) { return bf16_to_f32(h); }
  static uint16_t down(float f) { return f32_to_bf16(f); }
  static constexpr uint16_t kInfinity = 0x7F80;
};

// min and max of floats: NaN loses unless `nan`, and -0 is below +0.
template <class T, bool kMax, bool kNan>
inline T float_minmax(T a, T b) {
  T r = kMax ? (a > b ? a : b) : (a < b ? a : b);
  if (a == b) r = std::signbit(a) == kMax ? b : a;
  if (kNan) return a != a || b != b ? T(NAN) : r;
  r = b != b ? a : r;
  return a != a ? (b != b ? T(NAN) : b) : r;
}

}  // namespace cudasim

// Scalar conversions between the storage types and fp32, without any library's half types: inline
// functions that other translation units share must not be emitted by files with wide registers.
#pragma once

#include <cstdint>
#include <cstring>

#include "../params.h"

namespace lighttransfer::cpu {
namespace {

template <DType kType>
struct Element;

template <>
struct Element<DType::kFloat32> {
  using Storage = float;
  static inline float load(float x) { return x; }
  static inline float store(float x) { return x; }
};

template <>
struct Element<DType::kBFloat16> {
  using Storage = uint16_t;
  static inline float load(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  // Round to nearest even; NaN stays NaN.
  static inline uint16_t store(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

template <>
struct Element<DType::kFloat16> {
  using Storage = uint16_t;
  static inline float load(uint16_t x) {
    _Float16 half;
    std::memcpy(&half, &x, 2);
    return static_cast<float>(half);
  }
  static inline uint16_t store(float x) {
    const _Float16 half = static_cast<_Float16>(x);
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
  }
};

// Calls body(Element<dtype>{}).
template <class Body>
inline void with_element(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(Element<DType::kFloat32>{});
    case DType::kFloat16:
      return body(Element<DType::kFloat16>{});
    case DType::kBFloat16:
      return body(Element<DType::kBFloat16>{});
  }
}

}  // namespace
}  // namespace lighttransfer::cpu

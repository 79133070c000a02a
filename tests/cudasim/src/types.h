// PTX's fundamental types, and what a suffix of an opcode says about them.
#pragma once

#include <cstdint>
#include <string_view>

namespace cudasim {

enum class Type : uint8_t {
  kNone,
  kPred,
  kB8,
  kU8,
  kS8,
  kB16,
  kU16,
  kS16,
  kF16,
  kBF16,
  kB32,
  kU32,
  kS32,
  kF32,
  kF16x2,
  kBF16x2,
  kTF32,
  kB64,
  kU64,
  kS64,
  kF64,
};

Type parse_type(std::string_view suffix);  // kNone: not a type suffix

constexpr int size_of(Type t) {
  if (t >= Type::kB64) return 8;
  if (t >= Type::kB32) return 4;
  if (t >= Type::kB16) return 2;
  if (t >= Type::kB8) return 1;
  return t == Type::kPred ? 4 : 0;  // a predicate is one bit a lane: a 32-bit mask for the warp
}

constexpr bool is_signed(Type t) {
  return t == Type::kS8 || t == Type::kS16 || t == Type::kS32 || t == Type::kS64;
}

constexpr bool is_float(Type t) {
  return t == Type::kF32 || t == Type::kF64 || t == Type::kF16 || t == Type::kBF16 ||
         t == Type::kF16x2 || t == Type::kBF16x2 || t == Type::kTF32;
}

constexpr int kWarpSize = 32;
constexpr uint32_t kFullMask = 0xFFFFFFFFu;

}  // namespace cudasim

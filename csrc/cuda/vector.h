// Host side: may a kernel move 16 bytes at a time?
#pragma once

#include <vector_types.h>

#include <cstdint>
#include <initializer_list>

#include "../params.h"

namespace lighttransfer::cuda {

constexpr int64_t kVectorElements = 8;  // 16-bit ones in 16 bytes

// Do all rows start at multiples of 16 bytes?
inline bool rows_aligned(const void* data, std::initializer_list<int64_t> strides) {
  bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0;
  for (int64_t stride : strides) aligned = aligned && stride % kVectorElements == 0;
  return aligned;
}
inline bool rows_aligned(const Activation& a) {
  return rows_aligned(a.data, {a.batch_stride, a.token_stride, a.head_stride});
}
inline bool rows_aligned(const KvCache& cache) {
  const auto side = [](const KvCache::Side& s) {
    return rows_aligned(s.data, {s.page_stride, s.slot_stride, s.head_stride});
  };
  return side(cache.k) && side(cache.v);
}

// Calls body(Vector{}) with 16 bytes where every address allows it, else with one element.
template <class Body>
void with_vector(bool aligned, const Body& body) {
  if (aligned) {
    body(uint4{});
  } else {
    body(uint16_t{});
  }
}

}  // namespace lighttransfer::cuda

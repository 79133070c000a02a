// The attention state of one query head over some of a row's keys, as it lies in a decode step's
// workspace, and how two of them become one.
#pragma once

#include "../state.h"
#include "simd.h"

namespace lighttransfer::cpu::LIGHTTRANSFER_ISA {
namespace {

// What a state in the workspace holds behind its `width` outputs.
struct Statistics {
  float lse, mass[2];
};

Statistics& statistics(float* state, int64_t width) {
  return *reinterpret_cast<Statistics*>(state + width);
}
const Statistics& statistics(const float* state, int64_t width) {
  return *reinterpret_cast<const Statistics*>(state + width);
}

// a becomes the state of both splits' keys.
void merge_into(float* a, const float* b, int64_t width) {
  Statistics& to = statistics(a, width);
  const Statistics& from = statistics(b, width);
  const MergeWeights w = merge_weights(to.lse, from.lse);
  if (from.lse == -INFINITY) return;
  if (to.lse == -INFINITY) {
    std::memcpy(a, b, width * sizeof(float));
    to = from;
    return;
  }
  const Vec weight_a = broadcast(w.weight_a), weight_b = broadcast(w.weight_b);
  for (int64_t d = 0; d < width; d += kLanes) {
    store<F32>(a + d, fma(weight_a, load<F32>(a + d), weight_b * load<F32>(b + d)));
  }
  for (int i = 0; i < 2; ++i) {
    to.mass[i] = w.weight_a * to.mass[i] + w.weight_b * from.mass[i];
  }
  to.lse = w.lse;
}

}  // namespace
}  // namespace lighttransfer::cpu::LIGHTTRANSFER_ISA
